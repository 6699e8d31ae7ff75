"""Counts the collectives that FSDP makes itself: from their sizes and a ring over the ranks; and reductions in the
place of its own."""

from __future__ import annotations

import torch.distributed as dist

from fcdp import _fcdp, shard_groups
from fcdp.c10d import Shards

# By kind: calls, bytes from this rank to other nodes, and within the node.
counts: dict[str, list[int]] = {kind: [0, 0, 0] for kind in ("plain_gather", "reduce_scatter")}
beside_bytes = 0  # that each rank received in gathers


def count(
    kind: str,
    group: dist.ProcessGroup,
    bytes_per_hop: int,
    around: Shards | None = None,
    start_ns: int = 0,
) -> None:
    """A collective of FSDP's: a ring over the group's ranks in which each sends `bytes_per_hop` to the next.
    `around`: a shard group that the ranks are a part of. `start_ns`: it has taken the program's time since then,
    and is done; 0: its end is not known."""
    global beside_bytes
    entry = counts[kind]
    entry[0] += 1
    if kind == "plain_gather":
        beside_bytes += bytes_per_hop
    shards = shard_groups.known(group)
    if isinstance(shards, Shards):
        crosses: bool | None = shards.local == shards.node_size - 1
    else:
        crosses = around.crosses(dist.get_process_group_ranks(group)) if around is not None else None
    if crosses is not None:
        entry[1 if crosses else 2] += bytes_per_hop
    inter_bytes = None if crosses is None else bytes_per_hop if crosses else 0
    _fcdp.trace_plain(kind == "plain_gather", bytes_per_hop, inter_bytes, group.size(), start_ns)


def count_reduction(inter_bytes: int, intra_bytes: int, n_ranks: int, start_ns: int = 0) -> None:
    """A reduce-scatter in two steps (reduce.py): what this rank sends to other nodes, and within its node."""
    entry = counts["reduce_scatter"]
    entry[0] += 1
    entry[1] += inter_bytes
    entry[2] += intra_bytes
    _fcdp.trace_plain(False, inter_bytes + intra_bytes, inter_bytes, n_ranks, start_ns)
