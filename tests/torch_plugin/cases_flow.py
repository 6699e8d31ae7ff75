"""The order of things: blocks reused, skipped and reordered, several forwards to a backward, evaluations at odd
moments, exceptions, explicit unshard and reshard, prefetch, edits of the gathered parameters themselves."""

import torch
import torch.nn as nn
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

import compat
from cases_basic import adamw
from cases_edit import local_of
from cases_optim import raw
from models import EncoderDecoder, Net, shard, train_only, world_mesh
from place import synchronize
from run import PARTICULAR, Unsupported, case, reshard_all


def on_gradient(module, function):
    """Calls it in backward, when the gradient of the module's output is there."""

    def hook(module, inputs, output):
        if output.requires_grad:
            output.register_hook(function)

    module.register_forward_hook(hook)


def in_order(*orders, micro_batches=1, **net):
    def train(run):
        model = shard(Net(**net))
        optimizer = adamw(model)
        for order in orders:
            model.order = list(order)
            run.step(model, optimizer, micro_batches)
        run.finish(model)

    return train


case(in_order(*[[0, 1, 0, 2]] * 2), name="block_twice")
case(in_order(*[[0, 1, 0, 2]] * 2, micro_batches=2), name="block_twice_accumulated")
case(in_order(*[[0, 0, 1, 2, 2]] * 2), name="block_twice_in_a_row")
case(in_order(*[[0, 1, 0, 2]] * 2, checkpoint_around="non_reentrant"), name="block_twice_checkpointed")
case(in_order(*[[0, 1, 0, 2]] * 2, checkpoint_around="reentrant"), name="block_twice_checkpointed_reentrant")
case(in_order([0, 1, 2], [0, 2], [0, 1, 2], [1], [0, 1, 2]), name="blocks_skipped_in_some_steps")
case(in_order([0, 1, 2], [2, 1, 0], [1, 0, 2], [0, 1, 2]), name="blocks_in_changing_order")
case(in_order([0, 1], [0, 1], [0, 1, 2], [2]), name="block_first_used_late")


@case
def block_skipped_by_micro_batches(run):
    model = shard(Net())
    optimizer = adamw(model)
    for _ in range(2):
        for order in ([0, 1, 2], [0, 2], [1]):
            model.order = order
            run.loss(model).backward()
        optimizer.step()
        optimizer.zero_grad()
    run.finish(model)


@case
def two_forwards_before_one_backward(run):
    model = shard(Net())
    optimizer = adamw(model)
    for _ in range(2):
        (run.loss(model) + run.loss(model)).backward()
        optimizer.step()
        optimizer.zero_grad()
    run.finish(model)


@case
def two_forwards_then_two_backwards(run):
    """As a pipeline with one batch in flight orders them."""
    model = shard(Net())
    optimizer = adamw(model)
    for _ in range(2):
        losses = [run.loss(model), run.loss(model)]
        for loss in losses:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    run.finish(model)


@case
def forward_whose_backward_never_comes(run):
    model = shard(Net())
    optimizer = adamw(model)
    for _ in range(2):
        run.loss(model, "dropped")
        run.step(model, optimizer)
    run.finish(model)


@case
def backward_of_half_of_the_model(run):
    """The loss hangs on the second block: the groups behind it gather in forward and see no backward."""
    model = shard(Net())
    optimizer = adamw(model)
    seen = {}
    model.blocks[1].register_forward_hook(lambda module, inputs, output: seen.update(middle=output))
    for step in range(4):
        loss = run.loss(model)
        if step % 2:
            loss = (seen["middle"] ** 2).mean()
            run.record("middle", loss)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    seen.clear()  # a graph held by a hook of its own model is never collected
    run.finish(model)


@case
def backward_twice_through_one_graph(run):
    model = shard(Net())
    optimizer = adamw(model)
    for _ in range(2):
        loss = run.loss(model)
        loss.backward(retain_graph=True)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    run.finish(model)


@case
def gradient_of_the_input(run):
    model = shard(Net())
    optimizer = adamw(model)
    for _ in range(2):
        x, y = run.batch()
        x.requires_grad_()
        loss = ((model(x) - y) ** 2).mean()
        loss.backward()
        run.record("input gradient", x.grad)
        optimizer.step()
        optimizer.zero_grad()
    run.finish(model)


def evaluated(mode, place, **shard_kwargs):
    def train(run):
        model = shard(Net(n_blocks=2), **shard_kwargs)
        optimizer = adamw(model)
        for _ in range(2):
            if place == "before_any_step":
                run.evaluate(model, mode=mode)
            loss = run.loss(model)
            if place == "between_forward_and_backward":
                run.evaluate(model, n=2, mode=mode)
            loss.backward()
            if place == "between_backward_and_step":
                run.evaluate(model, mode=mode)
            optimizer.step()
            optimizer.zero_grad()
            if place == "between_steps":
                run.evaluate(model, n=3, mode=mode)
        run.finish(model)

    return train


for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
    for place in ("before_any_step", "between_steps", "between_backward_and_step", "between_forward_and_backward"):
        if mode is torch.inference_mode and place == "before_any_step":
            continue  # FSDP2 itself cannot train on after a first gather under inference mode
        case(evaluated(mode, place), name=f"evaluation_{mode.__name__}_{place}")
case(
    evaluated(torch.no_grad, "between_forward_and_backward", reshard_after_forward=False),
    name="evaluation_between_forward_and_backward_kept_unsharded",
)


@case
def evaluation_of_one_block_between_forward_and_backward(run):
    model = shard(Net())
    optimizer = adamw(model)
    x = run.randn(6, 24)
    run.loss(model).backward()
    for _ in range(2):
        loss = run.loss(model)
        with torch.no_grad():
            run.record("block", model.blocks[1](x))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    run.finish(model)


@case
def evaluation_inside_of_backward(run):
    """A hook on a gradient runs a block again while its own group waits for backward."""
    model = shard(Net())
    optimizer = adamw(model)
    x = run.randn(6, 24)

    def look(gradient):
        with torch.no_grad():
            run.record("inside", model.blocks[0](x))

    on_gradient(model.blocks[2], look)
    for _ in range(2):
        run.loss(model).backward()
        optimizer.step()
        optimizer.zero_grad()
    run.finish(model)


@case
def encoder_runs_as_its_own_root(run):
    model = EncoderDecoder()
    shard(model, blocks=[*model.encoder.blocks, *model.decoder, model.encoder])
    optimizer = adamw(model)
    for step in range(4):
        run.step(model, optimizer)
        x, _ = run.batch()
        with torch.no_grad():
            run.record("encoded", model.encoder(x))
        if step % 2:
            loss = (model.encoder(x) ** 2).mean()
            run.record("encoder loss", loss)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    run.finish(model)


@case
def encoder_runs_without_grad_inside(run):
    """The grad mode changes within one root forward."""
    model = EncoderDecoder(encoder_without_grad=True)
    shard(model, blocks=[*model.encoder.blocks, *model.decoder])
    optimizer = adamw(model)
    run.train(model, optimizer, micro_batches=2)
    run.finish(model)


@case
def blocks_run_by_hand(run):
    """The root's forward never runs: every block is a root of its own."""
    model = Net()
    for block in model.blocks:
        fully_shard(block, mesh=world_mesh())
    compat.sum_only(model)
    optimizer = torch.optim.AdamW(model.blocks.parameters(), lr=1e-2, foreach=True)
    for _ in range(2):
        x = run.randn(6, 24)
        for i in (0, 1, 2, 1):
            x = model.blocks[i](x)
        loss = (x**2).mean()
        run.record("loss", loss)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    run.finish(model)


@case
def method_other_than_forward(run):
    model = shard(Net())

    def encode(self, x):
        return self.up(self.norm(x)).sum(-1)

    for block in model.blocks:
        type(block).encode = encode
        register_fsdp_forward_method(block, "encode")
    optimizer = adamw(model)
    for _ in range(2):
        run.step(model, optimizer)
        x = run.randn(6, 24)
        with torch.no_grad():
            run.record("encoded", model.blocks[1].encode(x))
    run.finish(model)


@case
def a_block_used_twice_is_written_into_on_one_rank(run):
    """In an evaluation, counted: a weight is clamped where a value of that rank's batch is too large."""
    model = shard(Net(n_blocks=2))
    model.order = [0, 1, 0]
    optimizer = adamw(model)

    def clamp(module, inputs):
        if run.rank == 0 and not torch.is_grad_enabled():
            module.weight.clamp_(-0.1, 0.1)

    model.blocks[0].up.register_forward_pre_hook(clamp)
    for _ in range(2):
        run.step(model, optimizer)
        run.evaluate(model)
    run.finish(model, optimizer)


class Broken(Exception):
    pass


def interrupted(where, reset, evaluate=False, loads=False, averages=False):
    """Every rank raises at one place, catches it, and trains on. `loads`: from other weights. `averages`: it evaluates
    twice first, and writes the weights in between."""

    def train(run):
        model = shard(Net(n_blocks=2))
        optimizer = adamw(model)
        if reset and not hasattr(model, "reset_iter_state"):
            raise Unsupported("this torch has no reset_iter_state")
        armed = []

        def strike(*args):
            if armed:
                armed.pop()
                raise Broken

        if where == "in_forward":
            model.blocks[1].up.register_forward_pre_hook(lambda module, inputs: strike())
        elif where == "after_a_block":
            model.blocks[1].register_forward_hook(lambda module, inputs, output: strike())
        elif where == "in_the_head":
            model.head.register_forward_pre_hook(lambda module, inputs: strike())
        else:
            on_gradient(model.blocks[1].up, strike)
        if where == "in_backward" and not reset:
            # FSDP2 then registers no end of the next backward, in which its compute would wait for the reductions
            optimizer.register_step_pre_hook(lambda *_: synchronize())
        run.step(model, optimizer)
        for _ in range(2):
            armed.append(True)
            try:
                if evaluate:
                    run.evaluate(model)
                else:
                    run.loss(model, "interrupted").backward()
                raise AssertionError("nothing was raised")
            except Broken:
                model.train()
            if reset:
                model.reset_iter_state()
            else:
                reshard_all(model)
            for kind in ("load",) * loads + ("average",) * averages:
                if kind == "average":
                    run.evaluate(model)
                for parameter in model.parameters():
                    parameter.data.mul_(0.75)
                if kind == "average":
                    run.evaluate(model)
            optimizer.zero_grad()
            run.step(model, optimizer)
            run.evaluate(model)
        run.finish(model)

    return train


for where in ("in_forward", "after_a_block", "in_the_head", "in_backward"):
    case(interrupted(where, False), name=f"exception_{where}")
    case(interrupted(where, True), name=f"exception_{where}_then_reset")
case(interrupted("in_forward", False, evaluate=True), name="exception_in_evaluation")
for where in ("after_a_block", "in_the_head", "in_backward"):
    case(interrupted(where, False, loads=True), name=f"exception_{where}_then_load")
case(interrupted("in_backward", True, loads=True), name="exception_in_backward_then_reset_and_load")
case(interrupted("in_backward", False, averages=True), name="exception_in_backward_then_weights_averaged")


@case
def unshard_and_reshard_by_hand(run):
    model = shard(Net())
    optimizer = adamw(model)
    for step in range(4):
        model.unshard()
        for block in model.blocks:
            block.unshard()
        for name, p in model.named_parameters():
            run.record(f"full {name}", p)
        if step % 2:
            for block in model.blocks:
                block.reshard()
        loss = run.loss(model)
        if step > 1:
            reshard_all(model)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    run.finish(model)


@case
def unshard_async(run):
    model = shard(Net())
    optimizer = adamw(model)
    for step in range(4):
        handles = [block.unshard(async_op=True) for block in model.blocks]
        if step % 2:
            for handle in handles:
                handle.wait()
        run.step(model, optimizer)
        handle = model.blocks[0].unshard(async_op=True)
        if step != 2:  # in one step it is left pending
            handle.wait()
            model.blocks[0].reshard()
        run.evaluate(model)
    run.finish(model)


@case
def unshard_then_edit_then_forward(run):
    """What the user unsharded stays as it was gathered, whatever happens to the shards, until it is resharded."""
    model = shard(Net())
    optimizer = adamw(model)
    sharded = list(model.parameters())
    run.step(model, optimizer)
    for block in model.blocks:
        block.unshard()
    for p in sharded:
        p.data._local_tensor.mul_(0.875)
    run.step(model, optimizer)
    run.evaluate(model)
    run.finish(model)


def prefetching(forward, backward):
    def train(run):
        model = shard(Net(n_blocks=4))
        blocks = list(model.blocks)
        for i, block in enumerate(blocks):
            if forward:
                block.set_modules_to_forward_prefetch(blocks[i + 1 : i + 3])
            if backward:
                block.set_modules_to_backward_prefetch(blocks[max(0, i - 2) : i][::-1])
        optimizer = adamw(model)
        for _ in range(2):
            run.step(model, optimizer, micro_batches=2)
            run.evaluate(model)
        run.finish(model)

    return train


case(prefetching(True, False), name="prefetch_in_forward")
case(prefetching(False, True), name="prefetch_in_backward")
case(prefetching(True, True), name="prefetch_in_both")


@case
def prefetch_of_a_block_that_is_skipped(run):
    model = shard(Net())
    blocks = list(model.blocks)
    blocks[0].set_modules_to_forward_prefetch([blocks[1], blocks[2]])
    optimizer = adamw(model)
    for order in ([0, 1, 2], [0, 2], [0], [0, 1, 2]):
        model.order = order
        run.step(model, optimizer)
    run.finish(model)


@case
def no_unshard_in_backward(run):
    model = shard(Net())
    embed_only = model.blocks[0]
    embed_only.set_unshard_in_backward(True)
    optimizer = adamw(model)
    run.train(model, optimizer)
    run.finish(model)


@case
def unsharded_storage_kept(run):
    model = shard(Net())
    if not hasattr(model, "set_keep_unsharded_storage"):
        raise Unsupported("this torch has no set_keep_unsharded_storage")
    model.set_keep_unsharded_storage(True)
    optimizer = adamw(model)
    for _ in range(2):
        run.step(model, optimizer)
        run.evaluate(model)
    run.finish(model)


def gathered_edit(write, in_evaluation, **shard_kwargs):
    """A hook writes to the gathered parameters inside the block's forward.  FSDP2 drops that at reshard: the backward
    gathers what the shards hold.  A cache that stores a region after forward, or keeps it, keeps the edit."""

    def train(run):
        model = shard(Net(n_blocks=2), **shard_kwargs)
        optimizer = adamw(model)

        def hook(module, inputs, *output):
            if in_evaluation and torch.is_grad_enabled():
                return
            with torch.no_grad():
                if write == "data":
                    module.weight.data.mul_(0.5)
                elif write == "counted":
                    module.weight.mul_(0.5)
                else:
                    raw(module.weight).mul_(0.5)

        for block in model.blocks:
            block.up.register_forward_pre_hook(hook)
        for _ in range(2):
            if in_evaluation:
                run.evaluate(model, n=2)
            run.step(model, optimizer, micro_batches=2)
        run.finish(model)

    return train


for write in ("data", "counted", "raw"):
    case(gathered_edit(write, False), name=f"gathered_parameter_edited_in_forward_{write}")
    case(gathered_edit(write, True), name=f"gathered_parameter_edited_in_evaluation_{write}")
case(gathered_edit("data", False, reshard_after_forward=False), name="gathered_parameter_edited_kept_unsharded")


def shard_edited_inside_forward_and_undone(read):
    """Hooks of the root write to a block's shard, invisibly, before the block gathers it, and undo that before
    the backward pass, which must have what the shard says then."""

    def train(run):
        model = shard(Net())
        optimizer = adamw(model)
        weight = model.blocks[1].up.weight

        def scale(by):
            def hook(*_):
                if read == "data":
                    weight.data._local_tensor.mul_(by)
                else:
                    raw(local_of(weight)).mul_(by)

            return hook

        model.register_forward_pre_hook(scale(0.5))
        model.register_forward_hook(scale(2.0))
        for _ in range(3):
            run.step(model, optimizer)
        run.finish(model)

    return train


for read in ("data", "raw"):
    case(shard_edited_inside_forward_and_undone(read), into=PARTICULAR, name=f"shard_edited_and_undone_{read}")


@case
def gathered_parameter_edited_in_backward(run):
    model = shard(Net())
    optimizer = adamw(model)

    def spoil(gradient):
        model.blocks[1].up.weight.data.mul_(0.5)

    on_gradient(model.blocks[1], spoil)
    for _ in range(2):
        run.step(model, optimizer, micro_batches=2)
    run.finish(model)


@case
def gathered_parameter_edited_after_unshard(run):
    model = shard(Net())
    optimizer = adamw(model)
    for _ in range(2):
        for block in model.blocks:
            block.unshard()
            block.up.weight.data.mul_(0.5)
            block.reshard()
        run.step(model, optimizer)
    run.finish(model)


@case
def gathered_parameter_held_past_reshard(run):
    """A script that keeps the gathered parameter object finds it again, with its data, at the next gather."""
    model = shard(Net())
    optimizer = adamw(model)
    block = model.blocks[1]
    block.unshard()
    held = block.up.weight
    block.reshard()
    for _ in range(2):
        run.step(model, optimizer)
        block.unshard()
        run.record("same object", block.up.weight is held)
        run.record("held", held)
        block.reshard()
    run.finish(model)


@case
def frozen_block_runs_under_no_grad_only(run):
    model = train_only(Net(), "blocks.1", "blocks.2", "head")
    shard(model)
    optimizer = adamw(model)
    for _ in range(2):
        x, y = run.batch()
        with torch.no_grad():
            target = model(x)
        loss = nn.functional.mse_loss(model(x * 0.5), target + y)
        run.record("loss", loss)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    run.finish(model)


@case
def a_reduction_that_the_backend_refuses(run):
    """An error of FSDP2's own: a gradient divide factor, which gloo cannot apply."""
    model = shard(Net())
    optimizer = adamw(model)
    run.train(model, optimizer)
    if not hasattr(model, "set_gradient_divide_factor") or not hasattr(model, "set_force_sum_reduction_for_comms"):
        raise Unsupported("this torch divides otherwise")
    model.blocks[1].set_force_sum_reduction_for_comms(False)
    model.blocks[1].set_gradient_divide_factor(3.0)
    try:
        run.loss(model).backward()
    except Exception as error:
        run.record("raised", f"{type(error).__name__}: {error}".splitlines()[0])
        run.extra["notes"] = getattr(error, "__notes__", None) or str(error).splitlines()[1:]
