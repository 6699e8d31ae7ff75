"""An FSDP script as a user writes it, for launches that are given something wrong: a few steps, then a digest of what
came out in result<RANK>.json under the folder that it is given."""

import argparse
import ctypes
import datetime
import faulthandler
import hashlib
import json
import os
import pathlib
import resource
import signal
import sys

faulthandler.register(signal.SIGUSR1, all_threads=True)  # first: unregistered, the signal would end the process

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import compat
from models import Net, shard, world_mesh, wrap
from run import Run, raw_bytes

MEMLOCK_BYTES = 64 << 10


def lock_little():
    """This process may lock no more, root's neither, which needs a capability for that (14, CAP_IPC_LOCK)."""
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (MEMLOCK_BYTES, MEMLOCK_BYTES))
    libc = ctypes.CDLL(None)
    version_3 = (ctypes.c_uint32 * 2)(0x20080522, 0)
    sets = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable: the lower halves, then the upper ones
    assert libc.capget(version_3, sets) == 0
    sets[:2] = [each & ~(1 << 14) for each in sets[:2]]
    assert libc.capset(version_3, sets) == 0


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=pathlib.Path, nargs="?")
    parser.add_argument("--timeout", type=float, default=60)
    parser.add_argument("--fsdp1", action="store_true")
    parser.add_argument("--freeze", type=int, nargs="*", default=[], metavar="BLOCK")
    parser.add_argument("--split", type=int, nargs=2, metavar=("BLOCK", "PARTS"), help="its `up`, by fcdp.split()")
    parser.add_argument("--little-memlock", type=int, nargs="*", default=[], metavar="RANK")
    arguments = parser.parse_args()
    if int(os.environ["RANK"]) in arguments.little_memlock:
        lock_little()
    torch.set_num_threads(1)
    compat.prepare()
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=arguments.timeout))
    rank = dist.get_rank()
    run = Run("plain script", rank, dist.get_world_size())
    model = Net(dim=128, n_blocks=4)
    for i in arguments.freeze:
        model.blocks[i].requires_grad_(False)
    if arguments.split:
        import fcdp

        for part in fcdp.split(model.blocks[arguments.split[0]].up, parts=arguments.split[1]):
            fully_shard(part, mesh=world_mesh())
    model = (wrap if arguments.fsdp1 else shard)(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    digest = hashlib.blake2b()
    for step in range(3):
        loss = run.loss(model)
        digest.update(raw_bytes(loss))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}", flush=True)
    for parameter in optimizer.param_groups[0]["params"]:
        digest.update(raw_bytes(parameter))
    fcdp = sys.modules.get("fcdp")
    stats = fcdp.stats() if fcdp else None
    (arguments.folder / f"result{rank}.json").write_text(json.dumps({"digest": digest.hexdigest(), "stats": stats}))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
