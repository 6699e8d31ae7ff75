"""Edits of parameters beside training: each way to write, at each moment where a gathered copy may be held."""

import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
)
from torch.distributed.tensor import DTensor

from cases_basic import adamw
from cases_optim import raw
from models import Net, shard, train_only
from run import Unsupported, case, reshard_all


def local_of(p):
    return p._local_tensor if isinstance(p, DTensor) else p


def param_mul(ps):
    with torch.no_grad():
        for p in ps:
            p.mul_(0.875)


def param_copy(ps):
    with torch.no_grad():
        for p in ps:
            p.copy_(p.detach().clone() * 0.875)


def local_mul(ps):
    with torch.no_grad():
        for p in ps:
            p.to_local().mul_(0.875)


def data_mul(ps):
    for p in ps:
        p.data.mul_(0.875)


def data_local_mul(ps):
    for p in ps:
        p.data._local_tensor.mul_(0.875)


def foreach_mul(ps):
    with torch.no_grad():
        torch._foreach_mul_(list(ps), 0.875)


def detached_mul(ps):
    for p in ps:
        p.detach().mul_(0.875)


def inference_mul(ps):
    with torch.inference_mode():
        for p in ps:
            local_of(p).mul_(0.875)


def raw_scale(ps):
    for p in ps:
        raw(local_of(p)).mul_(0.875)


def raw_one_ulp(ps):
    """The smallest change there is, in one element of each shard."""
    for p in ps:
        bits = raw(local_of(p)).view(torch.int32)
        bits[:1].bitwise_xor_(1)


def raw_swap_halves(ps):
    """Sums, maxima and other order-blind fingerprints stay as they were."""
    for p in ps:
        words = raw(local_of(p))
        half = len(words) // 2
        if half:
            words[: 2 * half] = torch.cat([words[half : 2 * half], words[:half]])


def raw_swap_between_parameters(ps):
    """Two shards of one shape trade their content: a fingerprint over the whole group that adds up sees nothing."""
    by_shape = {}
    for p in ps:
        by_shape.setdefault(tuple(local_of(p).shape), []).append(raw(local_of(p)))
    for arrays in by_shape.values():
        for a, b in zip(arrays[::2], arrays[1::2]):
            a[:], b[:] = b.clone(), a.clone()


WRITES = {
    "counted": [param_mul, param_copy, local_mul, detached_mul, inference_mul],
    "uncounted": [data_mul, data_local_mul, foreach_mul],
    "raw": [raw_scale, raw_one_ulp, raw_swap_halves, raw_swap_between_parameters],
}
ONE_RANK = [local_mul, data_local_mul, inference_mul, raw_scale, raw_one_ulp]


def edited(place, writes, rank=None, frozen=False):
    """One write after another, each at a place where no optimizer has stepped since the last gather, so that the write
    alone must tell.  With `rank` only that rank writes: the others learn of it, or gather at cross purposes."""

    def train(run):
        model = train_only(Net(n_blocks=2, lora=3), "lora_", "head") if frozen else Net(n_blocks=2)
        shard(model)
        optimizer = adamw(model)
        sharded = list(model.parameters())
        run.step(model, optimizer)
        for write in writes:
            tag = f"loss around {write.__name__}"

            def edit():
                if rank is None or run.rank == rank:
                    write(sharded)

            if place == "between_evaluations":
                with torch.no_grad():
                    run.loss(model, tag)
                    edit()
                    run.loss(model, tag)
                continue
            loss = run.loss(model, tag)
            if place == "between_forward_and_backward":
                edit()
            loss.backward()
            for i, p in enumerate(sharded):
                if p.grad is not None:
                    run.record(f"gradient {i} around {write.__name__}", p.grad)
            if place == "between_micro_batches":
                edit()
            elif place == "after_an_evaluation":
                run.evaluate(model)
                reshard_all(model)
                edit()
        run.step(model, optimizer)
        run.finish(model)

    return train


PLACES = ("between_micro_batches", "between_forward_and_backward", "between_evaluations", "after_an_evaluation")
for place in PLACES:
    for kind, writes in WRITES.items():
        case(edited(place, writes), name=f"edits_{kind}_{place}")
for place in PLACES[:3]:
    case(edited(place, ONE_RANK, rank=2), name=f"edits_on_one_rank_{place}")
case(
    edited("between_micro_batches", [param_mul, data_mul, foreach_mul, raw_one_ulp], frozen=True),
    name="edits_of_frozen_groups",
)


@case
def edit_one_block_only(run):
    model = shard(Net())
    optimizer = adamw(model)
    block = list(model.blocks[1].parameters())
    for write in (param_mul, data_mul, raw_scale):
        run.loss(model).backward()
        write(block)
        run.loss(model).backward()
        optimizer.step()
        optimizer.zero_grad()
    run.finish(model)


@case
def edit_what_parameters_returns_between_forward_and_backward(run):
    """After its forward a block must show its sharded parameters, kept on the device or not: what a script sees and
    writes there is part of training."""
    model = shard(Net())
    optimizer = adamw(model)
    for _ in range(3):
        loss = run.loss(model)
        run.record("kinds", [(n, isinstance(p, DTensor), tuple(p.shape)) for n, p in model.named_parameters()])
        with torch.no_grad():
            for p in model.blocks.parameters():
                p.mul_(0.9)
        loss.backward()
        run.record("kinds", [(n, isinstance(p, DTensor)) for n, p in model.named_parameters()])
        optimizer.step()
        optimizer.zero_grad()
        run.evaluate(model)
        run.record("kinds", [(n, isinstance(p, DTensor)) for n, p in model.named_parameters()])
    run.finish(model)


@case
def edit_and_undo_within_a_step(run):
    """A to B to A, with a gather at B: a copy is fresh by content, not by count of writes."""
    model = shard(Net())
    optimizer = adamw(model)
    sharded = list(model.parameters())
    for _ in range(2):
        run.loss(model).backward()
        held = [local_of(p).clone() for p in sharded]
        raw_scale(sharded)
        run.loss(model).backward()
        for p, old in zip(sharded, held):
            raw(local_of(p))[:] = raw(old)
        run.loss(model).backward()
        optimizer.step()
        optimizer.zero_grad()
    run.finish(model)


def write_data(ps, values):
    for p, value in zip(ps, values):
        p.data.copy_(value)


def write_raw(ps, values):
    for p, value in zip(ps, values):
        raw(p)[:] = raw(value)


def ema(write, mode, reshard_first, look_first):
    """Weights averaged over time take the model's place for an evaluation and give it back."""

    def train(run):
        model = shard(Net(n_blocks=2))
        optimizer = adamw(model)
        sharded = list(model.parameters())
        averages = [p.detach().clone() for p in sharded]
        for _ in range(2):
            run.step(model, optimizer)
            for average, p in zip(averages, sharded):
                average.mul_(0.5).add_(p.detach(), alpha=0.5)
            if look_first:
                run.evaluate(model, mode=mode, tag="own")
            if reshard_first:
                reshard_all(model)
            held = [p.detach().clone() for p in sharded]
            write(sharded, averages)
            run.evaluate(model, n=2, mode=mode, tag="average")
            if reshard_first:
                reshard_all(model)
            write(sharded, held)
            if look_first:
                run.evaluate(model, mode=mode, tag="own again")
        run.finish(model)

    return train


for write in (write_data, write_raw):
    short = write.__name__[6:]
    case(ema(write, torch.no_grad, True, False), name=f"ema_swap_{short}")
    case(ema(write, torch.no_grad, False, False), name=f"ema_swap_{short}_without_reshard")
    case(ema(write, torch.no_grad, True, True), name=f"ema_swap_{short}_among_evaluations")
    case(ema(write, torch.enable_grad, True, True), name=f"ema_swap_{short}_with_grad_enabled")
case(ema(write_data, torch.inference_mode, True, True), name="ema_swap_data_in_inference_mode")


def scaled_state(model, factor=0.875):
    return {name: value.clone() * factor for name, value in model.state_dict().items()}


def loaded(how, place):
    def train(run):
        model = shard(Net(n_blocks=2))
        optimizer = adamw(model)

        def load():
            options = {"assign": True} if how == "assign" else {}
            model.load_state_dict(scaled_state(model), **options)

        run.step(model, optimizer)
        for _ in range(2):
            if place == "between_steps":
                load()
            elif place == "between_micro_batches":
                run.loss(model).backward()
                load()
                if how == "assign":
                    optimizer = adamw(model)
            elif place == "after_evaluation":
                run.evaluate(model)
                load()
            loss = run.loss(model)
            if place == "between_forward_and_backward":
                load()
            loss.backward()
            if how == "assign":
                optimizer = adamw(model)
            optimizer.step()
            optimizer.zero_grad()
            run.evaluate(model)
        run.finish(model)

    return train


for how in ("copy", "assign"):
    for place in ("between_steps", "between_micro_batches", "between_forward_and_backward", "after_evaluation"):
        case(loaded(how, place), name=f"load_state_dict_{how}_{place}")


@case
def load_state_dict_of_frozen_weights(run):
    model = train_only(Net(lora=3), "lora_", "head")
    shard(model)
    optimizer = adamw(model)
    for _ in range(3):
        run.step(model, optimizer)
        state = {k: v for k, v in scaled_state(model).items() if "lora_" not in k}
        model.load_state_dict(state, strict=False)
    run.finish(model)


def checkpoint_api(full, place):
    """torch.distributed.checkpoint's own way in and out of a model in mid-run."""

    def train(run):
        model = shard(Net(n_blocks=2))
        optimizer = adamw(model)
        options = StateDictOptions(full_state_dict=full)
        saved = None
        for step in range(3):
            loss = run.loss(model)
            if place == "between_forward_and_backward" and step:
                state = get_model_state_dict(model, options=options)
                for name in sorted(state):
                    run.record(f"got {name}", state[name])
                if step == 2:
                    set_model_state_dict(model, saved, options=options)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if place == "between_steps" or step == 0:
                state = get_model_state_dict(model, options=options)
                saved = saved or {k: v.clone() * 1.25 for k, v in state.items()}
                for name in sorted(state):
                    run.record(f"got {name}", state[name])
                if step == 1:
                    set_model_state_dict(model, saved, options=options)
                run.evaluate(model)
        run.finish(model)

    return train


for full in (False, True):
    for place in ("between_steps", "between_forward_and_backward"):
        case(checkpoint_api(full, place), name=f"checkpoint_api_{'full' if full else 'sharded'}_{place}")


@case
def rollback_of_model_and_optimizer(run):
    """A step that went wrong is undone from a saved state, and training goes on from there."""
    model = shard(Net())
    optimizer = adamw(model)
    run.train(model, optimizer, steps=2)
    state, _ = get_state_dict(model, [])
    saved = {k: v.clone() for k, v in state.items()}
    run.train(model, optimizer, steps=2)
    model.load_state_dict(saved)
    run.evaluate(model)
    run.train(model, optimizer, steps=2)
    run.finish(model)


@case
def parameters_freeze_and_thaw(run):
    model = shard(Net())
    optimizer = adamw(model)
    names = dict(model.named_parameters())
    for step in range(6):
        for name, p in names.items():
            if "blocks.1" in name:
                p.requires_grad_(step not in (1, 2))
            if "blocks.2.up" in name:
                p.requires_grad_(step not in (2, 3))
        run.step(model, optimizer)
    run.finish(model)


@case
def parameters_freeze_between_micro_batches(run):
    model = shard(Net())
    optimizer = adamw(model)
    block = list(model.blocks[1].parameters())
    for step in range(3):
        run.loss(model).backward()
        for p in block:
            p.requires_grad_(False)
        run.loss(model).backward()
        for p in block:
            p.requires_grad_(True)
        optimizer.step()
        optimizer.zero_grad()
    run.finish(model)


@case
def frozen_weights_edited_while_frozen_then_thawed(run):
    model = train_only(Net(), "blocks.0", "head")
    shard(model)
    held = list(model.parameters())
    optimizer = torch.optim.AdamW(held, lr=1e-2, foreach=True)
    run.step(model, optimizer)
    raw_scale([p for p in held if not p.requires_grad])
    run.step(model, optimizer)
    for p in held:
        p.requires_grad_(True)
    run.train(model, optimizer, steps=2)
    run.finish(model)


@case
def parameters_replaced_by_swap_tensors(run):
    """The other way that torch loads a state: the tensors trade their insides."""
    model = shard(Net())
    optimizer = adamw(model)
    run.step(model, optimizer)
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        try:
            model.load_state_dict(scaled_state(model))
        except RuntimeError as error:
            raise Unsupported(f"swap_tensors: {error}") from None
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)
    run.train(model, adamw(model), steps=2)
    run.finish(model)
