"""One rank: trains with FCDP_CODEC=delta over NCCL, where nobody reaches rank 0's exchange. argv: the folder."""

import json
import os
import sys

import torch
import torch.distributed as dist

import compat
import fcdp
from fcdp import _fcdp
from models import Net, shard


class Unreached:
    """Listens, and tells the others of a port that nobody listens at."""

    def __init__(self, *hints):
        self.exchange, self.elsewhere = listen(*hints), listen(*hints).card()
        self.connect = self.exchange.connect

    def card(self):
        return self.elsewhere


listen = _fcdp.listen


def main():
    if os.environ["RANK"] == "0":
        _fcdp.listen = Unreached
    compat.prepare()
    dist.init_process_group("gloo")
    torch.manual_seed(1234)
    model = shard(Net(n_blocks=3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(3):
        (model(torch.ones(3, 11)) ** 2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    stats = fcdp.stats()
    with open(os.path.join(sys.argv[1], f"rank{os.environ['RANK']}.json"), "w") as f:
        json.dump({name: stats[name] for name in ("transport", "deltas", "bypassed")}, f)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
