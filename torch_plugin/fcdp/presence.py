"""Which ranks have FCDP on: each of them leaves a mark in the job's store.

A rank without FCDP leaves no mark and runs plain FSDP: its first gather is not FCDP's. If a rank's mark is missing, the
rank has no FCDP or is late, and no length of time tells the two apart. A gather of FSDP's own does, since the rank
comes to it in either case: a rank with FCDP leaves its mark before, so a mark that is missing after that gather never
comes. Usually all marks are there long before the first gather; FSDP gathers only if one is missing.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import distributed_c10d

# How long to wait for late marks before FSDP makes a gather that FCDP may have to repeat. Decides nothing else.
PATIENCE = timedelta(seconds=3)

# Questions per process group since the job's own was initialised, so the same on every rank that asks.
_n_asked: Counter[str] = Counter()


def _mark(rank: int) -> str:
    return f"fcdp/on/{rank}"


def announce() -> None:
    """Leave this rank's mark. Called when FSDP has been patched, and from begin(), since both must have happened."""
    if not dist.is_available() or not dist.is_initialized():
        return
    try:
        distributed_c10d._get_default_store().set(_mark(dist.get_rank()), "")
    except Exception:  # the store does not answer: its next use reports that
        pass


def begin() -> None:
    """Called when a process group was initialised: the names of its groups begin anew."""
    _n_asked.clear()
    announce()


def name_of(group: dist.ProcessGroup) -> str:
    """The store's key for what the group's ranks have seen. The group's own name is not enough: torch gives sibling
    groups one name."""
    ranks = dist.get_process_group_ranks(group)
    return f"fcdp/seen/{group.group_name}/{hashlib.blake2b(repr(ranks).encode(), digest_size=8).hexdigest()}"


def absent(group: dist.ProcessGroup, store: dist.Store, gather: Callable[[], None]) -> list[int]:
    """The group's ranks on which FCDP is off: the same answer on every rank that asks. `gather` carries out FSDP's own
    gather at which the rank is, to its end; it is called on all of the ranks that ask, or on none."""
    ranks = dist.get_process_group_ranks(group)
    try:
        store.wait([_mark(rank) for rank in ranks], PATIENCE)
        seen = "all"
    except Exception:  # its class is another in older torch; a store that is gone fails again below
        seen = "some"
    name = name_of(group)
    key = f"{name}/{_n_asked[name]}"
    _n_asked[name] += 1
    if store.compare_set(key, "", seen) == b"all":  # what the first rank has seen counts for all
        return []
    gather()
    return [rank for rank in ranks if not store.check([_mark(rank)])]
