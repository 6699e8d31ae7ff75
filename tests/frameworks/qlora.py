"""LoRA adapters in float32 over frozen weights of another type, sharded by FSDP2 in the same groups, as QLoRA has it.
qlora.py bfloat16|uint8: in uint8 a weight is packed, two elements of four bits in a byte, and unpacked where it is used.
"""

import on_cpu  # for machines without a GPU  # isort: skip
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard

DIM, LAYERS, RANK, STEPS = 96, 3, 4, 4


class Linear(nn.Module):
    def __init__(self, n_in, n_out, storage):
        super().__init__()
        if storage == torch.uint8:
            weight = torch.randint(256, (n_out, n_in // 2), dtype=torch.uint8)
        else:
            weight = (torch.randn(n_out, n_in) / n_in**0.5).to(storage)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.down = nn.Parameter(torch.randn(RANK, n_in) / n_in**0.5)
        self.up = nn.Parameter(torch.zeros(n_out, RANK))

    def forward(self, x):
        weight = self.weight
        if weight.dtype == torch.uint8:
            weight = torch.stack([weight & 15, weight >> 4], dim=-1).flatten(1).float() / 64 - 0.125
        return F.linear(x, weight.float()) + F.linear(F.linear(x, self.down), self.up)


class Block(nn.Module):
    def __init__(self, storage):
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.widen, self.narrow = Linear(DIM, 4 * DIM, storage), Linear(4 * DIM, DIM, storage)

    def forward(self, x):
        return x + self.narrow(F.gelu(self.widen(self.norm(x))))


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(getattr(torch, sys.argv[1])) for _ in range(LAYERS)), nn.Linear(DIM, 1))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)
    data = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(STEPS):
        for _ in range(2):
            loss = (model(torch.randn(4, DIM, generator=data)) - 1).square().mean() / 2
            loss.backward()
            print(f"loss {loss.item()!r}", flush=True)
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
