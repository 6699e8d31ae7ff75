"""Trains a small transformer with FSDP2: torchrun --nproc-per-node 2 examples/fsdp2.py"""

import on_cpu  # for machines without a GPU  # isort: skip
import os

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from small_transformer import Model, next_loss

STEPS = 6


def main():
    device = torch.device("cpu")
    if torch.accelerator.is_available():
        device = torch.device(torch.accelerator.current_accelerator().type, int(os.environ["LOCAL_RANK"]))
        torch.accelerator.set_device_index(device.index)
    dist.init_process_group()
    torch.manual_seed(0)
    model = Model().to(device)
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
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
