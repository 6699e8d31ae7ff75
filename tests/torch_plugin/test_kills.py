"""A rank dies by SIGKILL: the others end, say what did not come, and leave nothing on the machine."""

import signal

import pytest

import launch
from configurations import CONFIGURATIONS, PLAIN, REDUCED
from conftest import needs_fcdp
from leftovers import Leftovers

START_TIMEOUT_S, TIMEOUT_S = 300, 90
PLACES = ["forward", "backward", "gather", "optimizer"]
GROUPS = ("blocks.", "root")


def kill(tmp_path, where, configuration, victim=2, flight_timeout_s=10):
    """Plain FSDP2 ends cleanly at such a death, on gloo; with FCDP it must too."""
    before = Leftovers(tmp_path)
    env = dict({**CONFIGURATIONS, **REDUCED}.get(configuration, {}))
    if env:
        env["FCDP_TIMEOUT"] = "10"
        if where == "gather":
            # else all of these small groups have crossed before the victim can be met in a gather
            env["FCDP_COALESCE"] = "0"
    job = launch.Spawned(
        launch.HERE / "victim.py",
        [where, "--victim", victim, "--flight-timeout", flight_timeout_s],
        tmp_path,
        env,
        warm=True,
    )
    job.wait_until_said("step 1", START_TIMEOUT_S)
    in_time = job.wait(TIMEOUT_S)
    assert in_time, "a survivor hangs\n" + job.report()
    assert job.ranks[victim].returncode == -signal.SIGKILL, job.report()
    assert "dies now" in job.ranks[victim].out
    for i, rank in enumerate(job.ranks):
        assert "step 1" in rank.out and "step 4" not in rank.out, job.report()
        if i != victim:
            assert rank.returncode > 0, (
                f"rank {i} must end with an error of its own, not {rank.returncode}\n{rank.err[-3000:]}\n"
                + job.report()
            )
            assert "Error" in rank.err, job.report()
    assert job.left_alive == []
    assert before.found() == []
    return job


@pytest.mark.parametrize("where", PLACES)
def test_plain_fsdp2_ends(tmp_path, where):
    kill(tmp_path, where, PLAIN)


def survivors(job, victim=2):
    return [rank.err for i, rank in enumerate(job.ranks) if i != victim]


@needs_fcdp
@pytest.mark.parametrize("configuration", ["tau0-slice", "tau0-whole", "tau1-slice"])
@pytest.mark.parametrize("where", PLACES)
def test_survivors_name_what_did_not_come(tmp_path, configuration, where):
    job = kill(tmp_path, where, configuration)
    said = [err for err in survivors(job) if any("fcdp" in line for line in err.splitlines())]
    if where == "backward":  # nothing of FCDP's may be under way there: then FSDP2's own reduction says it
        assert all("fcdp" in err or "reduce_scatter" in err for err in survivors(job)), job.report()
        return
    assert said, "no survivor names what FCDP waited for\n" + job.report()
    if where in ("forward", "gather"):
        assert any(group in line for err in said for line in err.splitlines() if "fcdp" in line for group in GROUPS), (
            job.report()
        )


@needs_fcdp
@pytest.mark.parametrize("where", ["forward", "gather"])
def test_the_first_rank_dies(tmp_path, where):
    """It holds the store and is the leader of its node's host memory. A rank that asks the store then waits seconds, however
    long the job's own timeout is."""
    job = kill(tmp_path, where, "tau0-slice", victim=0, flight_timeout_s=10 * TIMEOUT_S)
    assert any("the job's store does not answer" in err for err in survivors(job, victim=0)), job.report()


@needs_fcdp
def test_one_that_is_not_its_nodes_first_dies(tmp_path):
    """Its node's first rank misses it, in a gather or in the node's memory, and so do those of the other node, which
    wait for that one. Each names it, alone or with the one that did not come because of it."""
    job = kill(tmp_path, "forward", "tau0-slice", victim=3)
    for err in survivors(job, victim=3):
        assert any("fcdp" in line and "did not come" in line and "rank 3" in line for line in err.splitlines()), (
            job.report()
        )


@needs_fcdp
def test_one_dies_before_a_reduction_in_two_steps(tmp_path):
    """Its peers, in its node and in its place on the other node, miss it in a step of theirs; the rank that is neither
    misses one of them."""
    job = kill(tmp_path, "backward", "hierarchical", victim=3)
    said = [[line for line in err.splitlines() if "did not come" in line] for err in survivors(job, victim=3)]
    assert all(said) and any("rank 3" in line for lines in said for line in lines), job.report()
    assert any("fcdp: the gradients of blocks." in err for err in survivors(job, victim=3)), job.report()
