"""Trains a small UNet of diffusers to remove noise, sharded by FSDP2."""

import on_cpu  # for machines without a GPU  # isort: skip
import torch
import torch.distributed as dist
from diffusers import DDPMScheduler, UNet2DModel
from torch.distributed.fsdp import fully_shard

SIZE, STEPS = 16, 4


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = UNet2DModel(
        sample_size=SIZE,
        block_out_channels=(16, 32),
        layers_per_block=1,
        norm_num_groups=8,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )
    for block in [*model.down_blocks, model.mid_block, *model.up_blocks]:
        fully_shard(block)
    fully_shard(model)
    noise_of = DDPMScheduler(num_train_timesteps=100)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(STEPS):
        images, noise = torch.randn(2, 2, 3, SIZE, SIZE, generator=data)
        times = torch.randint(100, (2,), generator=data)
        loss = (model(noise_of.add_noise(images, noise, times), times).sample - noise).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"loss {loss.item()!r}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
