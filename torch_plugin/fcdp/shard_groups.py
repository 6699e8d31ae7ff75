"""The shard groups of this process, by their process groups: found, made, and ended."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from fcdp import OptionError, _fcdp, gil, nccl, words
from fcdp.c10d import Shards, TurnedOff, Unsupported
from fcdp.runtime import runtime
from fcdp.settings import options

# By id of the process group, which lives as long as the job wants it: then the entry goes.
_by_group: dict[int, tuple[weakref.ref[dist.ProcessGroup], Shards | Unsupported]] = {}
# Models on process groups of their own may meet them first on several threads. None waits for a peer of its group
# inside.
_lock = threading.Lock()
_past_agreements = [0, 0, 0]  # of shard groups that have ended


def known(group: dist.ProcessGroup) -> Shards | Unsupported | None:
    entry = _by_group.get(id(group))
    return entry[1] if entry is not None and entry[0]() is group else None


def connect(
    group: dist.ProcessGroup, device: torch.device, gather: Callable[[], None], beside: Shards | None
) -> Shards:
    """The lanes and the comm of a shard group; made once, by all its ranks together. Raises Unsupported each
    time where it cannot be served. `gather` is presence.py's. `beside`: one of the same model, run by the same
    thread; its streams serve this one too."""
    found = known(group)
    if found is None:
        with _lock:
            _close_ended()
        found = _connect(group, device, gather, beside)
        _by_group[id(group)] = weakref.ref(group), found
    if isinstance(found, Unsupported):
        raise Unsupported(*found.args)
    return found


def _close_ended() -> None:
    """Close what belongs to process groups that were destroyed, though a dead model may still hold the
    object."""
    alive = distributed_c10d._world.pg_map
    for key, (reference, shards) in list(_by_group.items()):
        if reference() is None or reference() not in alive:
            del _by_group[key]
            _close(shards)


def _close(shards: Shards | Unsupported) -> None:
    global _past_agreements
    if isinstance(shards, Shards):
        _past_agreements = [a + b for a, b in zip(_past_agreements, shards.agreed())]
        shards.close()


def agreed() -> list[int]:
    """Agreements of all shard groups so far, and their bytes: as Shards.agreed()."""
    return [sum(column) for column in zip(_past_agreements, *(shards.agreed() for shards in served()))]


def served() -> list[Shards]:
    return [shards for _, shards in _by_group.values() if isinstance(shards, Shards)]


def _connect(
    group: dist.ProcessGroup, device: torch.device, gather: Callable[[], None], beside: Shards | None
) -> Shards | Unsupported:
    try:
        shards = Shards(group, device, options, gather)
        problem: Exception | None = None  # without its traceback, which would hold this frame
        try:
            with _lock:
                runtime.need_engine(device)
                runtime.need_account(shards)
        except (_fcdp.Error, Unsupported) as error:
            problem = error.with_traceback(None)
        shards.raise_together(problem)
        _trace_job(shards)
        shards.comm = _comm(shards)
        try:
            shards.comm.set_streams(beside.comm if beside is not None else None)
        except _fcdp.Error as error:  # its order with what runs on other streams would not be the peers'
            problem = error.with_traceback(None)
        shards.raise_together(problem)
        shards.comm.set_number(shards.number())
        _share_host_memory(shards)
        return shards
    except Unsupported as error:
        if isinstance(error, TurnedOff) and error.first != 0:  # rank 0 may have nothing to say of it
            words.say(f"{error}; plain FSDP runs", error.first)
        # kept for the job's life: the one raised holds the frames, and so the model, that met it
        return Unsupported(*error.args)


def _trace_job(shards: Shards) -> None:
    """This process's place in the job, for who reads its trace."""
    rank, size = dist.get_rank(), dist.get_world_size()
    of_node = options["local_size"] or int(os.environ.get("LOCAL_WORLD_SIZE", shards.node_size))
    of_node = min(of_node, size)
    _fcdp.trace_job(rank, size, rank // of_node, -(-size // of_node), rank % of_node, of_node)


def _comm(shards: Shards) -> _fcdp.ShardGroup:
    """The core's shard group, over NCCL or over torch.distributed's gloo, the same on every rank."""
    asked = options["transport"]
    if asked == _fcdp.TRANSPORT_NCCL or (asked == _fcdp.TRANSPORT_AUTO and shards.device.type != "cpu"):
        comm, problem = nccl.connect(runtime.engine, shards)
        if not problem:
            shards.can_ask = True
            return comm
        if asked == _fcdp.TRANSPORT_NCCL:
            raise OptionError(f"fcdp: FCDP_TRANSPORT=nccl, but {problem}")
        words.say(
            f"its collectives go over gloo, through host memory, as NCCL cannot carry them ({problem}); FCDP_TRANSPORT=torch silences this"
        )
    if options["restore"] == _fcdp.RESTORE_SLICE and shards.device.type != "cpu":
        words.say(
            "FCDP_RESTORE=slice is for NCCL: over gloo the ranks of a node meet in host memory, as with FCDP_RESTORE=whole"
        )
    if shards.device.type != "cpu":
        gil.wait_without(shards.device)
    transport, comm, problem = shards.transport(), None, None
    try:
        comm = runtime.engine.create_shard_group(shards.node_of, shards.rank, transport)
    except _fcdp.Error as error:
        problem = error.with_traceback(None)
    shards.raise_together(problem)
    return comm


def _share_host_memory(shards: Shards) -> None:
    ticket, problem = b"", None
    if shards.local == 0:
        try:
            ticket = shards.comm.create_host_memory()
        except _fcdp.Error as error:
            problem = error.with_traceback(None)
    shards.raise_together(problem)
    ticket = shards.from_leader(ticket)
    if shards.local != 0:
        try:
            shards.comm.join_host_memory(ticket)
        except _fcdp.Error as error:
            problem = error.with_traceback(None)
    shards.raise_together(problem)
    shards.meets = True
