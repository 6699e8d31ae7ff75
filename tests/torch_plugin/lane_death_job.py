"""Two members of a lane, in an exchange of 256 MiB each; the first one kills the other as soon as its bytes come, and says how
its wait ends, and after how many seconds. Arguments: the member's number, a file for the store, the lane's timeout."""

import json
import os
import signal
import sys
import time

import torch
import torch.distributed as dist

from fcdp import c10d

BYTES = 256 << 20


def main():
    me, path, timeout_s = int(sys.argv[1]), sys.argv[2], float(sys.argv[3])
    store = dist.FileStore(path, 2)
    store.set(f"pid{me}", str(os.getpid()))
    lane = c10d.Lane([0, 1], me, store, "lane", timeout_s)
    out = torch.zeros(2 * BYTES, dtype=torch.uint8)
    out[me * BYTES : (me + 1) * BYTES] = 1
    victim = int(store.get("pid1"))
    works = lane.all_gather_in_place(out, lane.roll.enter())
    if me == 1:
        signal.pause()
    first = out[BYTES : BYTES + 1].numpy()
    while not first[0]:
        os.sched_yield()
    os.kill(victim, signal.SIGKILL)
    began, error = time.monotonic(), ""
    try:
        for work in works:
            work.wait()
    except RuntimeError as raised:
        error = str(raised)
    print(json.dumps({"error": error, "seconds": time.monotonic() - began, "came": bool(out[-1])}))


if __name__ == "__main__":
    main()
