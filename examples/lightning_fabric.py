"""Trains a small transformer with Lightning Fabric's ModelParallelStrategy, which is FSDP2:

torchrun --nproc-per-node 2 examples/lightning_fabric.py
"""

import on_cpu  # for machines without a GPU  # isort: skip
import os

import lightning
import torch
from lightning.fabric.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard

from small_transformer import Model, next_loss

STEPS = 6


def parallelize(model, mesh):
    for layer in model.layers:
        fully_shard(layer, mesh=mesh["data_parallel"])
    fully_shard(model, mesh=mesh["data_parallel"])
    return model


def main():
    nodes, ranks = int(os.environ.get("GROUP_WORLD_SIZE", 1)), int(os.environ["LOCAL_WORLD_SIZE"])
    strategy = ModelParallelStrategy(parallelize, data_parallel_size=nodes * ranks, tensor_parallel_size=1)
    fabric = lightning.Fabric(strategy=strategy, devices=ranks, num_nodes=nodes)
    fabric.launch()
    torch.manual_seed(0)
    model = fabric.setup(Model())
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-3))
    data = torch.Generator().manual_seed(fabric.global_rank)
    for _ in range(STEPS):
        loss = next_loss(model, data, fabric.device)
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        fabric.print(f"loss {loss.item()!r}", flush=True)


if __name__ == "__main__":
    main()
