"""A pipeline of two stages (torch.distributed.pipelining), each sharded by FSDP2: pipeline.py dp,pp|pp,dp, the dimensions
of the mesh, the outermost first."""

import on_cpu  # for machines without a GPU  # isort: skip
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

DIM, BLOCKS, STEPS, MICRO_BATCHES = 64, 3, 4, 4


def main():
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=tuple(sys.argv[1].split(",")))
    stage, shard = mesh["pp"].get_local_rank(), mesh["dp"].get_local_rank()
    data = torch.Generator().manual_seed(shard)
    torch.manual_seed(stage)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(DIM, DIM), nn.GELU()) for _ in range(BLOCKS)))
    for block in model:
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    given, made = torch.empty(2, DIM, requires_grad=stage > 0), torch.empty(2, DIM, requires_grad=True)
    place = PipelineStage(model, stage, 2, torch.device("cpu"), given, made, group=mesh.get_group("pp"))
    pipeline = Schedule1F1B(place, MICRO_BATCHES, loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(STEPS):
        x, target = torch.randn(2, 2 * MICRO_BATCHES, DIM, generator=data)
        losses = []
        if stage == 0:
            pipeline.step(x)
        else:
            pipeline.step(target=target, losses=losses)
        if shard == 0:
            for loss in losses:
                print(f"loss {loss.item()!r}", flush=True)
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
