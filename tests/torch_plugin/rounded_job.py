"""One rank of test_rounded.py: trains with FCDP_CODEC=int8, and looks at the weights that forward and backward compute
with, and at the shards. argv: the folder, the gathered dtype (float32 or bfloat16), and "checkpointed" where backward is
to compute the activations again."""

import hashlib
import json
import pathlib
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

import fcdp

DIM, N_BLOCKS, N_STEPS = 96, 3, 3
forward_saw, all_seen = {}, hashlib.blake2b()


def raw(tensor):
    return tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


class Block(nn.Module):
    def __init__(self, index):
        super().__init__()
        self.index = index
        self.weight = nn.Parameter(torch.randn(DIM, DIM) / DIM**0.5)
        self.strange = nn.Parameter(torch.zeros(DIM, 300))  # rank by rank, a block of 256 is not finite
        self.table = nn.Parameter(torch.randint(0, 99, (DIM,), dtype=torch.int32), requires_grad=False)

    def forward(self, x):
        x = Look.apply(x, self)
        weights = [p.detach().clone() for p in (self.weight, self.strange, self.table)]
        if forward_saw.setdefault(self.index, weights) is weights:
            for p in weights:
                all_seen.update(raw(p))
        else:
            for now, was in zip(weights, forward_saw[self.index]):
                assert raw(now) == raw(was), "the activations are computed again with other weights"
        return torch.relu(x @ self.weight) + 0 * self.strange.nan_to_num(0, 0, 0).sum()


class Look(torch.autograd.Function):
    """In backward the same weights as in forward."""

    @staticmethod
    def forward(ctx, x, block):
        ctx.block = block
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        for now, was in zip((ctx.block.weight, ctx.block.strange, ctx.block.table), forward_saw[ctx.block.index]):
            assert raw(now) == raw(was), "backward computes with other weights than forward"
        return grad, None


def shards_together(parameter):
    """The exact parameter, by torch alone."""
    n, local = dist.get_world_size(), parameter.to_local()
    assert local.numel() * n == parameter.numel()
    parts = [torch.empty_like(local) for _ in range(n)]
    dist.all_gather(parts, local.contiguous())
    return torch.cat(parts)


def look_at_copies(model, dtype):
    """What was computed with is near the shards, and not them; what is frozen, int32 and blocks that are not finite are
    exact."""
    for block in model:
        weight, strange, table = forward_saw[block.index]
        exact = shards_together(block.weight).to(dtype)
        error = (weight.double() - exact.double()).norm() / exact.double().norm()
        assert weight.dtype == dtype and (1e-3 < error < 2e-2 if block.weight.requires_grad else error == 0), error
        assert torch.equal(table, shards_together(block.table))
        odd, exact = ~strange.isfinite(), shards_together(block.strange).to(dtype)
        assert odd.any() and raw(strange[odd]) == raw(exact[odd])


def look_at_masters(model):
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    for long_name, parameter in model.named_parameters():
        name = long_name.replace("_checkpoint_wrapped_module.", "")
        exact = shards_together(parameter)
        assert raw(parameter.full_tensor()) == raw(exact), name
        if dist.get_rank() == 0:
            assert raw(state[name]) == raw(exact), name


def main():
    folder, dtype = pathlib.Path(sys.argv[1]), getattr(torch, sys.argv[2])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, n = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    model = nn.Sequential(*(Block(i) for i in range(N_BLOCKS)))
    with torch.no_grad():
        for block in model:
            for r in range(n):
                block.strange[r * DIM // n] = float("inf") if r % 2 else float("nan")
    model[0].requires_grad_(False)  # gathered once
    if "checkpointed" in sys.argv:
        apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, Block))
    for block in model:
        fully_shard(block, mp_policy=MixedPrecisionPolicy(param_dtype=None if dtype == torch.float32 else dtype))
    fully_shard(model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(N_STEPS):
        forward_saw.clear()
        x = torch.randn(8, DIM, generator=generator).requires_grad_()
        loss = model(x).float().square().mean()
        loss.backward()
        look_at_copies(model, dtype)
        optimizer.step()
        optimizer.zero_grad()
        all_seen.update(raw(loss))
    assert all(isinstance(p, DTensor) for p in model.parameters())
    look_at_masters(model)
    digests = [None] * n
    dist.all_gather_object(
        digests, hashlib.blake2b(b"".join(raw(p) for one in forward_saw.values() for p in one)).hexdigest()
    )
    assert len(set(digests)) == 1, "ranks compute with different weights"
    result = {"digest": all_seen.hexdigest(), "stats": fcdp.stats()}
    (folder / f"result{rank}.json").write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
