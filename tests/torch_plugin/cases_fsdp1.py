"""FSDP1 (FullyShardedDataParallel): its strategies, options and state dicts, and writes that it would gather."""

import contextlib
import functools

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    MixedPrecision,
    ShardingStrategy,
    StateDictType,
)
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

from cases_optim import raw
from ledger import parameter_bytes
from models import Net, TiedLM, train_only, wrap
from place import DEVICE, synchronize
from run import COUNTING, case

LR = 1e-2
BF16 = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
LORA = functools.partial(Net, lora=4)


def adamw(model):
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=LR)


def flat_parameters(model):
    return [module._handle.flat_param for module in FSDP.fsdp_modules(model) if module._handle]


def rounds(run, model, optimizer, steps=2, micro_batches=2, between=lambda: None):
    """Steps of several micro-batches with `between()` after each; an evaluation after each step."""
    for _ in range(steps):
        for _ in range(micro_batches):
            (run.loss(model) / micro_batches).backward()
            between()
        optimizer.step()
        optimizer.zero_grad()
        between()
        run.evaluate(model)


def trained(make=Net, optimizer=adamw, steps=2, micro_batches=2, **kwargs):
    def train(run):
        model = wrap(make(), **kwargs)
        o = optimizer(model)
        rounds(run, model, o, steps, micro_batches)
        run.finish(model, o)

    return train


def hybrid(shard_groups, replicas, strategy=ShardingStrategy.HYBRID_SHARD):
    def train(run):
        mine = []
        for kind in (shard_groups, replicas):
            made = [dist.new_group(ranks) for ranks in kind]
            mine.append(next(group for group, ranks in zip(made, kind) if run.rank in ranks))
        model = wrap(Net(), process_group=tuple(mine), sharding_strategy=strategy, use_orig_params=True)
        rounds(run, model, adamw(model))
        run.finish(model)

    return train


def checkpointed(where, how, **kwargs):
    def train(run):
        implementation = CheckpointImpl.REENTRANT if how == "reentrant" else CheckpointImpl.NO_REENTRANT
        model = Net(dropout=0.2, checkpoint_around=how if where == "around" else None)
        if where == "inside":
            for i, block in enumerate(model.blocks):
                model.blocks[i] = checkpoint_wrapper(block, checkpoint_impl=implementation)
        model = wrap(model, **kwargs)
        rounds(run, model, adamw(model))
        run.finish(model)

    return train


def accumulated_without_sync(**kwargs):
    def train(run):
        model = wrap(Net(), **kwargs)
        o = adamw(model)
        for _ in range(2):
            with model.no_sync():
                for _ in range(2):
                    run.loss(model).backward()
            run.loss(model).backward()
            o.step()
            o.zero_grad()
        run.finish(model, o)

    return train


def clipped(**kwargs):
    def train(run):
        model = wrap(Net(), **kwargs)
        o = adamw(model)
        for _ in range(2):
            run.loss(model).backward()
            run.record("norm", model.clip_grad_norm_(0.1))
            o.step()
            o.zero_grad()
        run.finish(model)

    return train


def edited(how, use_orig_params, one_rank=False):
    """Writes into shards between micro-batches: announced by a counter, or by nothing."""

    def train(run):
        model = wrap(Net(), use_orig_params=use_orig_params)
        o = adamw(model)

        def between():
            if one_rank and run.rank != 1:
                return
            for p in model.parameters():
                if how == "counted":
                    with torch.no_grad():
                        p.mul_(0.9)
                elif how == "data":
                    p.data.mul_(0.9)
                elif p.numel():
                    raw(p)[:1].add_(0.25)

        rounds(run, model, o, between=between)
        run.finish(model)

    return train


def swapped(use_orig_params):
    """An average of the weights takes their place for an evaluation, by .data; FSDP1 forgets such a flat parameter
    at its reshard."""

    def train(run):
        model = wrap(Net(), use_orig_params=use_orig_params)
        o = adamw(model)
        average = [p.detach().clone() for p in model.parameters()]
        for _ in range(3):
            run.step(model, o)
            kept = [p.data for p in model.parameters()]
            for p, mean in zip(model.parameters(), average):
                mean.lerp_(p.detach(), 0.5)
                p.data = mean.clone()
            run.evaluate(model)
            for p, data in zip(model.parameters(), kept):
                p.data = data
            run.evaluate(model)
        run.finish(model)

    return train


def summoned(**kwargs):
    def train(run):
        model = wrap(Net(), **kwargs)
        o = adamw(model)
        for step in range(3):
            run.step(model, o)
            with FSDP.summon_full_params(model):
                for name, p in model.named_parameters():
                    run.record(f"whole {name}", p)
                with torch.no_grad():
                    model.blocks[1].up.weight.mul_(0.5)
            run.evaluate(model)
            with FSDP.summon_full_params(model, writeback=False):
                with torch.no_grad():
                    model.blocks[0].up.weight.zero_()  # is forgotten
            with FSDP.summon_full_params(model.blocks[2], writeback=False, rank0_only=True):
                if run.rank == 0:
                    run.record("of one block", model.blocks[2].down.weight)
            run.evaluate(model)
        run.finish(model)

    return train


def reloaded(kind, use_orig_params, **kwargs):
    """A state dict is taken, training goes on, and the state dict is loaded in its middle."""

    def train(run):
        model = wrap(Net(), use_orig_params=use_orig_params, **kwargs)
        o = adamw(model)
        run.step(model, o)
        with FSDP.state_dict_type(model, getattr(StateDictType, f"{kind}_STATE_DICT")):
            saved = {
                name: value.clone() if type(value) is torch.Tensor else value
                for name, value in model.state_dict().items()
            }
            if kind == "FULL":
                for name, value in saved.items():
                    run.record(f"saved {name}", value)
            for _ in range(2):
                run.step(model, o)
                model.load_state_dict(saved)
                run.evaluate(model)
        run.finish(model)

    return train


def without_pinning(train):
    """What a CPU cannot do, and FSDP1 asks of it."""

    def run_it(run):
        if DEVICE.type != "cpu":
            return train(run)
        if not hasattr(torch.cpu.Stream, "synchronize"):
            torch.cpu.Stream.synchronize = lambda stream: None
        pin, torch.Tensor.pin_memory = torch.Tensor.pin_memory, lambda tensor, *args, **kwargs: tensor
        try:
            train(run)
        finally:
            torch.Tensor.pin_memory = pin

    return run_it


@contextlib.contextmanager
def full_on_rank_0(model):
    with FSDP.state_dict_type(
        model,
        StateDictType.FULL_STATE_DICT,
        FullStateDictConfig(offload_to_cpu=True, rank0_only=True),
        FullOptimStateDictConfig(offload_to_cpu=False, rank0_only=False),
    ):
        yield


@case
def fsdp1_saved_by_rank_0_with_its_optimizer(run):
    model = wrap(Net(), use_orig_params=True)
    o = adamw(model)
    run.step(model, o)
    with full_on_rank_0(model):
        for name, value in model.state_dict().items():
            run.record(f"saved {name}", value)
        state = FSDP.optim_state_dict(model, o)
        run.step(model, o)
        o.load_state_dict(FSDP.optim_state_dict_to_load(model, o, state))
    run.step(model, o)
    run.finish(model, o)


case(reloaded("LOCAL", False), name="fsdp1_local_state_dict")
for orig in (False, True):
    both = functools.partial(trained, use_orig_params=orig)
    tail = "_orig" if orig else ""
    case(both(), name=f"fsdp1_full_shard{tail}")
    case(both(sharding_strategy=ShardingStrategy.SHARD_GRAD_OP), name=f"fsdp1_shard_grad_op{tail}")
    case(both(mixed_precision=BF16), name=f"fsdp1_bf16{tail}")
    case(
        both(mixed_precision=BF16, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP),
        name=f"fsdp1_shard_grad_op_bf16{tail}",
    )
    case(without_pinning(both(cpu_offload=CPUOffload(offload_params=True))), name=f"fsdp1_cpu_offload{tail}")
    case(both(functools.partial(Net, dropout=0.2)), name=f"fsdp1_dropout{tail}")
    case(clipped(use_orig_params=orig), name=f"fsdp1_clipped{tail}")
    case(accumulated_without_sync(use_orig_params=orig), name=f"fsdp1_no_sync{tail}")
    case(
        accumulated_without_sync(use_orig_params=orig, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP),
        name=f"fsdp1_no_sync_shard_grad_op{tail}",
    )
    case(summoned(use_orig_params=orig), name=f"fsdp1_summon_full_params{tail}")
    case(summoned(use_orig_params=orig, mixed_precision=BF16), name=f"fsdp1_summon_full_params_bf16{tail}")
    case(swapped(orig), name=f"fsdp1_average_swapped_in{tail}")
    for how in ("counted", "data", "raw"):
        case(edited(how, orig), name=f"fsdp1_edits_{how}{tail}")
    case(edited("raw", orig, one_rank=True), name=f"fsdp1_edits_raw_on_one_rank{tail}")
    for kind in ("FULL", "SHARDED"):
        case(reloaded(kind, orig), name=f"fsdp1_{kind.lower()}_state_dict{tail}")
    case(reloaded("FULL", orig, mixed_precision=BF16), name=f"fsdp1_full_state_dict_bf16{tail}")

case(
    trained(
        mixed_precision=MixedPrecision(torch.bfloat16, keep_low_precision_grads=True),
        optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=LR),
    ),
    name="fsdp1_bf16_gradients",
)
case(trained(mixed_precision=MixedPrecision(reduce_dtype=torch.bfloat16)), name="fsdp1_bf16_reduction")
case(
    trained(
        lambda: Net().to(torch.bfloat16).float(),
        optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9),
    ),
    name="fsdp1_sgd",
)
case(trained(limit_all_gathers=False), name="fsdp1_unlimited")
for mode in (None, *BackwardPrefetch):
    case(
        trained(backward_prefetch=mode, forward_prefetch=mode is not None),
        name=f"fsdp1_prefetch_{mode.name.lower() if mode else 'none'}",
    )
for where in ("inside", "around"):
    for how in ("reentrant", "non_reentrant"):
        case(checkpointed(where, how, use_orig_params=True), name=f"fsdp1_checkpoint_{where}_{how}")
case(checkpointed("inside", "non_reentrant", mixed_precision=BF16), name="fsdp1_checkpoint_inside_bf16")
case(hybrid([[0, 2], [1, 3]], [[0, 1], [2, 3]]), name="fsdp1_hybrid_over_nodes")
case(
    hybrid([[0, 2], [1, 3]], [[0, 1], [2, 3]], ShardingStrategy._HYBRID_SHARD_ZERO2),
    name="fsdp1_hybrid_zero2_over_nodes",
)
case(hybrid([[0, 1], [2, 3]], [[0, 2], [1, 3]]), name="fsdp1_hybrid_inside_the_nodes")
case(
    trained(lambda: train_only(Net(n_blocks=4), "blocks.2", "blocks.3", "head"), use_orig_params=True),
    name="fsdp1_frozen_groups",
)
for words in (("lora_",), ("lora_", "head"), ("norm", "bias"), ("up",)):
    case(
        trained(lambda words=words: train_only(LORA(), *words), steps=3, use_orig_params=True),
        name=f"fsdp1_trains_{'_and_'.join(words).replace('lora_', 'lora')}",
    )
case(
    trained(lambda: train_only(LORA(), "lora_"), steps=3, use_orig_params=True, mixed_precision=BF16),
    name="fsdp1_lora_bf16",
)
case(trained(blocks=False, use_orig_params=True), name="fsdp1_one_flat_parameter")


@case
def fsdp1_thaws_and_freezes(run):
    """Parameters change sides after their flat parameter was cut."""
    model = wrap(train_only(LORA(), "lora_"), use_orig_params=True)
    o = torch.optim.AdamW(model.parameters(), lr=LR)
    for words in (("lora_",), ("lora_", "up"), ("up",), ("lora_", "head")):
        train_only(model, *words)
        rounds(run, model, o, steps=1)
    run.finish(model)


@case
def fsdp1_lora_with_edits_of_frozen_weights(run):
    model = wrap(train_only(LORA(), "lora_"), use_orig_params=True)
    o = adamw(model)
    turn = 0

    def between():
        nonlocal turn
        turn += 1
        for name, p in model.named_parameters():
            if not p.requires_grad and p.numel() and turn % 3 == 0:
                p.data.mul_(0.9) if "up" in name else raw(p)[:1].add_(0.25)

    rounds(run, model, o, steps=3, between=between)
    run.finish(model)


def replaced(**kwargs):
    """use_orig_params: FSDP1 writes what has another storage into the flat parameter when it unshards that."""

    def train(run):
        model = wrap(Net(), use_orig_params=True, **kwargs)
        o = adamw(model)
        rounds(run, model, o, between=lambda: [setattr(p, "data", p.data * 0.9) for p in model.parameters()])
        run.finish(model)

    return train


case(replaced(), name="fsdp1_parameters_replaced_by_data")
case(replaced(mixed_precision=BF16), name="fsdp1_parameters_replaced_by_data_bf16")


@case
def fsdp1_ignored_modules(run):
    model = Net().to(DEVICE)
    model = wrap(model, ignored_modules=[model.head], use_orig_params=True)
    o = adamw(model)
    for _ in range(2):
        run.loss(model).backward()
        for p in model.head.parameters():
            dist.all_reduce(p.grad)
        o.step()
        o.zero_grad()
    run.finish(model)


@case
def fsdp1_hand_written_optimizer(run):
    """No optimizer hook fires, and .data moves no counter."""
    model = wrap(Net())
    for _ in range(3):
        run.loss(model).backward()
        for p in model.parameters():
            p.data.add_(p.grad, alpha=-0.1)
            p.grad = None
    run.finish(model)


@case
def fsdp1_optimizer_in_backward(run):
    from torch.distributed.optim import _apply_optimizer_in_backward

    model = Net()
    _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
    model = wrap(model, use_orig_params=True)
    model.order = [0, 1, 0, 2]
    for _ in range(3):
        run.loss(model).backward()
        run.evaluate(model)
    run.finish(model)


@case
def fsdp1_blocks_twice_and_never(run):
    model = wrap(Net(), use_orig_params=True)
    o = torch.optim.SGD(model.parameters(), lr=0.1)
    for order in ([0, 1, 0, 2], [2, 1], [0, 1, 2], [1, 1]):
        model.order = order
        run.loss(model).backward()
        o.step()
        o.zero_grad()
        run.evaluate(model)
    run.finish(model)


@case
def fsdp1_a_module_within_it_is_called(run):
    """After the root has run, one of its blocks is evaluated alone, also after a write that announces nothing."""
    model = wrap(Net(), use_orig_params=True)
    o = adamw(model)
    for _ in range(2):
        run.step(model, o)
        for _ in range(2):
            synchronize()  # FSDP1 orders what is enqueued before its root's forward alone
            with torch.no_grad():
                run.record("block", model.blocks[1](torch.ones(2, 24, device=DEVICE)))
                for p in model.blocks[1].parameters():
                    p.data.mul_(0.9)
    run.finish(model)


@case
def fsdp1_tied_weights(run):
    model = wrap(TiedLM(), use_orig_params=True)
    o = adamw(model)
    for _ in range(3):
        tokens = run.tokens()
        logits = model(tokens)
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        run.record("loss", loss)
        loss.backward()
        o.step()
        o.zero_grad()
    run.finish(model)


@case
def fsdp1_one_element(run):
    """A flat parameter of one element is as large as each rank's shard of it."""
    model = Net()
    model.scale = nn.Linear(1, 1, bias=False)
    plain = model.forward
    model.forward = lambda x: model.scale(plain(x)[..., None])[..., 0]
    model.scale = FSDP(model.scale, device_id=DEVICE)
    model = wrap(model)
    rounds(run, model, adamw(model))
    run.finish(model)


@case
def fsdp1_two_models_one_made_again(run):
    for n_blocks in (2, 3):
        first, second = wrap(Net(n_blocks=n_blocks)), wrap(Net(n_blocks=2), use_orig_params=True)
        a, b = adamw(first), adamw(second)
        for _ in range(2):
            run.step(first, a)
            run.step(second, b)
            run.evaluate(first)
        run.finish(first)
        run.finish(second)
        del first, second, a, b


@case
def fsdp1_wrapped_again(run):
    """A trained model becomes a part of another one."""
    inner = wrap(Net(), use_orig_params=True)
    o = adamw(inner)
    run.step(inner, o)
    outer = FSDP(nn.Sequential(inner, nn.Linear(5, 5)), device_id=DEVICE, use_orig_params=True)
    for module in FSDP.fsdp_modules(outer):
        module._is_root = None
    o = adamw(outer)
    rounds(run, outer, o)
    run.finish(outer)


@case
def fsdp1_gradients_compressed(run):
    def halved(state, grad, out):
        low = torch.empty_like(out, dtype=torch.bfloat16)
        dist.reduce_scatter_tensor(low, grad.to(torch.bfloat16))
        out.copy_(low / run.world)

    model = wrap(Net())
    model.register_comm_hook(None, halved)
    o = adamw(model)
    rounds(run, model, o)
    run.finish(model)


@case
def fsdp1_inference_mode(run):
    model = wrap(Net(), use_orig_params=True)
    o = adamw(model)
    run.evaluate(model)
    run.step(model, o)
    run.evaluate(model, mode=torch.inference_mode)
    run.step(model, o)
    run.finish(model)


@case
def fsdp1_raises_in_forward(run):
    """Training goes on behind a batch that is given up."""
    model = wrap(Net())
    o = adamw(model)
    run.step(model, o)
    model.order = [0, 7]
    with contextlib.suppress(IndexError):
        run.loss(model)
    model.order = [0, 1, 2]
    rounds(run, model, o)
    run.finish(model)


def compiled(what, **kwargs):
    """The graphs that dynamo compiled are part of what must be equal."""

    def train(run):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        model = Net(dim=16, n_blocks=2)
        if what == "blocks":
            for block in model.blocks:
                block.compile(backend="aot_eager")
        model = wrap(model, use_orig_params=True, **kwargs)
        runs = torch.compile(model, backend="aot_eager") if what == "whole" else model
        rounds(run, runs, adamw(model))
        run.finish(model)
        run.record("dynamo's graphs", sorted(torch._dynamo.utils.counters["stats"].items()))
        torch._dynamo.reset()

    return train


case(compiled("blocks"), name="compiled_blocks_fsdp1")
case(compiled("whole"), name="compiled_whole_fsdp1")
case(compiled("whole", mixed_precision=BF16), name="compiled_whole_fsdp1_bf16")


@case(into=COUNTING)
def count_fsdp1(run):
    """In steady state: each pass of a step, a step, a full state dict behind a forward, and a second evaluation."""
    model = Net(dim=192, n_blocks=4)
    run.record("W", parameter_bytes(model))
    model = wrap(model, use_orig_params=True)
    low = wrap(Net(dim=192, n_blocks=4), mixed_precision=BF16)
    for one, suffix in ((model, ""), (low, " bf16")):
        optimizer = adamw(one)
        run.step(one, optimizer)
        for _ in range(2):
            run.mark(f"forward{suffix}")
            loss = run.loss(one)
            run.mark(f"backward{suffix}")
            loss.backward()
            run.mark("between")
            optimizer.step()
            optimizer.zero_grad()
    optimizer = adamw(model)
    for _ in range(2):
        run.mark("step")
        run.step(model, optimizer)
        run.mark("first evaluation")
        run.evaluate(model)
        run.mark("evaluation")
        run.evaluate(model)
        run.mark("state dict")
        with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT):
            for name, value in model.state_dict().items():
                run.record(f"saved {name}", value)
    run.mark("end")
    run.finish(model)


class Adapted(nn.Module):
    """As PEFT has it: adapters beside each of a block's layers."""

    def __init__(self, dim, n_layers=8, rank=4):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(dim, dim, bias=False) for _ in range(n_layers))
        for layer in self.layers:
            layer.lora_a = nn.Linear(dim, rank, bias=False)
            layer.lora_b = nn.Linear(rank, dim, bias=False)

    def forward(self, x):
        for layer in self.layers:
            x = x + torch.tanh(layer(x) + layer.lora_b(layer.lora_a(x)))
        return x


@case(into=COUNTING)
def count_fsdp1_lora(run):
    model = Net(dim=128, n_blocks=0)
    model.blocks = nn.ModuleList(Adapted(128) for _ in range(3))
    model.order = [0, 1, 2]
    model = train_only(model, "lora_")
    run.record("W", parameter_bytes(model))
    run.record("W trainable", sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad))
    model = wrap(model, use_orig_params=True)
    most = 0
    for flat_param in flat_parameters(model):
        own = sum(p.numel() * p.element_size() for p in flat_param._params if p.requires_grad)
        mine = torch.tensor([own])
        dist.all_reduce(mine, op=dist.ReduceOp.MAX)
        most += run.world * mine.item()
    run.record("W gathered", most)
    optimizer = adamw(model)
    run.mark("first")
    run.step(model, optimizer)
    for _ in range(3):
        run.mark("later")
        run.step(model, optimizer)
    run.mark("end")
    run.finish(model)
