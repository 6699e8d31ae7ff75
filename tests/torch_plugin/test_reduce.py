"""FCDP_REDUCE=hierarchical: bit for bit what FSDP trains where its reduce-scatter adds within the nodes first, HSDP among
them; what it sends; what is left to FSDP's own reduce-scatter."""

import os
import re

import pytest

import cases  # noqa: F401
import launch
import run
from configurations import REDUCED, is_whole
from conftest import needs_fcdp

pytestmark = needs_fcdp

ASKED = re.compile(os.environ.get("TEST_CASES", ""))
# What differs in how gradients are reduced.
SOME = (
    "full_clipped bf16_parameters accumulate_without_sync mixed_dtypes_in_one_group step_in_backward_torch "
    "blocks_skipped_in_some_steps tiny_parameters sharded_along_the_second_dimension hsdp_sharded_inside_the_nodes "
    "hsdp_sharded_across_the_nodes mesh_in_another_order fsdp1_clipped_orig fsdp1_bf16_reduction "
    "fsdp1_hybrid_over_nodes fsdp1_gradients_compressed"
).split()
NAMES = [name for name in (run.CASES if is_whole() else SOME) if ASKED.search(name)]
ON = REDUCED["hierarchical"]


@pytest.mark.parametrize("name", NAMES)
def test_bitwise_the_sums_of_two_steps(launches, name):
    expected = launches.get(NAMES, "two_steps")[0][name]
    if expected[0].get("unsupported"):
        pytest.skip(expected[0]["unsupported"])
    difference = launch.first_difference(expected, launches.get(NAMES, "hierarchical")[0][name])
    assert difference is None, difference


def job(folder, what, env=None):
    done = launch.forked(launch.HERE / "reduce_job.py", [folder, what], folder, env)
    assert not done.timed_out and done.returncode == 0, done.output
    return done


def test_bitwise_hsdp_of_two_nodes(tmp_path):
    """Every loss and every gradient, as a whole."""
    hsdp, ours = job(tmp_path / "hsdp", "train"), job(tmp_path / "ours", "train", ON)
    for expected, rank in zip(hsdp.ranks, ours.ranks):
        stats = rank.pop("stats")
        assert rank == expected
        assert stats["reductions"]["flat"] == 0 and stats["reductions"]["hierarchical"] > 0, stats["reductions"]


@pytest.mark.parametrize("size", ["1", "2"])
def test_the_nodes_sums_are_added_in_their_order(tmp_path, size):
    for rank in job(tmp_path, "sums", {**ON, "FCDP_LOCAL_SIZE": size}).ranks:
        assert all(right and as_before for _, right, as_before in rank["sums"]), rank["sums"]
        assert rank["stats"]["reductions"] == {"hierarchical": len(rank["sums"]), "flat": 0, "reasons": []}
