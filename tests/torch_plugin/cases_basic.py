"""The common ways to train: optimizers, mixed precision, freezing, accumulation, checkpointing, tying."""

import torch
import torch.nn as nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import compat
from models import BF16_COMPUTE, Net, TiedLM, shard, train_only, trainable, world_mesh
from run import case

LR = 1e-2
OPTIMIZERS = {
    "adamw_foreach": lambda ps: torch.optim.AdamW(ps, lr=LR, foreach=True),
    "adamw_fused": lambda ps: torch.optim.AdamW(ps, lr=LR, fused=True),
    "adamw_for_loop": lambda ps: torch.optim.AdamW(ps, lr=LR, foreach=False),
    "sgd_momentum": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9),
    "sgd_foreach": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, foreach=True),
    "adagrad": lambda ps: torch.optim.Adagrad(ps, lr=LR),
}


def adamw(model):
    return OPTIMIZERS["adamw_fused"](trainable(model))


def full(kind):
    def train(run):
        model = shard(Net())
        optimizer = OPTIMIZERS[kind](trainable(model))
        run.train(model, optimizer, steps=3)
        run.finish(model, optimizer)

    return train


for kind in OPTIMIZERS:
    case(full(kind), name=f"full_{kind}")


@case
def full_dropout(run):
    model = shard(Net(dropout=0.2))
    optimizer = adamw(model)
    run.train(model, optimizer)
    run.finish(model)


@case
def full_clipped(run):
    model = shard(Net())
    optimizer = adamw(model)
    for _ in range(2):
        run.loss(model).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        run.record("norm", norm)
        optimizer.step()
        optimizer.zero_grad()
    run.finish(model)


@case
def bf16_compute(run):
    model = shard(Net(), mp_policy=BF16_COMPUTE)
    optimizer = adamw(model)
    run.train(model, optimizer, steps=3)
    run.finish(model, optimizer)


@case
def bf16_compute_with_output_dtype(run):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32)
    model = shard(Net(), mp_policy=BF16_COMPUTE, root={"mp_policy": policy})
    run.train(model, adamw(model))
    run.finish(model)


@case
def bf16_in_the_blocks_only(run):
    model = Net()
    for block in model.blocks:
        fully_shard(block, mesh=world_mesh(), mp_policy=BF16_COMPUTE)
    fully_shard(model, mesh=world_mesh())
    compat.sum_only(model)
    for block in model.blocks:
        block.register_forward_hook(lambda module, inputs, output: output.float())
    run.train(model, adamw(model))
    run.finish(model)


@case
def bf16_parameters(run):
    model = shard(Net().to(torch.bfloat16), mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))
    optimizer = adamw(model)
    for _ in range(2):
        x, y = run.batch(torch.bfloat16)
        loss = ((model(x).float() - y) ** 2).mean()
        run.record("loss", loss)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    run.finish(model)


@case
def frozen_groups(run):
    model = train_only(Net(n_blocks=4), "blocks.2", "blocks.3", "head")
    shard(model)
    run.train(model, adamw(model), steps=3)
    run.finish(model)


@case
def frozen_but_the_head(run):
    model = train_only(Net(), "head")
    shard(model)
    run.train(model, adamw(model), steps=3)
    run.finish(model)


@case
def frozen_groups_accumulated(run):
    model = train_only(Net(n_blocks=4), "blocks.0", "blocks.3")
    shard(model)
    run.train(model, adamw(model), micro_batches=3)
    run.finish(model)


@case
def lora(run):
    model = train_only(Net(lora=4), "lora_", "head")
    shard(model)
    run.train(model, adamw(model), steps=3)
    run.finish(model)


@case
def lora_bf16_compute(run):
    model = train_only(Net(lora=4), "lora_", "head")
    shard(model, mp_policy=BF16_COMPUTE)
    run.train(model, adamw(model), steps=3)
    run.finish(model)


@case
def lora_accumulated_with_evaluation(run):
    model = train_only(Net(lora=4), "lora_", "head")
    shard(model)
    optimizer = adamw(model)
    for _ in range(2):
        run.step(model, optimizer, micro_batches=2)
        run.evaluate(model, n=2)
    run.finish(model)


def cast_around(linear):
    linear.register_forward_pre_hook(lambda module, inputs: (inputs[0].to(module.weight.dtype),))
    linear.register_forward_hook(lambda module, inputs, output: output.float())


@case
def mixed_dtypes_in_one_group(run):
    """Frozen bf16 weights beside trainable fp32 ones: FSDP2 gathers such a group as bytes."""
    model = train_only(Net(lora=4), "lora_", "head", "norm")
    for block in model.blocks:
        for linear in (block.up, block.down):
            linear.to(torch.bfloat16)
            cast_around(linear)
    shard(model)
    run.train(model, adamw(model), micro_batches=2)
    run.finish(model)


class Quantized(nn.Module):
    """Frozen int8 weights and fp64 scales, the way QLoRA holds a base model, beside fp32 adapters."""

    def __init__(self, dim):
        super().__init__()
        weight = torch.randint(-127, 128, (dim, dim), dtype=torch.int8)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.scale = nn.Parameter(torch.rand(dim, dtype=torch.float64) / 127 / dim, requires_grad=False)
        self.lora_a = nn.Linear(dim, 3, bias=False)
        self.lora_b = nn.Linear(3, dim, bias=False)

    def forward(self, x):
        base = nn.functional.linear(x, (self.weight.double() * self.scale[:, None]).float())
        return x + base + self.lora_b(self.lora_a(x))


@case
def quantized_base_in_one_group(run):
    model = Net(dim=20)
    model.blocks = nn.ModuleList(Quantized(20) for _ in range(3))
    shard(model)
    run.train(model, adamw(model), micro_batches=2)
    run.finish(model)


def accumulation(mode, **shard_kwargs):
    def train(run):
        model = shard(Net(), **shard_kwargs)
        optimizer = adamw(model)
        for _ in range(2):
            for micro in range(3):
                last = micro == 2
                if mode in ("without_sync", "kept_unsharded"):
                    model.set_requires_gradient_sync(last)
                if mode == "kept_unsharded":
                    model.set_reshard_after_backward(last)
                if mode == "last_backward":
                    model.set_is_last_backward(last)
                (run.loss(model) / 3).backward()
            optimizer.step()
            optimizer.zero_grad()
        run.finish(model, optimizer)

    return train


for mode in ("with_sync", "without_sync", "kept_unsharded", "last_backward"):
    case(accumulation(mode), name=f"accumulate_{mode}")
case(accumulation("without_sync", mp_policy=BF16_COMPUTE), name="accumulate_without_sync_bf16")
case(accumulation("kept_unsharded", mp_policy=BF16_COMPUTE), name="accumulate_kept_unsharded_bf16")


def checkpointed(where, how):
    def train(run):
        if where == "around":
            model = shard(Net(checkpoint_around=how))
        else:
            model = Net()
            implementation = CheckpointImpl.REENTRANT if how == "reentrant" else CheckpointImpl.NO_REENTRANT
            if where == "wrapped_inside":
                for i, block in enumerate(model.blocks):
                    model.blocks[i] = checkpoint_wrapper(block, checkpoint_impl=implementation)
            elif where == "part_of_block":
                for block in model.blocks:
                    block.up = checkpoint_wrapper(block.up, checkpoint_impl=implementation)
            shard(model)
        optimizer = adamw(model)
        run.train(model, optimizer, micro_batches=2)
        run.finish(model)

    return train


for where in ("around", "wrapped_inside", "part_of_block"):
    for how in ("reentrant", "non_reentrant"):
        case(checkpointed(where, how), name=f"checkpoint_{where}_{how}")


@case
def checkpoint_around_wrapper_outside(run):
    """checkpoint_wrapper put on after fully_shard: the recomputation runs FSDP2's own hooks."""
    model = shard(Net())
    for i, block in enumerate(model.blocks):
        model.blocks[i] = checkpoint_wrapper(block)
    run.train(model, adamw(model))
    run.finish(model)


@case
def checkpoint_with_dropout_and_lora(run):
    model = train_only(Net(lora=4, dropout=0.2, checkpoint_around="non_reentrant"), "lora_", "head")
    shard(model)
    run.train(model, adamw(model))
    run.finish(model)


def tied(grouping):
    def train(run):
        model = TiedLM()
        mesh = world_mesh()
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        if grouping == "in_a_list":
            fully_shard([model.embed, model.norm, model.head], mesh=mesh)
        fully_shard(model, mesh=mesh)
        compat.sum_only(model)
        optimizer = adamw(model)
        for step in range(3):
            tokens = run.tokens()
            logits = model(tokens)
            loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
            run.record("loss", loss)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            run.record("still tied", model.head.weight is model.embed.weight)
        run.finish(model)

    return train


case(tied("in_the_root"), name="tied_weights_in_the_root")
case(tied("in_a_list"), name="tied_weights_in_a_list_of_modules")


def reshard_mode(value, root=None):
    def train(run):
        model = shard(Net(), reshard_after_forward=value, root=root)
        optimizer = adamw(model)
        for _ in range(2):
            run.step(model, optimizer, micro_batches=2)
            run.evaluate(model)
        run.finish(model)

    return train


case(reshard_mode(False), name="reshard_after_forward_false")
case(reshard_mode(2), name="reshard_after_forward_2")
case(reshard_mode(True, root={"reshard_after_forward": True}), name="reshard_after_forward_true_at_the_root")


@case
def reshard_after_forward_changes(run):
    model = shard(Net())
    optimizer = adamw(model)
    for step in range(4):
        model.set_reshard_after_forward(step % 2 == 0)
        run.step(model, optimizer, micro_batches=2)
    run.finish(model)
