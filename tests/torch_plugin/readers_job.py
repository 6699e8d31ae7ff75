"""Who reads the shards' bytes in a GPU job whose second group is offloaded to the CPU: prints it, as JSON. The
GPU is a stand-in; the decision is FCDP's. argv: "kernel", or "no kernel" where the device takes no fingerprints."""

import json
import sys
import types
from array import array

import torch

from fcdp import _fcdp, settings
from fcdp.group import Group

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
    name, steps, in_c = "weight", 0, False

    def __init__(self, shard):
        self._shard = shard

    def shard(self):
        return self._shard

    def pieces(self):
        return [self._shard]

    def signals(self, group):
        return (int(group.is_read(self._shard)),) + (0,) * 7


def group_of(shards, *tensors):
    core = types.SimpleNamespace(set_owner=lambda *_: None)
    return Group("blocks.0", [Extent(t) for t in tensors], shards, core, [32] * len(tensors), None)


def main():
    settings.options.update(_fcdp.options_load())
    shards = types.SimpleNamespace(device=GPU, comm=None, n_groups=0)
    groups = [
        group_of(shards, OnDevice(), OnDevice()),
        group_of(shards, torch.ones(8)),
        group_of(shards, OnDevice(), torch.ones(8)),
        group_of(shards, OnDevice(0), OnDevice(31)),
    ]
    if sys.argv[1] == "no kernel":
        groups[0].blind()
    found = []
    for group in groups:
        (addresses, sizes, _, _, by_device), _, _ = group.look(_fcdp.LOOK_PLACES)
        _, signals, _ = group.look(_fcdp.LOOK_SIGNALS | _fcdp.LOOK_SCENE)
        read = [bool(s) for s in array("Q", signals)[::8]]
        places = [[*place] for place in zip(array("Q", addresses), array("Q", sizes))]
        found.append({"by_device": by_device, "places": places, "read": read})
    print(json.dumps(found))


if __name__ == "__main__":
    main()
