"""Small FSDP trainings on one device: python training_job.py cpu|sim OUT. Each rank writes rankN.json: by case, the losses
and the parameters' bytes, as hashes, and for "sim" how far the host was ahead of the device."""

import functools
import hashlib
import json
import os
import pathlib
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "sim" / "torch"))
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.utils.checkpoint import checkpoint

torch.set_num_threads(1)
VOCABULARY, WIDTH, HEADS, LENGTH, BATCH, STEPS = 64, 32, 4, 16, 2, 3


class Block(nn.Module):
    def __init__(self, width, dropout=0.0, checkpointed=False):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout, self.checkpointed = dropout, checkpointed

    def attend(self, x):
        b, t, c = x.shape
        q, k, v = (p.view(b, t, HEADS, -1).transpose(1, 2) for p in self.qkv(x).split(c, dim=2))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, c))

    def compute(self, x):
        x = x + F.dropout(self.attend(self.norm1(x)), self.dropout)
        return x + F.dropout(self.down(F.gelu(self.up(self.norm2(x)))), self.dropout)

    def forward(self, x):
        return checkpoint(self.compute, x, use_reentrant=False) if self.checkpointed else self.compute(x)


class GPT(nn.Module):
    def __init__(self, width=WIDTH, n_layers=2, **options):
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(LENGTH, width)
        self.blocks = nn.ModuleList(Block(width, **options) for _ in range(n_layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, ids):
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class LowRank(nn.Module):
    def __init__(self, base, rank=4):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a, self.b = nn.Linear(base.in_features, rank, bias=False), nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x):
        return self.base(x) + self.b(self.a(x))


def sharded(model, mesh, **options):
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def train(model, device, steps=STEPS, batch=BATCH, clip=None, after_step=lambda: None):
    """Losses, parameters, and for each step (seconds until the host had enqueued it, until it was done)."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    random = torch.Generator().manual_seed(100 + dist.get_rank())
    losses, times = [], []
    for _ in range(steps):
        ids = torch.randint(0, VOCABULARY, (batch, LENGTH + 1), generator=random).to(device)
        began = time.perf_counter()
        loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1).float(), ids[:, 1:].flatten())
        loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        enqueued = time.perf_counter()
        losses.append(loss.detach())
        after_step()
        times.append((enqueued - began, time.perf_counter() - began))
    return [loss.item().hex() for loss in losses], times


def hashed(model):
    whole = hashlib.sha256()
    for parameter in model.parameters():
        local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        whole.update(local.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    return whole.hexdigest()


def fresh(**options):
    torch.manual_seed(0)  # made on the CPU, so that every device starts with the same numbers
    return GPT(**options)


def fsdp2(device, mesh, sharding=None, clip=None, **options):
    model = sharded(fresh(**options).to(device), mesh, **(sharding or {}))
    return model, train(model, device, clip=clip)[0]


def fsdp2_lora(device, mesh):
    model = fresh().requires_grad_(False)
    for block in model.blocks:
        block.qkv, block.up = LowRank(block.qkv), LowRank(block.up)
    sharded(model.to(device), mesh)
    return model, train(model, device)[0]


def fsdp2_meta(device, mesh):
    """Sharded without memory, then given it."""
    with torch.device("meta"):
        model = GPT()
    sharded(model, mesh).to_empty(device=device)
    for i, parameter in enumerate(model.parameters()):
        local = parameter.to_local()
        local.data.copy_(torch.randn(local.shape, generator=torch.Generator().manual_seed(i)) / 10)
    return model, train(model, device)[0]


def fsdp2_autocast(device, mesh):
    model = sharded(fresh().to(device), mesh)
    model.forward = functools.partial(autocast_forward, model.forward, device.type)
    return model, train(model, device)[0]


def autocast_forward(forward, kind, ids):
    with torch.autocast(kind, dtype=torch.bfloat16):
        return forward(ids)


def fsdp1(device, mesh, **options):
    model = FullyShardedDataParallel(
        fresh().to(device),
        device_id=device,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        use_orig_params=True,
        **options,
    )
    losses, _ = train(model, device)
    return model, losses


CASES = {
    "fsdp2": fsdp2,
    "fsdp2_clip": functools.partial(fsdp2, clip=0.5),
    "fsdp2_bf16": functools.partial(
        fsdp2, sharding={"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)}
    ),
    "fsdp2_keep": functools.partial(fsdp2, sharding={"reshard_after_forward": False}),
    "fsdp2_checkpoint": functools.partial(fsdp2, checkpointed=True),
    "fsdp2_lora": fsdp2_lora,
    "fsdp2_meta": fsdp2_meta,
    "fsdp1": fsdp1,
}
# Its random numbers, and which operators autocast takes, are the device's own.
OF_THE_DEVICE = {
    "dropout": functools.partial(fsdp2, dropout=0.2),
    "dropout_checkpoint": functools.partial(fsdp2, dropout=0.2, checkpointed=True),
    "autocast": fsdp2_autocast,
}


def how_far_ahead(device, mesh):
    """Of each step but the first two, the share that the device still had to do when the host had enqueued it. The device
    is as slow as makes a step compute for 0.2 s at least."""
    torch.sim.set_rates(gflops=4)
    model = sharded(fresh(width=256).to(device), mesh)
    _, times = train(model, device, steps=5, batch=8, after_step=torch.sim.synchronize)
    torch.sim.set_rates()
    return [1 - enqueued / done for enqueued, done in times[2:]], [done for _, done in times[2:]]


def main(kind, out):
    rank = int(os.environ["RANK"])
    if kind == "sim":
        import torch_sim  # noqa: F401

        torch.sim.set_device(rank)
    dist.init_process_group("gloo" if kind == "cpu" else None)
    device = torch.device(kind, rank if kind == "sim" else None)
    mesh = init_device_mesh(kind, (dist.get_world_size(),))
    found = {}
    for name, case in {**CASES, **(OF_THE_DEVICE if kind == "sim" else {})}.items():
        torch.manual_seed(1)
        model, losses = case(device, mesh)
        found[name] = {"losses": losses, "parameters": hashed(model)}
    if kind == "sim":
        found["ahead"], found["seconds"] = how_far_ahead(device, mesh)
        found["counts"] = torch.sim.counts()
    if os.environ.get("FCDP") == "1":
        import fcdp

        found |= {name: fcdp.stats()[name] for name in ("gathers", "transport", "spill", "deltas")}
    pathlib.Path(out, f"rank{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
