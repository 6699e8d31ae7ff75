"""FCDP, Fully Cached Data Parallel: FSDP whose gathered parameters stay on the node until they change.

``FCDP=1 torchrun train.py`` turns it on in an unmodified script; nothing here needs to be imported for that.

Importing this package is light: torch and the C core are loaded when FSDP is.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from fcdp.changes import Changes, Version

__all__ = [
    "Error",
    "OptionError",
    "VersionError",
    "apply",
    "changed",
    "enable",
    "fcdp_alloc",
    "max_memory_allocated",
    "max_memory_reserved",
    "memory_allocated",
    "memory_reserved",
    "memory_stats",
    "memory_summary",
    "options",
    "record_memory_history",
    "reset_accumulated_memory_stats",
    "reset_peak_memory_stats",
    "reset_peaks",
    "sleep",
    "snapshot",
    "split",
    "stats",
    "tag",
    "trace",
    "wake",
]
__version__ = "0.1.0"


class OptionError(ValueError):
    """An FCDP_* environment variable is unknown or malformed; the message names the nearest valid one."""


class VersionError(LookupError):
    """A version that was given to ``changed()`` is no longer there, so what has changed since it is not known."""


def __getattr__(name: str) -> Any:
    if name == "Error":  # lives in the C core
        from fcdp._fcdp import Error

        return Error
    # What __all__ names and nothing here defines: fcdp_alloc, and of it torch.cuda.memory's functions of these names,
    # for tensors that are FCDP's. fcdp.tensors imports torch.
    if name in __all__:
        from fcdp import tensors

        return getattr(tensors, name)
    raise AttributeError(f"module 'fcdp' has no attribute {name!r}")


def enable() -> None:
    """Turn FCDP on in this process, as ``FCDP=1`` does. Call it before the first ``fully_shard`` or
    ``FullyShardedDataParallel``.

    Raises OptionError when an FCDP_* variable is malformed.
    """
    from fcdp import _enable

    _enable.install()


def stats() -> dict[str, Any]:
    """What FCDP did so far in this process.

    Bytes are of this rank unless said otherwise; ``inter_bytes_sent`` are those to ranks on other nodes.
    Keys:

    - ``enabled``, ``driver`` ("sim" or "cuda"), ``policy`` ("tau" or "next-use": what decides which groups
      stay on the device, of groups that have no plan), ``topology`` (nodes, ranks_per_node, node, local_rank) and
      ``transport`` ("nccl" or "gloo", what carries its collectives) of the first shard group served; None
      before the first gather;
    - ``plan``: of FCDP_PLAN, None without: its path, followed (it is some model's), and difference: why it is
      not another model's, or None;
    - ``collectives``: kind -> calls, inter_bytes_sent, intra_bytes_sent; kinds: gather, restore, agree
      (FCDP's own), plain_gather, reduce_scatter (FSDP's, counted from their sizes and a ring over the
      ranks; with FCDP_REDUCE=hierarchical what its two steps send);
    - ``moves``: h2d_bytes, d2h_bytes and counts of stores, slice_loads, whole_loads, evictions, maps,
      memory_waits, and with FCDP_POLICY=next-use plans, surprises (uses that a plan did not expect), and drops
      (reshards that kept no copy, as the next use gathers it anew);
    - ``gathers``: made, avoided, and of those made: forward, backward; late: unshards that began only when
      they were waited for, for want of device pages; plain: those that FSDP made itself, for groups that FCDP
      left to it;
    - ``wholes``: how often a parameter was asked for as a whole (full_tensor(), full state dicts) and came
      from the node's copy (cached), from a gather of FCDP's that the next forward uses too (gathered), or
      from torch's own gather (plain);
    - ``reductions``: with FCDP_REDUCE=hierarchical, how many reduce-scatters were hierarchical, how many were
      flat (FSDP's own), and the reasons of those; kept: how many went no further than the node, for the next
      micro-batch that is synchronised; rounding_error: with FCDP_REDUCE_DTYPE, what rounding took from what
      was sent (root of the ratio of their squares, of each 16th reduction), or None;
    - ``deltas``: gathers: those that crossed the nodes as differences (FCDP_CODEC), or rounded; whole:
      those that asked for that and crossed whole; by_device: those whose differences a kernel made, on this
      rank; rounding_error: with FCDP_CODEC=int8, what rounding took from this rank's shards (root of the ratio
      of their squares), or None;
    - ``groups``: one dict per parameter group: name, id (no other group of this process has it), bytes, of
      those trainable_bytes, gathers_made, gathers_avoided, state, in_file (FCDP_SPILL_DIR), on_disk (this
      rank's slice of its frozen parameters is in FCDP_CACHE_DIR), tier (the plan's "device", "host",
      "host-whole" or "file"; "policy" without one; "mapped": FCDP_HOST_MAP names it), ranks_per_node, and
      plain_bytes and gather_bytes as in ``saved``;
    - ``device_bytes``, ``host_bytes``: current and peak of gathered parameters; host bytes are the node's;
    - ``asleep``: are the gathered parameters' pages away (``sleep()`` without a tag)? ``asleep_bytes``: of tensors
      whose pages are;
    - ``cache``: of this rank's slices of frozen parameters, read_bytes and written_bytes (FCDP_CACHE_DIR), and
      failures, of slices that could not be written or read, or were dropped with a damaged one of their group;
    - ``spill``: of this rank's slices that live in FCDP_SPILL_DIR: their bytes; written_bytes and read_bytes;
      failures, of slices that could not be written, or not be read as they were written; how often the host
      waited for the disk, and wait_seconds;
    - ``host``: what this process has page-locked: pins and unpins (ranges, so far), pinned_bytes; its device's
      numa_node (-1: the machine has one, or does not say); copies that its node keeps (FCDP_HOST_COPIES); of
      its own slices, or of the one of several copies that it reads, near_bytes and far_bytes, which came from
      that NUMA node and from others; mapped_bytes, the pages of the groups that FCDP_HOST_MAP names; cpus, to
      which FCDP_PIN_CPU has bound its threads ("": it has not), and binding, a line that says why;
    - ``bypassed``: groups left to plain FSDP: group (its name), reason, and bytes and trainable_bytes where
      they are known; "every group" where the job has no FSDP modules;
    - ``saved``: inter-node bytes per node plain_bytes, which plain FSDP's flat gathers would have sent, and
      gather_bytes, which FCDP's gathers did send; ``beside_bytes``: what each rank received in the plain
      gathers, which are in neither;
    - ``waits``: where the host blocked: gathers (on CPUs alone) and their seconds; pages (for device memory
      that a stream still used) and their page_seconds; agreements;
    - ``python_calls``: calls of FCDP's collectives into Python, each of which takes the GIL: two for a
      collective over gloo, and for each exchange of a gather of differences over it; none over NCCL.
    """
    from fcdp import report

    return report.stats()


def reset_peaks() -> None:
    """Set the peaks in ``stats()`` to the current values."""
    from fcdp import report

    report.reset_peaks()


def sleep(tag: str | None = None) -> dict[str, int]:
    """Take this process's memory off its devices until ``wake()``: for a job that shares a GPU with another program, as
    an inference engine between two training steps.

    Every device page of gathered parameters goes, and, where FCDP serves tensors, every page of theirs: their bytes go
    to pinned host memory, those that it does not have yet. All come back to the same addresses, so a program's tensors
    are as they were. Call it on every rank, between steps, when no other thread uses the device. Until ``wake()``, unsharding
    a module and allocating a tensor raise an error; freeing one does not.

    tag: those tensors alone that were allocated under ``tag(name)``; gathered parameters stay.

    Returns bytes: live_bytes of the tensors, copied_bytes of these that were copied to the host, freed_bytes of their
    device pages. Raises ``fcdp.Error`` where a module is unsharded or a CUDA graph is captured: nothing is asleep then.
    """
    from fcdp import sleeping

    return sleeping.sleep(tag)


def wake(tag: str | None = None, keep: bool = True) -> dict[str, int]:
    """End a sleep: bring tensors back to their addresses, and let modules be unsharded. Without a tag, all of them.

    keep: the pinned host memory keeps their bytes, so that the next sleep copies what has changed since. False: it
    goes back to the system.

    Returns bytes: live_bytes of the tensors, copied_bytes to the device. Raises ``fcdp.Error`` where others have the
    device's memory now: all sleep on then, and it may be called again.
    """
    from fcdp import sleeping

    return sleeping.wake(tag, keep)


def tag(name: str) -> AbstractContextManager[None]:
    """What this thread allocates in the block can sleep by itself: ``with fcdp.tag("kv"): ...``. Its tensors have pages
    of their own, wherever they are freed. Only allocate there: what a library keeps for later uses sleeps, too."""
    from fcdp import sleeping

    return sleeping.tag(name)


def changed(since: torch.nn.Module | Version) -> Changes:
    """What this rank's parts of a model's parameters have changed since a version: for a program elsewhere that has the
    weights of that version, as an inference engine in reinforcement learning.

    since: a model of FSDP2's, for all of its weights; or the ``version`` of an earlier result. Call it after each
    optimizer step: the difference is made from the node's gathered copy, which is of the weights before the step.

    Returns an iterable of (name, blocks) for ``apply()``: the parameter's name and bytes, in the dtype in which the
    parameter is gathered; with ``nbytes`` in all, and ``version``: what the weights are now. All ranks' together are the
    model's: each part comes from one rank (with HSDP, from the first replica). Parameters that FCDP does not serve, or
    that live in a file alone (FCDP_SPILL_DIR), are whole; buffers are no part of it. No rank waits for another.

    Raises VersionError where the copy is of another version: the weights were gathered since. NotImplementedError for
    FSDP1, for tensor subclasses, and where a rank's part is no box of the parameter (two placements of one dimension).
    ValueError where the model is not the root of its FSDP modules. RuntimeError while a module is being unsharded, or
    tensors are asleep.
    """
    from fcdp import changes

    return changes.changed(since)


def apply(tensors: Mapping[str, torch.Tensor], changes: Iterable[tuple[str, bytes]]) -> None:
    """Bring tensors to the version whose changes these are: of all ranks, in any order of the ranks, but version by
    version. Needs no FSDP and no FCDP=1.

    tensors: by name, of the whole parameter's shape and of the blocks' dtype, on any device. Raises ``fcdp.Error``, with
    the name, where a tensor is not of the version before, or blocks are damaged: that part is as it was then. Parts that
    have come already stay as they are.
    """
    from fcdp import blocks

    blocks.apply(tensors, changes)


def split(module: torch.nn.Module, parts: int, min_bytes: int | None = None) -> list[torch.nn.Module]:
    """Split a linear layer by its rows, so that FSDP gathers, uses and drops it in parts: for a layer so large that it
    decides the peak of device memory. Needs no FCDP=1.

    module: a torch.nn.Linear; or, with min_bytes, a model, of which every linear layer is split whose weight has at
    least that many bytes. parts: how many, of like size. Call it before ``fully_shard``, and before the
    optimizer is made.

    Returns the parts, in order, for ``fully_shard``: ``for part in fcdp.split(model.head, parts=8): fully_shard(part)``.
    The layer stays the same module, with its hooks. Its parameters are ``parts.0.weight`` and so on, which begin as views
    of the layer's. Its state dict has ``weight`` and ``bias`` as before; with sharded parts, ``state_dict()`` and
    ``load_state_dict()`` are collectives, and what the former gives is a copy. docs/split.md says what is bitwise equal.

    Raises ValueError where it cannot split the module, or one of the layers that min_bytes chooses, as tied weights; no
    layer is split then.
    """
    from fcdp import splitting

    return splitting.split(module, parts, min_bytes)


def options() -> list[dict[str, str]]:
    """Every FCDP_* environment variable: name, values, default, help, and audience: "user", "expert" or
    "development"."""
    from fcdp._fcdp import options_table

    audiences = ("user", "expert", "development")  # in the order of fcdp_option_audience
    names = ("name", "values", "default", "help", "audience")
    return [dict(zip(names, (*row, audiences[audience]))) for *row, audience in options_table()]


def trace(path: str | os.PathLike[str]) -> AbstractContextManager[str]:
    """Record this process's events to a file: ``with fcdp.trace("rank%r.trace"): ...``.

    In the path %r is the rank (RANK) and %p the process's id; the block gets the whole path. The file is what
    ``fcdp-memtrace record`` writes, with what the ring holds from before. A thread without the GIL writes it.
    The block ends once what its streams were given is measured, about a tenth of a second later.

    Raises ``fcdp_memtrace.Error`` where this process writes no trace (FCDP_TRACE=0, or FCDP is off), or the file cannot
    be written.
    """
    from fcdp_memtrace import recording

    return recording.trace(path)
