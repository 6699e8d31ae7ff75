"""NCCL for the core's collectives: the library is found, and the ids of its communicators are exchanged. Differences
(FCDP_CODEC) are in host memory, so they cross over a lane of gloo's beside NCCL."""

from __future__ import annotations

import importlib.util
import os

from fcdp import _fcdp, gil
from fcdp.c10d import Shards, Transport
from fcdp.settings import options

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


def _beside(shards: Shards) -> Transport | None:
    """A collective of the shard group: FCDP_CODEC is the same on all ranks."""
    if options["codec"] != _fcdp.CODEC_DELTA:
        return None
    gil.wait_without(shards.device)
    return shards.exchange()


def connect(engine: _fcdp.Engine, shards: Shards) -> tuple[_fcdp.ShardGroup | None, str]:
    """(comm, ""), or (None, why not) on every rank of the shard group; a collective of it. Whatever fails on one
    rank alone is said to all."""
    comm, beside, problem, mine = None, None, "", b""
    try:
        mine = _load().ids(shards.node_of, shards.rank)
    except Exception as error:
        problem = _words(error)
    problem = shards.first_problem(problem)
    if problem:
        return None, problem
    try:
        beside = _beside(shards)
    except Exception as error:
        problem = _words(error)
    problem = shards.first_problem(problem)
    if problem:
        return None, problem
    ids = shards.all_gather_bytes(mine)
    try:
        comm = engine.create_nccl_shard_group(shards.node_of, shards.rank, _library, ids, beside)
    except Exception as error:
        problem = _words(error)
    problem = shards.first_problem(problem)
    return (None, problem) if problem else (comm, "")
