"""FCDP_REDUCE=hierarchical: bit for bit what FSDP trains where its reduce-scatter adds within the nodes first, HSDP among
them; what it sends; what is left to FSDP's own reduce-scatter."""

import os
import re

import pytest

import cases  # noqa: F401
import launch
import run
from configurations import REDUCED, TRAINED_ON_SIM, is_whole
from conftest import needs_fcdp
from test_on_sim import OWN_NUMBERS, numbers

pytestmark = needs_fcdp

ASKED = re.compile(os.environ.get("TEST_CASES", ""))
# What differs in how gradients are reduced.
SOME = (
    "full_clipped accumulate_without_sync step_in_backward_torch blocks_skipped_in_some_steps tiny_parameters "
    "sharded_along_the_second_dimension hsdp_sharded_inside_the_nodes "
    "hsdp_sharded_across_the_nodes mesh_in_another_order fsdp1_clipped_orig fsdp1_bf16_reduction "
    "fsdp1_no_sync_orig fsdp1_hybrid_over_nodes fsdp1_gradients_compressed reductions_in_a_process_group_of_their_own"
).split()
NAMES = [name for name in (run.CASES if is_whole() else SOME) if ASKED.search(name)]
# Micro-batches without synchronisation, whose gradients are added behind the first step: as HSDP's, and not as those that
# FSDP2 keeps unsharded.
KEPT = re.compile(
    "^accumulate_(without_sync|last_backward)|^backwards_finalized_by_hand_together|^fsdp1_no_sync(_orig)?$"
)
ON = REDUCED["hierarchical"]


@pytest.mark.parametrize("name", [name for name in NAMES if not KEPT.search(name)])
def test_bitwise_the_sums_of_two_steps(launches, name):
    expected = launches.get(NAMES, "two_steps")[0][name]
    if expected[0].get("unsupported"):
        pytest.skip(expected[0]["unsupported"])
    difference = launch.first_difference(expected, launches.get(NAMES, "hierarchical")[0][name])
    assert difference is None, difference


THERE = "accumulate_without_sync step_in_backward_torch fsdp1_bf16_reduction fsdp1_no_sync_orig".split()
ON_SIM = [name for name in NAMES if name in (TRAINED_ON_SIM if is_whole() else THERE) and not OWN_NUMBERS.search(name)]


@pytest.mark.usefixtures("sim_built")
@pytest.mark.parametrize("name", ON_SIM)
def test_bitwise_behind_the_host(launches, name):
    """On the simulated device, where every access is checked for its order, as on the CPU."""
    expected = launches.get(NAMES, "hierarchical")[0][name]
    if expected[0].get("unsupported"):
        pytest.skip(expected[0]["unsupported"])
    got = launches.get(ON_SIM, "sim-hierarchical")[0][name]
    difference = launch.first_difference(expected, numbers(got))
    assert difference is None, difference


def test_what_is_left_to_fsdp_is_said_once(launches):
    if NAMES != SOME:
        pytest.skip("it looks at a job of certain cases")
    said = [
        line
        for job in launches.get(NAMES, "hierarchical")[1]
        for line in job.output.splitlines()
        if line.startswith("fcdp: FCDP_REDUCE=hierarchical: ")
    ]
    reasons = [line.removeprefix("fcdp: FCDP_REDUCE=hierarchical: ").split("; FSDP's own")[0] for line in said]
    assert len(set(reasons)) == len(reasons) and all(line.endswith("FSDP's own reduce-scatter runs") for line in said)
    assert "it has a communication hook" in reasons
    assert any("on one node" in reason for reason in reasons), reasons


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
        made = stats["reductions"]
        assert made["flat"] == 0 and made["hierarchical"] > 0 and made["kept"] > 0, made


LOST = {"same": (0, 0), "bf16": (1e-5, 4e-3), "int8": (1e-5, 1e-2)}  # by rounding, at least and at most


@pytest.mark.parametrize("size, wire", [(1, "same"), (2, "same"), (2, "bf16"), (1, "int8"), (2, "int8")])
def test_the_nodes_sums_are_added_in_their_order(tmp_path, size, wire):
    done = job(tmp_path, "sums", {**ON, "FCDP_LOCAL_SIZE": str(size), "FCDP_REDUCE_DTYPE": wire})
    assert ("gradients were rounded between nodes" in done.output) == (wire != "same"), done.output
    for rank in done.ranks:
        assert all(right and as_before for _, right, as_before in rank["sums"]), rank["sums"]
        least, most = LOST[wire]
        assert least <= (rank["stats"]["reductions"].pop("rounding_error") or 0) <= most
        assert rank["stats"]["reductions"] == {
            "hierarchical": len(rank["sums"]),
            "flat": 0,
            "kept": 0,
            "reasons": [],
        }
        # without synchronisation a rank keeps its share of the node's sums, and padding; FSDP2 keeps all
        gradients, parameters, n_alive, n_groups = rank["kept"]
        assert parameters / size <= gradients <= 1.1 * parameters / size
        # and of the sums before the last ones nothing, which else would be a share of the gradients per micro-batch
        assert n_alive == 0 and (n_groups > 0) == (size > 1)


@pytest.mark.parametrize("what", ["different", "factors"])
def test_accumulation_is_plain_fsdp2s(tmp_path, what):
    """Where the ranks of a node use different parameters in a micro-batch that is not synchronised; and where the divide
    factor changes behind it."""
    for rank in job(tmp_path, what, {**ON, "FCDP_LOCAL_SIZE": "2"}).ranks:
        assert not rank["wrong"], rank["wrong"]
        made = rank["stats"]["reductions"]
        assert made["flat"] == 0 and made["kept"] > 0 and not made["reasons"], made


def test_what_fsdp1_keeps_in_no_sync(tmp_path):
    """With both kinds of its parameters."""
    for rank in job(tmp_path, "no_sync", {**ON, "FCDP_LOCAL_SIZE": "2"}).ranks:
        for result in rank["no_sync"]:
            assert not result["wrong"], result["wrong"]
            kept, gradients = result["elements"]
            assert gradients / 2 <= kept <= 1.01 * gradients / 2
        made = rank["stats"]["reductions"]
        assert made["flat"] == 0 and made["kept"] > 0 and not made["reasons"], made


def test_gradients_that_are_kept_for_another_reduction_are_an_error(tmp_path):
    for rank in job(tmp_path, "another", {**ON, "FCDP_LOCAL_SIZE": "2"}).ranks:
        fsdp1, fsdp2 = rank["said"]["fsdp1"], rank["said"]["fsdp2"]
        assert "the gradient of parts.1 was used before it was reduced" in fsdp1, fsdp1
        assert fsdp1.endswith("or set FCDP_REDUCE=flat (it is to be reduced by FSDP1 now)"), fsdp1
        assert fsdp2.startswith("fcdp: of parts.0.weight, parts.1.weight"), fsdp2
        assert "has kept gradients of earlier micro-batches, and FSDP2's own reduce-scatter is to run now" in fsdp2
        assert fsdp2.endswith("or set FCDP_REDUCE=flat"), fsdp2


def test_ranks_that_keep_sums_of_different_modules_are_told(tmp_path):
    """Which plain FSDP1 lets them in no_sync(), where it reduces nothing."""
    for rank in job(tmp_path, "unlike", {**ON, "FCDP_LOCAL_SIZE": "2"}).ranks:
        assert "have reduced gradients of different modules" in rank["said"], rank["said"]
