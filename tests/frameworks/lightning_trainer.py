"""Lightning's Trainer with ModelParallelStrategy, which is FSDP2: accumulation, validation, a sharded checkpoint and a
second Trainer that goes on from it."""

import on_cpu  # for machines without a GPU  # isort: skip
import os

import lightning
import torch
import torch.nn.functional as F
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

DIM = 64


class Block(nn.Sequential):
    def forward(self, x):
        return x + super().forward(x)


class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        blocks = [Block(nn.Linear(DIM, 4 * DIM), nn.GELU(), nn.Linear(4 * DIM, DIM)) for _ in range(3)]
        self.model = nn.Sequential(*blocks, nn.Linear(DIM, 1))

    def configure_model(self):
        for layer in self.model[:3]:
            fully_shard(layer, mesh=self.device_mesh["data_parallel"])
        fully_shard(self.model, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch, i):
        loss = F.mse_loss(self.model(batch[0]), batch[1])
        print(f"loss {loss.item()!r}", flush=True)
        return loss

    def validation_step(self, batch, i):
        print(f"eval {F.mse_loss(self.model(batch[0]), batch[1]).item()!r}", flush=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def data(seed, n=64):
    random = torch.Generator().manual_seed(seed)
    return DataLoader(TensorDataset(torch.randn(n, DIM, generator=random), torch.ones(n, 1)), batch_size=2)


def trainer(steps):
    ranks = int(os.environ["LOCAL_WORLD_SIZE"])
    return lightning.Trainer(
        accelerator="cpu",
        strategy=ModelParallelStrategy(data_parallel_size=ranks, tensor_parallel_size=1),
        devices=ranks,
        max_steps=steps,
        accumulate_grad_batches=2,
        val_check_interval=4,
        limit_val_batches=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def main():
    torch.manual_seed(0)
    first = trainer(3)
    first.fit(Model(), data(1), data(2))
    first.save_checkpoint("out.ckpt")
    trainer(5).fit(Model(), data(1), data(2), ckpt_path="out.ckpt")


if __name__ == "__main__":
    main()
