"""What do the policies move between device and host, beside the least that is possible?

Schedules are recorded from real jobs (job.py): FSDP2 under FCDP, one step in its steady state. A policy's bytes are
those that one such step moves between the device and the host, if the step repeats for ever: loads of what was not
kept, and stores of what was gathered and not kept until it is gathered anew. The budget is what may be kept beside the
groups in use, as a share of W.

  tau       simulated: at the end of a use a group stays if what is in use is below tau x the budget; where pages
            lack, the least recently used one goes. At the best of the taus.
  next-use  the plan of tiering/policy.c.
  optimum   of all plans, by an integer program (scipy's HiGHS).
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import subprocess
import sys
from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import lil_array

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
from job import KINDS

ROOT = pathlib.Path(__file__).resolve().parents[3]
JOB = pathlib.Path(__file__).with_name("job.py")
OUT = ROOT / "build" / "policies"
PROGRAM = ROOT / "build" / "release" / "tools" / "bench" / "policies" / "fcdp-policies"
PAGE_BYTES = 4096
SHARES = (0, 0.1, 0.25, 0.5, 0.75, 0.9, 1)  # of W
TAUS = tuple(i / 20 for i in range(21))
IN_USE = 2  # groups at once: one computes, the next is there
MOST_OVER = 1.05


class Use(NamedTuple):
    region: int
    pages: int
    load: int
    store: int
    busy: int


class Schedule(NamedTuple):
    uses: list[Use]
    ends: list[int]  # of the interval that begins at use i: i < ends[i] <= i + n

    @property
    def n(self) -> int:
        return len(self.uses)

    def open_at(self, i: int) -> list[int]:
        """The uses at which the interval that begins at use i is open."""
        return [at % self.n for at in range(i + 1, self.ends[i])]

    def content(self, first: int) -> list[int]:
        """The intervals of what use `first` fills."""
        intervals, i = [first], self.ends[first] % self.n
        while i != first and not self.uses[i].store:
            intervals.append(i)
            i = self.ends[i] % self.n
        return intervals

    def moved(self, keep: list[bool]) -> int:
        loads = sum(self.uses[self.ends[i] % self.n].load for i in range(self.n) if not keep[i])
        fills = [i for i in range(self.n) if self.uses[i].store]
        return loads + sum(self.uses[i].store for i in fills if not all(keep[k] for k in self.content(i)))


def recorded(kind: str) -> list[dict[str, Any]]:
    from fcdp_lab.port import free_port

    out = OUT / f"{kind.replace(' ', '_').replace(',', '')}.json"
    env = {
        **os.environ,
        "FCDP": "1",
        "FCDP_LOCAL_SIZE": "1",
        "FCDP_PREFETCH": "0",
        "FCDP_COALESCE": "0",
        "FCDP_SUMMARY": "0",
        "OMP_NUM_THREADS": "1",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    ranks = [
        subprocess.Popen([sys.executable, JOB, kind, out], env=env | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(2)
    ]
    try:
        if [process.wait(300) for process in ranks] != [0, 0]:
            sys.exit(f"the job {kind!r} failed")
    finally:
        for process in ranks:
            process.kill()
    return json.loads(out.read_text())


def schedule_of(uses: list[dict[str, Any]]) -> Schedule:
    n, pages = len(uses), [-(-use["bytes"] // PAGE_BYTES) for use in uses]
    busy = [sum(pages[(i + k) % n] for k in range(IN_USE)) for i in range(n)]
    ends = []
    for i in range(n):
        end = i + 1
        while uses[end % n]["group"] != uses[i]["group"]:
            end += 1
        ends.append(end)
    return Schedule(
        [Use(use["group"], pages[i], use["load"], use["store"], busy[i]) for i, use in enumerate(uses)], ends
    )


def planned(schedule: Schedule, budgets: list[int], program: pathlib.Path = PROGRAM) -> list[list[bool]]:
    """By fcdp-policies, for each budget in pages."""
    n_regions = 1 + max(use.region for use in schedule.uses)
    text = f"{schedule.n} {n_regions} {PAGE_BYTES} {len(budgets)} {' '.join(map(str, budgets))}\n"
    text += "".join(f"{' '.join(map(str, use))}\n" for use in schedule.uses)
    done = subprocess.run([program], input=text, capture_output=True, text=True, check=True)
    return [[digit == "1" for digit in line] for line in done.stdout.split()]


def moved_by_tau(schedule: Schedule, budget: int, tau: float) -> int:
    """Bytes of one period, the fourth."""
    kept: dict[int, tuple[int, int, int]] = {}  # region -> pages, bytes that the host lacks, last use
    unstored: dict[int, int] = {}
    bytes_ = 0
    for i in range(4 * schedule.n):
        if i == 3 * schedule.n:
            bytes_ = 0
        use = schedule.uses[i % schedule.n]
        if use.region in kept:
            unstored[use.region] = kept.pop(use.region)[1]
        else:
            bytes_ += use.load
        if use.store:
            unstored[use.region] = use.store
        while kept and use.busy + sum(pages for pages, _, _ in kept.values()) > budget:
            region = min(kept, key=lambda r: (kept[r][1] > 0, kept[r][2]))
            bytes_ += kept.pop(region)[1]
        lacks = unstored.pop(use.region, 0)
        if use.busy + sum(pages for pages, _, _ in kept.values()) < tau * budget:
            kept[use.region] = (use.pages, lacks, i)
        else:
            bytes_ += lacks
    return bytes_


def least_moved(schedule: Schedule, budget: int) -> int:
    """Variables: an interval is kept; the store of what use i fills is spared."""
    fills = [i for i in range(schedule.n) if schedule.uses[i].store]
    n = schedule.n + len(fills)
    worth = np.array(
        [schedule.uses[schedule.ends[i] % schedule.n].load for i in range(schedule.n)]
        + [schedule.uses[i].store for i in fills],
        dtype=float,
    )
    rows = [(i, schedule.content(i)) for i in fills]
    matrix = lil_array((schedule.n + sum(len(intervals) for _, intervals in rows), n))
    most = []
    for i in range(schedule.n):
        for at in schedule.open_at(i):
            matrix[at, i] = schedule.uses[i].pages
    most += [max(0, budget - use.busy) for use in schedule.uses]
    row = schedule.n
    for k, (_, intervals) in enumerate(rows):
        for i in intervals:
            matrix[row, schedule.n + k], matrix[row, i] = 1, -1
            most.append(0)
            row += 1
    found = milp(
        -worth,
        integrality=np.ones(n),
        bounds=Bounds(0, 1),
        constraints=LinearConstraint(matrix.tocsr(), -np.inf, most),
        options={"time_limit": 60, "mip_rel_gap": 0},
    )
    if found.status != 0:
        sys.exit(f"the integer program ended with: {found.message}")
    return round(sum(use.load + use.store for use in schedule.uses) + found.fun)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="tools/bench.sh policies", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.parse_args()
    OUT.mkdir(parents=True, exist_ok=True)
    print("Bytes moved between device and host in one step, in units of W: tau at its best, next-use, optimum.\n")
    print("| step | " + " | ".join(f"{share:.0%} of W" for share in SHARES) + " |")
    print("| --- |" + " --- |" * len(SHARES))
    bad = []
    for kind in KINDS:
        schedule = schedule_of(recorded(kind))
        sizes = {use.region: use.pages for use in schedule.uses}
        w = sum(sizes.values())
        budgets = [max(use.busy for use in schedule.uses) + round(share * w) for share in SHARES]
        cells = []
        for share, budget, keep in zip(SHARES, budgets, planned(schedule, budgets), strict=True):
            tau = min(moved_by_tau(schedule, budget, tau) for tau in TAUS)
            mine, best = schedule.moved(keep), least_moved(schedule, budget)
            cells.append(" ".join(f"{bytes_ / w / PAGE_BYTES:.2f}" for bytes_ in (tau, mine, best)))
            if mine > MOST_OVER * best or mine > tau:
                bad.append(f"{kind} at {share:.0%} of W: tau {tau}, next-use {mine}, optimum {best} bytes")
        print(f"| {kind} | " + " | ".join(cells) + " |", flush=True)
    for line in bad:
        print(f"next-use must be within {MOST_OVER} of the optimum and never above tau: {line}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
