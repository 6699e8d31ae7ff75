"""NCCL for the core's collectives: the library is found, and the ids of its communicators are exchanged. Differences
(FCDP_CODEC) are in host memory, so they cross by TCP connections of the core's beside NCCL (comm/exchange.h)."""

from __future__ import annotations

import importlib.util
import os

from fcdp import _fcdp
from fcdp.c10d import Shards
from fcdp.settings import options

# For the connections, which a firewall that drops packets would let each rank wait for. All ranks make them at once.
_MOST_S = 30.0

_library: _fcdp.Nccl | None = None


def beside_torch() -> str | None:
    """The library that torch brought along; None: it is the system's."""
    try:
        spec = importlib.util.find_spec("nvidia.nccl") if importlib.util.find_spec("nvidia") else None
    except (ImportError, ValueError, AttributeError):  # some other package of that name
        return None
    for folder in spec.submodule_search_locations or [] if spec else []:
        path = os.path.join(folder, "lib", "libnccl.so.2")
        if os.path.exists(path):
            return path
    return None


def _load() -> _fcdp.Nccl:
    global _library
    if _library is None:
        _library = _fcdp.load_nccl(os.environ.get("FCDP_NCCL_LIBRARY") or None, beside_torch())
    return _library


def _words(error: Exception) -> str:
    return error.args[0] if isinstance(error, _fcdp.Error) else f"{type(error).__name__}: {error}"


def _beside(shards: Shards) -> _fcdp.Exchange | str | None:
    """What exchanges differences between the nodes, or why nothing can, on every rank; None: nothing need. A collective
    of the shard group: FCDP_CODEC is the same on all ranks."""
    if options["codec"] != _fcdp.CODEC_DELTA:
        return None
    exchange, problem = None, ""
    try:
        said = (os.environ.get(name) for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "MASTER_ADDR"))
        exchange = _fcdp.listen(*said)
    except Exception as error:
        problem = _words(error)
    if problem := shards.first_problem(problem):
        return problem
    cards = shards.control.all_gather_bytes(exchange.card())
    members = shards.members_between_nodes()
    ranks = b"".join(shards.ranks[member].to_bytes(4, "little") for member in members)
    try:
        place, limit_s = members.index(shards.rank), min(shards.timeout_s / 2, _MOST_S)
        exchange.connect(b"".join(cards[member] for member in members), ranks, place, limit_s)
    except Exception as error:
        problem = _words(error)
    return shards.first_problem(problem) or exchange


def connect(engine: _fcdp.Engine, shards: Shards) -> tuple[_fcdp.ShardGroup | None, str]:
    """(comm, ""), or (None, why not) on every rank of the shard group; a collective of it. Whatever fails on one
    rank alone is said to all."""
    comm, problem, mine = None, "", b""
    try:
        mine = _load().ids(shards.node_of, shards.rank)
    except Exception as error:
        problem = _words(error)
    problem = shards.first_problem(problem)
    if problem:
        return None, problem
    beside = _beside(shards)
    ids = shards.all_gather_bytes(mine)
    try:
        comm = engine.create_nccl_shard_group(shards.node_of, shards.rank, _library, ids, beside)
    except Exception as error:
        problem = _words(error)
    problem = shards.first_problem(problem)
    return (None, problem) if problem else (comm, "")
