"""One rank: trains, unsharding by hand what FCDP serves from then on, and writes which threads used each of
FCDP's lanes: a lane is one connection, in which what two threads send would mix."""

import json
import os
import sys
import threading

import torch
import torch.distributed as dist

import compat
from fcdp import c10d
from models import Net, shard

used: dict[str, set[bool]] = {}


def watch(method):
    """Notes of every collective of a lane whether the thread that runs the model began it."""
    original = getattr(c10d.Lane, method)

    def watched(self, *args):
        kind = self.roll.name.split("/")[2]
        used.setdefault(kind, set()).add(threading.current_thread() is threading.main_thread())
        return original(self, *args)

    setattr(c10d.Lane, method, watched)


def main():
    compat.prepare()
    for method in ("all_gather", "all_gather_in_place", "max_"):
        watch(method)
    dist.init_process_group("gloo")
    torch.manual_seed(1234)
    model = shard(Net(n_blocks=3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(2):
        for handle in [block.unshard(async_op=True) for block in model.blocks]:
            handle.wait()
        (model(torch.ones(3, 11)) ** 2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.barrier()
    with open(os.path.join(sys.argv[1], f"rank{os.environ['RANK']}.json"), "w") as f:
        json.dump({kind: sorted(threads) for kind, threads in used.items()}, f)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
