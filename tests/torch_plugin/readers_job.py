"""Who reads the shards' bytes in a GPU job whose second group is offloaded to the CPU: prints it, as JSON. The
GPU, the core's votes and the kernel are stand-ins; the decision is FCDP's."""

import json
import sys
import types
from array import array

import torch

from fcdp import _fcdp
from fcdp import runtime as module

GPU = torch.device("cuda", 0)


class OnDevice:
    """A shard in a GPU's memory."""

    device = GPU
    nbytes = 32

    def data_ptr(self):
        return 4096


class Extent:
    name, steps = "weight", 0

    def __init__(self, shard):
        self._shard = shard

    def shard(self):
        return self._shard

    def pieces(self):
        return [self._shard]

    def signals(self, group):
        return (int(group.is_read(self._shard)),) + (0,) * 7


def group_of(shards, *tensors):
    return module.Group("blocks.0", [Extent(t) for t in tensors], shards, None, [32] * len(tensors), None)


def main():
    kernel_runs = sys.argv[1] == "kernel"
    core = types.SimpleNamespace(**{name: getattr(_fcdp, name) for name in dir(_fcdp)})
    core.comm_fingerprints = lambda comm, addresses, sizes, stream: bytes(len(addresses)) if kernel_runs else None
    core.group_vote = lambda handle, signals, addresses, sizes, counts, by_device, fingerprints, *scene: [
        signals,
        bytes(len(addresses)) if by_device else addresses,
        fingerprints,
    ]
    module._fcdp = core
    runtime = module.runtime
    runtime.options = _fcdp.options_load()
    shards = types.SimpleNamespace(device=GPU, comm=None, n_groups=0)
    groups = [
        group_of(shards, OnDevice(), OnDevice()),
        group_of(shards, torch.ones(8)),
        group_of(shards, OnDevice(), torch.ones(8)),
    ]
    found = []
    for group, fingerprints in zip(groups, runtime._device_fingerprints(groups, 0)):
        signals, addresses, used = group.vote(fingerprints)
        n = group.n
        found.append(
            {
                "by_device": len(used) == 8 * n,
                "by_host": [bool(a) for a in array("Q", addresses)],
                "read": [bool(s) for s in array("Q", signals)[::8]],
            }
        )
    print(json.dumps(found))


if __name__ == "__main__":
    main()
