"""Trains a small transformer with FSDP1: torchrun --nproc-per-node 2 examples/fsdp1.py"""

import functools
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

from small_transformer import Model, next_loss

STEPS = 6


def main():
    device = torch.device("cpu")
    if torch.accelerator.is_available():
        device = torch.device(torch.accelerator.current_accelerator().type, int(os.environ["LOCAL_RANK"]))
        torch.accelerator.set_device_index(device.index)
    dist.init_process_group()
    torch.manual_seed(0)
    policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={nn.TransformerEncoderLayer})
    model = FullyShardedDataParallel(Model(), auto_wrap_policy=policy, device_id=device, use_orig_params=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(STEPS):
        loss = next_loss(model, data, device)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"loss {loss.item()!r}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
