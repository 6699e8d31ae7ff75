"""Two members of a lane, in an exchange of 256 MiB each; the first one kills the other as soon as its bytes come, and
says how its wait ends, and after how many seconds. Arguments: `gather` or `reduce`, whose exchange; the member's
number; a file for the store; the lane's timeout."""

import json
import os
import signal
import sys
import threading
import time

import torch
import torch.distributed as dist

from fcdp import c10d, reduce

BYTES = 256 << 20


def exchange(kind, lane, rows, taken):
    if kind == "reduce":
        return reduce.cross(lane, rows, taken)
    taken[lane.place] = rows[lane.place]
    for work in lane.all_gather_in_place(taken.view(-1), lane.roll.enter()):
        work.wait()


def kill_once_it_comes(first, victim):
    while not first[0]:
        os.sched_yield()
    os.kill(victim, signal.SIGKILL)


def main():
    kind, me, path, timeout_s = sys.argv[1], int(sys.argv[2]), sys.argv[3], float(sys.argv[4])
    store = dist.FileStore(path, 2)
    store.set(f"pid{me}", str(os.getpid()))
    lane = c10d.Lane([0, 1], me, store, "lane", timeout_s)
    rows, taken = torch.ones(2, BYTES, dtype=torch.uint8), torch.zeros(2, BYTES, dtype=torch.uint8)
    victim = int(store.get("pid1"))
    if me == 0:
        threading.Thread(target=kill_once_it_comes, args=(taken[1, :1].numpy(), victim)).start()
    began, error = time.monotonic(), ""
    try:
        exchange(kind, lane, rows, taken)
    except RuntimeError as raised:
        error = str(raised)
    if me == 1:
        signal.pause()
    print(json.dumps({"error": error, "seconds": time.monotonic() - began, "came": bool(taken[1, -1])}))


if __name__ == "__main__":
    main()
