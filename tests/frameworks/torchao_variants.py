"""A small transformer of torchao's linear layers, sharded by FSDP2: torchao_variants.py VARIANT, a function of this file
that changes the model's layers before they are sharded."""

import on_cpu  # for machines without a GPU  # isort: skip
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torchao.float8 import Float8LinearConfig, convert_to_float8_training, precompute_float8_dynamic_scale_for_fsdp
from torchao.quantization import Int8DynamicActivationIntxWeightConfig, quantize_
from torchao.quantization.granularity import PerGroup
from torchao.quantization.qat import QATConfig
from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import linear_nf4, to_nf4

DIM, LAYERS, RANK, STEPS = 128, 3, 4, 4


class Adapted(nn.Module):
    """LoRA over a frozen weight in NF4."""

    def __init__(self, linear):
        super().__init__()
        self.weight = nn.Parameter(to_nf4(linear.weight.detach()), requires_grad=False)
        self.down = nn.Parameter(torch.randn(RANK, linear.in_features) / linear.in_features**0.5)
        self.up = nn.Parameter(torch.zeros(linear.out_features, RANK))

    def forward(self, x):
        return linear_nf4(x, self.weight) + x @ self.down.T @ self.up.T


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.widen, self.narrow = nn.Linear(DIM, 4 * DIM, bias=False), nn.Linear(4 * DIM, DIM, bias=False)

    def forward(self, x):
        return x + self.narrow(nn.functional.gelu(self.widen(self.norm(x))))


def float8(block, gathered=False):
    """`gathered`: FSDP2 gathers the weights in float8, by their extension."""
    convert_to_float8_training(block, config=Float8LinearConfig(emulate=True, enable_fsdp_float8_all_gather=gathered))


def float8_gathered(block):
    float8(block, gathered=True)


def nf4(block):
    block.widen, block.narrow = Adapted(block.widen), Adapted(block.narrow)
    block.norm.requires_grad_(False)


def qat(block):
    weights = Int8DynamicActivationIntxWeightConfig(weight_dtype=torch.int4, weight_granularity=PerGroup(32))
    quantize_(block, QATConfig(weights, step="prepare"))


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(LAYERS)), nn.Linear(DIM, 1))
    for block in model[:LAYERS]:
        globals()[sys.argv[1]](block)
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)
    data = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(STEPS):
        for _ in range(2):
            loss = (model(torch.randn(16, DIM, generator=data)) - 1).square().mean() / 2
            loss.backward()
            print(f"loss {loss.item()!r}", flush=True)
        optimizer.step()
        optimizer.zero_grad()
        if sys.argv[1] == "float8_gathered":
            precompute_float8_dynamic_scale_for_fsdp(model)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
