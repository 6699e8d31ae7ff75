"""What reads the shards' bytes in a GPU job whose second group is offloaded to the CPU: prints it, as JSON. The
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
    """A shard in a GPU's memory, or one whose storage was freed."""

    device = GPU
    nbytes, itemsize = 32, 4

    def __init__(self, stored_bytes=32):
        self.stored_bytes = stored_bytes

    def data_ptr(self):
        return 4096

    def storage_offset(self):
        return 0

    def untyped_storage(self):
        return types.SimpleNamespace(nbytes=lambda: self.stored_bytes)


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
    asked, order = [], []

    def begin(comm, addresses, sizes, stream):
        asked.extend(zip(array("Q", addresses), array("Q", sizes)))
        order.append("begin")
        return kernel_runs

    def end(comm, n):
        order.append("end")
        return bytes(8 * n)

    core.comm_fingerprint_begin, core.comm_fingerprint_end = begin, end
    core.group_needs_fingerprints = lambda handle, steps: True
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
        group_of(shards, OnDevice(0), OnDevice(31)),
    ]
    observe = module.Group.observe
    module.Group.observe = lambda group, places: (order.append("observe"), observe(group, places))[1]
    found = []
    for group, (signals, addresses, used) in zip(groups, runtime._votes(groups, 0)):
        found.append(
            {
                "by_device": len(used) == 8 * group.n,
                "by_host": [bool(a) for a in array("Q", addresses)],
                "read": [bool(s) for s in array("Q", signals)[::8]],
            }
        )
    print(json.dumps({"groups": found, "device": asked, "order": order}))


if __name__ == "__main__":
    main()
