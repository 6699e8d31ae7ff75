"""Settings of FSDP2 that change when gradients are reduced, or what one group gathers: when a backward ends, which process
group reduces, which parameters count as used, which dtype each is gathered in."""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed import fsdp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from cases_basic import adamw
from models import Block, Net, shard
from place import DEVICE
from run import Unsupported, case


def has(thing, name):
    if not hasattr(thing, name):
        raise Unsupported(f"this torch has no {name}")
    return getattr(thing, name)


def finalized_by_hand(is_async, n_backwards):
    def train(run):
        has(FSDPModule, "finalize_backward")
        model = shard(Net())
        optimizer = adamw(model)
        model.set_manual_backward_finalization(True)
        for _ in range(3):
            model.set_requires_gradient_sync(n_backwards == 1)
            for _ in range(n_backwards):
                run.loss(model).backward()
            model.set_requires_gradient_sync(True)
            handle = model.finalize_backward(async_op=is_async)
            if is_async:
                handle.wait()
            optimizer.step()
            optimizer.zero_grad()
        run.finish(model, optimizer)

    return train


case(finalized_by_hand(is_async=False, n_backwards=1), name="backward_finalized_by_hand")
case(finalized_by_hand(is_async=True, n_backwards=1), name="backward_finalized_by_hand_async")
case(finalized_by_hand(is_async=False, n_backwards=3), name="backwards_finalized_by_hand_together")


@case
def reductions_in_a_process_group_of_their_own(run):
    has(FSDPModule, "set_separate_reduce_scatter_group")
    model = shard(Net())
    model.set_separate_reduce_scatter_group(True)
    optimizer = adamw(model)
    run.train(model, optimizer, steps=2, micro_batches=2)
    model.set_separate_reduce_scatter_group(False)
    run.train(model, optimizer)
    run.finish(model, optimizer)


@case
def reductions_in_three_buffers(run):
    has(FSDPModule, "set_reduce_scatter_max_input_buffers")
    model = shard(Net())
    model.set_reduce_scatter_max_input_buffers(3)
    optimizer = adamw(model)
    run.train(model, optimizer, steps=3)
    run.finish(model, optimizer)


class UsesItsAdapterSometimes(Block):
    uses = True

    def forward(self, x):
        h = self.down(F.gelu(self.up(self.norm(x))))
        if self.uses:
            h = h + self.lora_b(self.lora_a(x))
        return x + self.gate * h


@case
def parameters_that_some_ranks_do_not_use(run):
    has(FSDPModule, "set_reduce_scatter_unused_params")
    model = Net()
    model.blocks = nn.ModuleList(UsesItsAdapterSometimes(24, lora=4) for _ in range(3))
    shard(model)
    model.set_reduce_scatter_unused_params(True)
    optimizer = adamw(model)
    for step in range(4):
        for block in model.blocks:
            block.uses = (run.rank + step) % 2 == 0
        run.step(model, optimizer, micro_batches=1 + step % 2)
    run.finish(model, optimizer)


@case
def gathers_wait_for_an_event_of_the_programs(run):
    model = shard(Net())
    optimizer = adamw(model)
    for _ in range(3):
        run.step(model, optimizer)
        event = torch.get_device_module(DEVICE).current_stream().record_event()
        model.set_post_optim_event(event)
    run.finish(model, optimizer)


@case
def two_models_share_their_streams(run):
    share = has(fsdp, "share_comm_ctx")
    models = [shard(Net()), shard(Net(n_blocks=2))]
    share(models)
    optimizers = [adamw(model) for model in models]
    for _ in range(2):
        for model, optimizer in zip(models, optimizers):
            run.step(model, optimizer)
        x, _ = run.batch()
        sum(model(x).square().mean() for model in models).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for model, optimizer in zip(models, optimizers):
        run.finish(model, optimizer)


@case
def a_dtype_for_each_parameter(run):
    if "param_dtype_override_fn" not in MixedPrecisionPolicy.__dataclass_fields__:
        raise Unsupported("this torch has no param_dtype_override_fn")
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16,
        reduce_dtype=torch.float32,
        param_dtype_override_fn=lambda parameter: parameter.dtype if parameter.dim() == 1 else None,
    )
    model = Net()
    for block in model.blocks:
        block.norm.register_forward_pre_hook(lambda module, args: (args[0].float(),))
        block.norm.register_forward_hook(lambda module, args, output: output.bfloat16())
        for linear in (block.up, block.down):
            linear.forward = lambda x, m=linear: F.linear(x.bfloat16(), m.weight) + m.bias.bfloat16()
    model.head.register_forward_pre_hook(lambda module, args: (args[0].bfloat16(),))
    for block in model.blocks:
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
    optimizer = adamw(model)
    run.train(model, optimizer, steps=3)
    run.finish(model, optimizer)


@case
def inputs_that_are_not_cast(run):
    model = shard(Net(), mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False))
    model.register_forward_pre_hook(lambda module, args: (args[0].bfloat16(),))
    optimizer = adamw(model)
    run.train(model, optimizer, steps=3)
    run.finish(model, optimizer)


@case
def a_divide_factor_of_the_programs(run):
    model = shard(Net())
    model.set_gradient_divide_factor(3.0)
    optimizer = adamw(model)
    run.train(model, optimizer, steps=2, micro_batches=2)
    run.finish(model, optimizer)


@case
def sharded_on_a_dim_of_a_mesh_with_tensor_parallelism(run):
    dims = has(fsdp, "DataParallelMeshDims")
    mesh = init_device_mesh(DEVICE.type, (2, 2), mesh_dim_names=("dp", "tp"))
    model = nn.Sequential(*(nn.Linear(12, 12) for _ in range(4)))
    for linear in model:
        for name, parameter in list(linear.named_parameters()):
            placements = [Replicate(), Shard(0) if name == "weight" else Replicate()]
            setattr(linear, name, nn.Parameter(distribute_tensor(parameter.data, mesh, placements)))
        fully_shard(linear, mesh=mesh, dp_mesh_dims=dims(shard="dp"))
    fully_shard(model, mesh=mesh, dp_mesh_dims=dims(shard="dp"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        x = distribute_tensor(run.randn(6, 12), mesh, [Replicate(), Replicate()])
        loss = model(x).square().mean()
        run.record("loss", loss.full_tensor())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    run.finish(model)
