"""A model whose head is most of it, on the simulated device: python split_job.py CASE PARTS OUT. Each rank writes rankN.json:
losses, and the peaks of device memory in a step. Rank 0 writes the whole parameters too."""

import json
import os
import pathlib
import sys

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1] / "sim" / "torch"))
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

import fcdp
import torch_sim  # noqa: F401

torch.set_num_threads(1)
VOCABULARY, WIDTH, TOKENS, STEPS = 16384, 256, 24, 3  # a head of 16 MiB, and of 2 in each of 8 parts
ON = os.environ.get("FCDP") == "1"
CASES = {
    "plain": {},
    "bf16": {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)},
    "frozen": {"frozen": True},
    "checkpointed": {"checkpointed": True},
}


class Net(nn.Module):
    def __init__(self, checkpointed):
        super().__init__()
        self.tokens = nn.Embedding(64, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.checkpointed = checkpointed

    def out(self, x):
        return self.head(torch.relu(x))

    def forward(self, ids):
        x = self.tokens(ids)
        for block in self.blocks:
            x = x + torch.relu(block(x))
        return checkpoint(self.out, x, use_reentrant=False) if self.checkpointed else self.out(x)


def made(device, mesh, parts, frozen=False, checkpointed=False, **options):
    torch.manual_seed(0)
    model = Net(checkpointed).to(device)
    model.head.requires_grad_(not frozen)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **options)
    for part in fcdp.split(model.head, parts) if parts > 1 else [model.head]:
        fully_shard(part, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def reset_peaks():
    torch.sim.synchronize()
    torch.sim.reset_peak_memory_stats()
    if ON:
        fcdp.reset_peaks()


def peaks():
    """Of tensors, and of what FCDP has gathered; each at its own time."""
    torch.sim.synchronize()
    gathered = fcdp.stats()["device_bytes"]["peak"] if ON else 0
    return {"tensors": torch.sim.max_memory_allocated(), "gathered": gathered}


def train(model, device):
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    random = torch.Generator().manual_seed(100 + dist.get_rank())
    losses = []
    for step in range(STEPS):
        if step == STEPS - 1:
            reset_peaks()
        ids = torch.randint(0, 64, (2, TOKENS + 1), generator=random).to(device)
        loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1).float(), ids[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return {"losses": [loss.item() for loss in losses], "peaks": peaks()}


def main(case, parts, out):
    rank = int(os.environ["RANK"])
    torch.sim.set_device(rank)
    dist.init_process_group()
    model = made(
        torch.device("sim", rank), init_device_mesh("sim", (dist.get_world_size(),)), int(parts), **CASES[case]
    )
    found = train(model, torch.device("sim", rank))
    whole = {name: value.full_tensor().cpu() for name, value in model.state_dict().items()}
    if rank == 0:
        torch.save(whole, pathlib.Path(out, "whole.pt"))
    if ON:
        stats = fcdp.stats()
        found |= {"plan": stats["plan"], "tiers": {g["name"]: g["tier"] for g in stats["groups"]}}
        found["avoided"] = {g["name"]: g["gathers_avoided"] for g in fcdp.stats()["groups"]}
    pathlib.Path(out, f"rank{rank}.json").write_text(json.dumps(found | {"out": out}))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
