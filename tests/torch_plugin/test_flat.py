"""How a flat parameter is cut into extents (fcdp/flat.py), against the elements themselves."""

import random

import pytest

from conftest import needs_fcdp

pytestmark = needs_fcdp


def kinds_of(parts, total):
    """Of each element; padding is of the kind before it."""
    kinds, last = [], False
    for length, trainable in parts:
        last = last if trainable is None else trainable
        kinds += [last] * length
    return kinds + [kinds[-1]] * (total - len(kinds))


@pytest.mark.parametrize("seed", range(200))
def test_what_is_packed_and_unpacked_is_the_flat_parameter(seed):
    from fcdp import flat

    rng = random.Random(seed)
    n_ranks = rng.randint(2, 6)
    parts = [(rng.randint(1, 30), rng.choice([True, False, False, None])) for _ in range(rng.randint(1, 12))]
    parts[0] = (parts[0][0], rng.choice([True, False]))
    shard = -(-sum(length for length, _ in parts) // n_ranks)
    total = n_ranks * shard
    kinds = kinds_of(parts, total)
    cuts = flat.cut(parts, shard, n_ranks)
    assert len(cuts) <= 2 and [cut.trainable for cut in cuts] in ([False], [True], [False, True]), seed
    extents = []
    for cut in cuts:
        packed = []
        for rank in range(n_ranks):
            mine = [rank * shard + i for begin, end in cut.runs[rank] for i in range(begin, end)]
            assert len(mine) <= cut.length, seed
            packed.append(mine + [None] * (cut.length - len(mine)))
        assert any(None not in mine for mine in packed), seed  # padded to the largest, no more
        extents.append(packed)
    found = []
    for rank in range(n_ranks):
        for k, offset, length in flat.pieces(cuts, rank):
            found += extents[k][rank][offset : offset + length]
    assert found == list(range(total)), seed
    if len(cuts) == 2:
        for cut, packed in zip(cuts, extents):
            assert all(kinds[i] == cut.trainable for mine in packed for i in mine if i is not None), seed
        assert 2 * cuts[1].length <= shard, seed
    elif True in kinds and False in kinds:
        most = max(sum(kinds[rank * shard : (rank + 1) * shard]) for rank in range(n_ranks))
        assert 2 * most > shard, seed
