"""How a flat parameter of FSDP1's is cut into extents. Pure.

FSDP1 lays a module's parameters side by side and gives rank r the elements [r * S, (r + 1) * S). Where frozen
and trainable parameters are mixed, a shard is a few runs of each kind, other runs on every rank. Each kind is
an extent: a rank packs its runs of that kind, padded to the most that any rank has, so that what is stale is
gathered alone.

    bytes gathered of a kind = n_ranks * max over the ranks of its elements in their shard
    the runs of all ranks, in order, are the padded flat parameter
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

# A cut must save at least half of what a step gathers without it: the two kinds together may be more than the
# flat parameter where the ranks' shares differ.
_MOST_TRAINABLE = 0.5


@dataclass
class Cut:
    """One extent of a flat parameter."""

    trainable: bool
    length: int = 0  # elements of a shard, the same on every rank
    runs: list[list[tuple[int, int]]] = field(default_factory=list)  # by rank: [begin, end) in its shard


def runs_of(parts: Iterable[tuple[int, bool | None]], shard: int, n_ranks: int) -> list[list[tuple[int, int, bool]]]:
    """By rank: (begin, end, trainable) of its shard. `parts`: (elements, trainable) in the flat parameter's
    order; None: padding, which goes with what is before it. What is left of n_ranks * shard is padding too."""
    flat: list[list[int | bool]] = []
    for length, trainable in parts:
        if flat and (trainable is None or trainable == flat[-1][1]):
            flat[-1][0] += length
        else:
            flat.append([length, bool(trainable)])
    flat[-1][0] += n_ranks * shard - sum(length for length, _ in flat)
    ranks: list[list[tuple[int, int, bool]]] = [[] for _ in range(n_ranks)]
    at = 0
    for length, trainable in flat:
        end = at + length
        while at < end:
            rank, begin = divmod(at, shard)
            stop = min(shard, begin + end - at)
            ranks[rank].append((begin, stop, bool(trainable)))
            at += stop - begin
    return ranks


def cut(parts: Iterable[tuple[int, bool | None]], shard: int, n_ranks: int) -> list[Cut]:
    """The extents: one, or where it pays the frozen one and the trainable one."""
    ranks = runs_of(parts, shard, n_ranks)
    kinds = {trainable for runs in ranks for _, _, trainable in runs}
    cuts = [Cut(trainable) for trainable in sorted(kinds)]
    for one in cuts:
        one.runs = [[(begin, end) for begin, end, kind in runs if kind == one.trainable] for runs in ranks]
        one.length = max(sum(end - begin for begin, end in runs) for runs in one.runs)
    if len(cuts) == 1 or cuts[1].length > _MOST_TRAINABLE * shard:
        return [Cut(True in kinds, shard, [[(0, shard)]] * n_ranks)]
    return cuts


def pieces(cuts: list[Cut], rank: int) -> list[tuple[int, int, int]]:
    """Where a rank's shard comes from, in its order: (extent, offset in the rank's shard of that extent,
    elements)."""
    found = []
    for k, one in enumerate(cuts):
        offset = 0
        for begin, end in one.runs[rank]:
            found.append((begin, k, offset, end - begin))
            offset += end - begin
    return [(k, offset, length) for _, k, offset, length in sorted(found)]
