"""A job that fcdp-plan profile runs on the emulated nodes: how fast the machine's own links are, over gloo, and its memory.

Writes seconds into the file that it is given: of each collective, of a small and of a large piece of `size` bytes, and of
a copy in memory. All ranks work at once, as in training. Each is the median of several calls, of the slowest rank. Given a
pause as well, it measures the large pieces alone, each behind a pause of so many seconds.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from fcdp.c10d import swap

SMALL_BYTES = 1 << 10
CALLS = 9


pause_s = 0.0


def seconds(call: Callable[[], object]) -> float:
    """Of a call, of the slowest rank: they begin together."""
    taken = []
    for _ in range(CALLS):
        dist.barrier()
        time.sleep(pause_s)
        began = time.monotonic()
        call()
        taken.append(time.monotonic() - began)
    slowest = torch.tensor(taken, dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return statistics.median(slowest.tolist())


def gather(group: dist.ProcessGroup, size: int) -> float:
    """An all-gather of `size` bytes."""
    n = dist.get_world_size(group)
    part = torch.ones(size // 4 // n)
    whole = torch.empty(part.numel() * n)
    return seconds(lambda: dist.all_gather_into_tensor(whole, part, group=group))


def exchange(group: dist.ProcessGroup, size: int) -> float:
    """As `gather`, as FCDP makes it: between two ranks, each part goes straight to its place."""
    if dist.get_world_size(group) != 2:
        return gather(group, size)
    parts, place = torch.ones(2 * (size // 8)).view(torch.uint8).chunk(2), dist.get_rank(group)
    mine, theirs = {1 - place: parts[place]}, {1 - place: parts[1 - place]}

    def call() -> None:
        for work in swap(group, 0, mine, theirs):
            work.wait()

    return seconds(call)


def scatter(group: dist.ProcessGroup, size: int) -> float:
    n = dist.get_world_size(group)
    part = torch.empty(size // 4 // n)
    whole = torch.ones(part.numel() * n)
    return seconds(lambda: dist.reduce_scatter_tensor(part, whole, group=group))


def reduce(group: dist.ProcessGroup, size: int) -> float:
    whole = torch.ones(size // 4)
    return seconds(lambda: dist.all_reduce(whole, group=group))


def copy(size: int) -> float:
    source, target = torch.ones(size // 4), torch.empty(size // 4)
    return seconds(lambda: target.copy_(source))


def main() -> None:
    global pause_s
    path, size = sys.argv[1], int(sys.argv[2])
    pause_s = float(sys.argv[3]) if len(sys.argv) > 3 else 0.0
    dist.init_process_group("gloo")
    rank, world, per_node = dist.get_rank(), dist.get_world_size(), int(os.environ["LOCAL_WORLD_SIZE"])
    nodes = [dist.new_group(list(range(at, at + per_node))) for at in range(0, world, per_node)]
    lanes = [dist.new_group(list(range(at, world, per_node))) for at in range(per_node)]
    node, lane = nodes[rank // per_node], lanes[rank % per_node]
    everyone = dist.group.WORLD
    found: dict[str, list[float]] = {"copy": [copy(SMALL_BYTES), copy(size)]}
    for name, measure, group in (
        ("gather", gather, everyone),
        ("scatter", scatter, everyone),
        ("node_gather", gather, node),
        ("node_scatter", scatter, node),
        ("lane_gather", exchange, lane),
        ("lane_reduce", reduce, lane),
    ):
        # A lane's ranks each have their part of what the node has.
        of = size // per_node if group is lane else size
        found[name] = [0.0 if pause_s else measure(group, SMALL_BYTES), measure(group, of)]
    if rank == 0:
        with open(path, "w") as file:
            json.dump({"size": size, "small": SMALL_BYTES, "seconds": found}, file)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
