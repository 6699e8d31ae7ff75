"""What FCDP hands to gloo of a model on the simulated device: python gloo_job.py OUT. Each rank writes rankN.json: the
kinds of memory that gloo read and wrote, why groups are not served, and what FCDP says."""

import json
import os
import pathlib
import re
import sys

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1] / "sim" / "torch"), str(HERE)]
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import fcdp
import torch_sim  # noqa: F401
import training_job
from fcdp import c10d, words


def kind_of(address):
    """The simulated device's memory is a file of that name. Of host memory that a forked child shares, a write would move
    pages that are pinned."""
    kind = "none"
    for line in pathlib.Path("/proc/self/smaps").read_text().splitlines():
        if range_of := re.match("([0-9a-f]+)-([0-9a-f]+) ", line):
            begin, end = (int(word, 16) for word in range_of.groups())
            if begin <= address < end:
                kind = "device" if "simgpu-device" in line else "host"
        elif line.startswith("VmFlags:") and kind != "none":
            return kind if "dc" in line.split() else f"{kind}, which a forked child shares"
    return kind


def main(out):
    rank, kinds, said, begin = int(os.environ["RANK"]), set(), [], c10d.Transport.begin

    def watched(self, key, address, length):
        kinds.add(kind_of(address))
        return begin(self, key, address, length)

    c10d.Transport.begin, words.write = watched, said.append
    torch.sim.set_device(rank)
    dist.init_process_group()
    device = torch.device("sim", rank)
    assert kind_of(torch.ones(3, device=device).data_ptr()).startswith("device")
    training_job.fsdp2(device, init_device_mesh("sim", (dist.get_world_size(),)))
    stats = fcdp.stats()
    bypassed = [one["reason"] for one in stats["bypassed"]]
    found = {"kinds": sorted(kinds), "bypassed": bypassed, "said": said, "deltas": stats["deltas"]}
    pathlib.Path(out, f"rank{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
