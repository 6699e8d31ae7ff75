"""Trains a small transformer with Lightning Fabric's ModelParallelStrategy, which is FSDP2:

torchrun --nproc-per-node 2 examples/lightning_fabric.py
"""

import on_cpu  # for machines without a GPU  # isort: skip
import os

import lightning
import torch
import torch.nn.functional as F
from lightning.fabric.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard

VOCABULARY, DIM, LAYERS, LENGTH, STEPS = 512, 128, 4, 32, 6


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, DIM)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(DIM, 4, 4 * DIM, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(LAYERS)
        )
        self.head = nn.Linear(DIM, VOCABULARY, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], device=x.device)
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        return self.head(x)


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
        tokens = torch.randint(VOCABULARY, (2, LENGTH + 1), generator=data).to(fabric.device)
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        fabric.print(f"loss {loss.item()!r}", flush=True)


if __name__ == "__main__":
    main()
