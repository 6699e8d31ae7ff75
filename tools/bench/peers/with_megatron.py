"""megatron-fsdp for job.py: its FSDP over all ranks, and its HFSDP, which shards within a node and then between nodes."""

import contextlib

import torch
from torch.distributed.device_mesh import init_device_mesh

from job import block_elements, gpt, loss_of, mesh_shape


class NoStream:
    """In place of a CUDA stream: operators of a CPU have run when they return."""

    def __init__(self, *_, **__):
        pass

    def wait_stream(self, _):
        pass

    wait_event = wait_stream

    def record_event(self, *_):
        return self

    def wait(self, *_):
        pass

    synchronize = wait


def stand_in_for_cuda():
    """What the library asks of torch.cuda, before it is imported."""
    cuda = torch.cuda
    cuda.Stream = cuda.Event = NoStream
    cuda.stream = lambda _: contextlib.nullcontext()
    cuda.current_stream = lambda *_: NoStream()
    cuda.current_device = lambda: 0
    cuda.synchronize = cuda.empty_cache = lambda *_: None
    torch.Tensor.cuda = lambda tensor, *_, **__: tensor


stand_in_for_cuda()
import megatron_fsdp  # noqa: E402


def adamw(model, lr):
    """Without a trace of the step that the library takes at set-up, so that the optimizer has its state."""
    optimizer = megatron_fsdp.fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=0.0))
    optimizer.state.clear()
    for group in optimizer.param_groups:
        group["lr"] = lr
    return optimizer


def train_with(model, args, mesh, **how):
    ahead = block_elements(model) if args.measures_memory else None
    model = megatron_fsdp.fully_shard_model(
        model,
        device_mesh=mesh,
        fsdp_unit_modules=[gpt.Block],
        device=torch.device("cpu"),
        sync_model_each_microbatch=False,  # what crosses nodes does so once per optimizer step, as far as it can
        **how,
    )
    model.ddp_config.gradient_reduce_div_fusion = False  # gloo cannot multiply as it sums
    if ahead:  # what the library computes, and then raises to 500 M elements
        model.suggested_AG_prefetch_size, model.suggested_RS_queue_capacity = ahead, 2 * ahead
    optimizer = adamw(model, args.lr)

    def train_step(batches):
        total = 0.0
        for i, (x, y) in enumerate(batches):
            model.is_last_microbatch = i == len(batches) - 1
            loss = loss_of(model, x, y) / len(batches)
            loss.backward()
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        return total

    return train_step


def fsdp(model, args):
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(), 1), mesh_dim_names=("ranks", "tp"))
    return train_with(model, args, mesh, dp_shard_dim="ranks", tp_dim="tp")


def hfsdp(model, args):
    mesh = init_device_mesh("cpu", (*mesh_shape(), 1), mesh_dim_names=("nodes", "ranks", "tp"))
    return train_with(
        model,
        args,
        mesh,
        dp_shard_dim="ranks",
        dp_outer_dim="nodes",
        tp_dim="tp",
        hybrid_fsdp_group=mesh["nodes", "ranks"]._flatten("all").get_group(),
        outer_dp_sharding_strategy="optim",
    )
