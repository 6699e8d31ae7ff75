"""One rank of FSDP2 beside another allocator that fills the simulated device: each of the two gets the memory
that the other does not use. Writes what happened to rank<RANK>.json under the folder that it is given."""

import ctypes
import json
import os
import sys

import torch
import torch.distributed as dist

import compat
from fcdp import _fcdp
from fcdp.runtime import runtime
from fcdp.settings import options
from models import Net, shard

PAGE = 2 << 20


class Location(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class Properties(ctypes.Structure):
    _fields_ = [
        ("type", ctypes.c_int),
        ("handles", ctypes.c_int),
        ("location", Location),
        ("windows", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    ]


class Neighbour:
    """Takes handles of the simulated driver, and keeps them until it is told to empty its cache."""

    def __init__(self, path):
        self.lib = ctypes.CDLL(path)
        context = ctypes.c_void_p()
        assert self.lib.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
        assert self.lib.cuCtxSetCurrent(context) == 0
        self.properties = Properties(type=1, location=Location(1, 0))
        self.cached, self.n_emptied = [], 0

    def take(self):
        handle = ctypes.c_uint64()
        result = self.lib.cuMemCreate(
            ctypes.byref(handle), ctypes.c_size_t(PAGE), ctypes.byref(self.properties), ctypes.c_ulonglong(0)
        )
        if result == 0:
            self.cached.append(handle)
        return result

    def fill(self):
        n_before = len(self.cached)
        while (result := self.take()) == 0:
            pass
        assert result == 2, result
        return len(self.cached) - n_before

    def empty_cache(self):
        self.n_emptied += 1
        while self.cached:
            assert self.lib.cuMemRelease(self.cached.pop()) == 0


def main():
    torch.set_num_threads(1)
    compat.prepare()
    dist.init_process_group("gloo")
    torch.manual_seed(1234)
    model = shard(Net(dim=512, n_blocks=4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def step():
        loss = (model(torch.ones(3, 11)) ** 2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    losses = [step()]
    neighbour = Neighbour(os.environ["FCDP_SIM_LIBRARY"])
    torch_asks = runtime.engine.share_device(neighbour.empty_cache)
    alone = neighbour.fill()
    given = _fcdp.neighbour_yield(1 << 40)  # of groups that are not in use
    more = neighbour.fill()
    losses.append(step())  # finds no memory, and asks
    n_emptied = neighbour.n_emptied
    for _ in range(2):
        losses.append(step())
    neighbour.empty_cache()
    result = {
        "alone": alone,
        "given": given,
        "more": more,
        "emptied": n_emptied,
        "again": neighbour.n_emptied - n_emptied - 1,
        "losses": losses,
        "torch_asks": torch_asks,
        "transport": options["transport"],
    }
    dist.barrier()
    with open(os.path.join(sys.argv[1], f"rank{os.environ['RANK']}.json"), "w") as f:
        json.dump(result, f)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
