"""Which ranks have FCDP on: each of them leaves a mark in the job's store.

A rank without FCDP leaves none, and runs plain FSDP: its first gather is not FCDP's. A rank whose mark is not there
has no FCDP or is late, and no time tells the two apart. A gather of FSDP's own does, which such a rank comes to in
either case: a rank with FCDP leaves its mark first, so behind that gather a mark that is missing comes no more. The
marks are there long before the first gather, and FSDP gathers only where one is missing.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import distributed_c10d

# For marks that are about to come, before FSDP makes a gather that FCDP may have to make again. Decides nothing else.
PATIENCE = timedelta(seconds=3)

# By the process group: since the job's own was initialised, so the same on every rank that asks.
_n_asked: Counter[str] = Counter()


def _mark(rank: int) -> str:
    return f"fcdp/on/{rank}"


def announce() -> None:
    """Called where FSDP has been patched, and from begin(): it needs both."""
    if not dist.is_available() or not dist.is_initialized():
        return
    try:
        distributed_c10d._get_default_store().set(_mark(dist.get_rank()), "")
    except Exception:  # a store that answers nobody: whoever needs it next says so
        pass


def begin() -> None:
    """Called where a process group was initialised: the names of its groups begin anew."""
    _n_asked.clear()
    announce()


def name_of(group: dist.ProcessGroup) -> str:
    """Of what its ranks have seen, in the store. The group's own name is not enough: torch gives siblings one name."""
    ranks = dist.get_process_group_ranks(group)
    return f"fcdp/seen/{group.group_name}/{hashlib.blake2b(repr(ranks).encode(), digest_size=8).hexdigest()}"


def absent(group: dist.ProcessGroup, store: dist.Store, gather: Callable[[], None]) -> list[int]:
    """The group's ranks on which FCDP is not on: the same answer on every rank that asks. `gather` carries out the
    gather of FSDP's that the rank is at, to its end; it is called on all of the ranks that ask, or on none."""
    ranks = dist.get_process_group_ranks(group)
    try:
        store.wait([_mark(rank) for rank in ranks], PATIENCE)
        seen = "all"
    except Exception:  # its class is another in older torch; a store that is gone fails again below
        seen = "some"
    name = name_of(group)
    key = f"{name}/{_n_asked[name]}"
    _n_asked[name] += 1
    if store.compare_set(key, "", seen) == b"all":  # what the first one has seen counts for all
        return []
    gather()
    return [rank for rank in ranks if not store.check([_mark(rank)])]
