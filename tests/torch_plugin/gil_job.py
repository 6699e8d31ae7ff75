"""One rank: trains, and writes what its collectives had to do with Python in the steps after the first two.
argv: the folder, a witness of the calls into NCCL (tests/simnccl/witness.c) or nothing."""

import ctypes
import json
import os
import sys

import torch
import torch.distributed as dist

import compat
import fcdp
from models import Net, shard

STEPS = 3
witness = ctypes.CDLL(sys.argv[2]) if len(sys.argv) > 2 else None


def counts():
    stats = fcdp.stats()
    out = {
        "python_calls": stats["python_calls"],
        "collectives": sum(stats["collectives"][kind]["calls"] for kind in ("gather", "restore")),
    }
    if witness:
        out |= {"nccl_calls": witness.witness_calls(), "nccl_calls_with_gil": witness.witness_calls_with_gil()}
    return out


def main():
    compat.prepare()
    dist.init_process_group("gloo")
    torch.manual_seed(1234)
    model = shard(Net(n_blocks=3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(2 + STEPS):
        if step == 2:
            before = counts()
        (model(torch.ones(3, 11)) ** 2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    after = counts()
    result = {key: (after[key] - before[key]) / STEPS for key in after} | {"transport": fcdp.stats()["transport"]}
    if witness:  # whether it knows the GIL when it sees it: PyDLL keeps it, CDLL lets it go
        result["knows"] = [ctypes.PyDLL(sys.argv[2]).witness_has_gil(), witness.witness_has_gil()]
    dist.barrier()
    with open(os.path.join(sys.argv[1], f"rank{os.environ['RANK']}.json"), "w") as f:
        json.dump(result, f)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
