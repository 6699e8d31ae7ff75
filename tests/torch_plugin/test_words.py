"""What FCDP says of a job that it serves not at all, in part, or that waits for a rank: once, from rank 0, and true."""

import json
import os
import re
import signal
import subprocess
import sys

import pytest
import torch

import launch
from conftest import needs_fcdp

pytestmark = needs_fcdp
TIMEOUT_S = 300
SCRIPT = launch.HERE / "words_job.py"
ON = {"FCDP": "1", "FCDP_LOCAL_SIZE": "1", "FCDP_TIMEOUT": "60"}
BLOCK_BYTES = (24 + 24 + 80 * 24 + 80 + 24 * 77 + 24 + 4) * 4  # padded to a multiple of 4 rows
NO_FSDP = {"ddp": "DDP", "no wrapper": "no wrapper", "evaluation": "no wrapper"}


def words(text):
    return [line for line in text.splitlines() if "fcdp:" in line.lower()]


def start(tmp_path, kind, n_ranks=2, **options):
    job = launch.Spawned(SCRIPT, [kind, tmp_path], tmp_path, {**ON, **options}, n_ranks=n_ranks, warm=True)
    assert job.wait(TIMEOUT_S), "hangs\n" + job.report()
    assert job.left_alive == []
    return job


def stats_of(tmp_path, rank=0):
    return json.loads((tmp_path / f"stats{rank}.json").read_text())


@pytest.mark.parametrize("kind", NO_FSDP)
def test_a_job_without_fsdp_is_told_so(tmp_path, kind):
    job = start(tmp_path, kind)
    assert [rank.returncode for rank in job.ranks] == [0, 0], job.report()
    why = f"this job has no FSDP modules (found: {NO_FSDP[kind]})"
    assert [words(rank.err + rank.out) for rank in job.ranks] == [
        [f"fcdp: FCDP=1, but {why}, so nothing was cached"],
        [],
    ], job.report()
    # nothing but its end shows that no model comes
    expected = [] if kind == "evaluation" else [{"group": "every group", "reason": why}]
    assert [stats_of(tmp_path, rank)["bypassed"] for rank in (0, 1)] == [expected] * 2


def test_it_is_told_once(tmp_path):
    """torchrun's agent, a data loader's process and a helper import torch under FCDP=1 too, and one of them
    steps an optimizer. (Its name is in TMPDIR, and the path of the loader's socket has 107 bytes at most.)"""
    job = launch.torchrun(SCRIPT, ["busy", tmp_path], tmp_path / "job", ON, n_ranks=2, stall_s=TIMEOUT_S)
    assert job.returncode == 0, job.output
    assert words(job.output) == [
        "fcdp: FCDP=1, but this job has no FSDP modules (found: DDP), so nothing was cached"
    ], job.output


def test_quiet_is_quiet(tmp_path):
    job = start(tmp_path, "ddp", n_ranks=1, FCDP_LOG="quiet")
    assert job.ranks[0].returncode == 0 and words(job.ranks[0].err) == [], job.report()


def test_one_rank_has_nothing_to_gather(tmp_path):
    job = start(tmp_path, "sharded", n_ranks=1)
    said = words(job.ranks[0].err)
    assert len(said) == 1 and said[0].startswith("fcdp: served 0 of 5 groups: its shard group has one rank"), (
        job.report()
    )
    assert len(stats_of(tmp_path)["bypassed"]) == 5


def test_a_mesh_that_shards_inside_a_node_is_told_which_would_be_served(tmp_path):
    """A pipeline of two stages, each on a node of its own. The mesh that the line names is served, as it stands there."""
    job = start(
        tmp_path,
        "mesh",
        n_ranks=4,
        FCDP_LOCAL_SIZE="2",
        TEST_MESH='init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))["dp"]',
    )
    assert all(rank.returncode == 0 for rank in job.ranks), job.report()
    said = words(job.ranks[0].err)
    assert len(said) == 1 and "served 0 of 5 groups: all 2 ranks of the shard group are on one node" in said[0], said
    named = re.search(
        r"FCDP serves a mesh whose sharded dimension comes first: (init_device_mesh\(.*\]); plain", said[0]
    )
    assert named, said
    job = start(tmp_path, "mesh", n_ranks=4, FCDP_LOCAL_SIZE="2", TEST_MESH=named[1])
    assert all(rank.returncode == 0 for rank in job.ranks), job.report()
    assert stats_of(tmp_path)["bypassed"] == [] and stats_of(tmp_path)["topology"]["nodes"] == 2, job.report()


def test_fsdp1_without_shards_is_told(tmp_path):
    job = start(tmp_path, "fsdp1 NO_SHARD")
    assert [rank.returncode for rank in job.ranks] == [0, 0], job.report()
    said = [words(rank.err + rank.out) for rank in job.ranks]
    why = "its strategy is NO_SHARD: there is nothing to gather"
    assert said == [[f"fcdp: served 0 of 1 groups: {why}; plain FSDP1 runs"], []], job.report()
    assert [(entry["group"], entry["reason"]) for entry in stats_of(tmp_path)["bypassed"]] == [("", why)]


def test_options_that_the_script_sets_before_its_first_forward_hold(tmp_path):
    """Those that were used by then are named, as is what it sets later."""
    job = start(tmp_path, "sets options", FCDP_LOCAL_SIZE="")
    assert [rank.returncode for rank in job.ranks] == [0, 0], job.report()
    said = [words(rank.err + rank.out) for rank in job.ranks]
    late = "and has no effect; set it before that{}, or in the job's environment"
    assert said[0][:3] == [
        f"fcdp: FCDP_ALLOC=native came after FSDP was imported, {late.format(' import')}",
        "fcdp: serving 5 of 5 groups; gathers sent 49 % less between nodes so far",
        f"fcdp: FCDP_TAU=0.5 came after the first forward, {late.format('')}",
    ], job.report()
    assert [line.split()[1] for line in said[0][3:]] == ["saved", "cost"] and said[1] == [], job.report()
    assert stats_of(tmp_path)["topology"]["ranks_per_node"] == 1


def test_a_wrong_option_that_the_script_sets_stops_it(tmp_path):
    job = start(tmp_path, "sets a wrong option")
    assert job.ranks[0].returncode > 0, job.report()
    assert "fcdp.OptionError: FCDP_LOCAL_SIZE=two: expected a whole number" in job.ranks[0].err, job.report()


def test_fsdp1_is_served(tmp_path):
    job = start(tmp_path, "fsdp1")
    assert [rank.returncode for rank in job.ranks] == [0, 0], job.report()
    said = [words(rank.err + rank.out) for rank in job.ranks]
    assert [len(lines) for lines in said] == [3, 0], job.report()
    assert said[0][0] == "fcdp: serving 1 of 1 groups; gathers sent 0 % less between nodes so far", said
    assert [line.split()[1] for line in said[0][1:]] == ["saved", "cost"], said


def test_a_job_that_is_killed_has_said_that_it_is_served(tmp_path):
    job = start(tmp_path, "killed")
    assert [rank.returncode for rank in job.ranks] == [-signal.SIGKILL] * 2, job.report()
    said = [words(rank.err + rank.out) for rank in job.ranks]
    assert said == [["fcdp: serving 5 of 5 groups; gathers sent 49 % less between nodes so far"], []], job.report()


@pytest.mark.parametrize("kind", ["steps in backward", "killed", "sharded"])
def test_a_summary_is_not_wanted(tmp_path, kind):
    job = start(tmp_path, kind, FCDP_SUMMARY="0")
    assert not any(words(rank.err + rank.out) for rank in job.ranks), job.report()


def test_a_step_inside_of_backward_is_no_whole_one(tmp_path):
    """Of the first, a part has been gathered and used alone."""
    said = words(start(tmp_path, "steps in backward").ranks[0].err)
    assert said[0] == "fcdp: serving 5 of 5 groups; gathers sent 49 % less between nodes so far" and len(said) == 3, (
        said
    )


@pytest.mark.parametrize("kind", ["full", "closed", "none"])
def test_a_stderr_that_takes_nothing_ends_no_job(tmp_path, kind):
    job = start(tmp_path, f"stderr {kind}")
    assert [rank.returncode for rank in job.ranks] == [0, 0], job.report()
    assert not any(words(rank.err + rank.out) for rank in job.ranks), job.report()
    bypassed = stats_of(tmp_path)["bypassed"]
    assert [entry["group"] for entry in bypassed] == ["blocks.1"]  # of which a line would have told


def test_a_first_gather_in_a_capture_is_plain_fsdp2s(tmp_path):
    job = start(tmp_path, "captured")
    assert [rank.returncode for rank in job.ranks] == [0, 0], job.report()
    why = "its first gather is part of a CUDA graph's capture"
    said = [words(rank.err) for rank in job.ranks]
    assert said[0][0] == f"fcdp: served 0 of 5 groups: {why}; plain FSDP2 runs" and said[1] == [], job.report()
    assert [entry["reason"] for entry in stats_of(tmp_path)["bypassed"]] == [why] * 5


def test_a_rank_without_a_network_interface_is_named(tmp_path):
    job = start(tmp_path, "no interface")
    assert [rank.returncode for rank in job.ranks] == [0, 0], job.report()
    why = "gloo finds no network interface on rank 1; set GLOO_SOCKET_IFNAME to the one that joins the nodes"
    said = [words(rank.err + rank.out) for rank in job.ranks]
    assert said == [[f"fcdp: served 0 of 5 groups: {why}; plain FSDP2 runs"], []], job.report()


def test_an_option_that_changes_nothing_is_said(tmp_path):
    said = words(start(tmp_path, "killed", FCDP_REDUCE="flat", FCDP_REDUCE_DTYPE="bf16").ranks[0].err)
    assert said[0] == "fcdp: FCDP_REDUCE_DTYPE has no effect without FCDP_REDUCE=hierarchical" and len(said) == 2, said


WITHOUT_A_CORE = """
import sys
sys.modules["fcdp._fcdp"] = None  # as where the wheel is another platform's
import torch.distributed.fsdp
import torch.distributed.fsdp.fully_sharded_data_parallel
print("went on")
"""


def test_a_wheel_whose_core_cannot_be_loaded_is_said_once():
    env = {name: value for name, value in os.environ.items() if not name.startswith("FCDP")} | {"FCDP": "1"}
    done = subprocess.run([sys.executable, "-c", WITHOUT_A_CORE], env=env, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "went on\n"), done.stderr
    said = words(done.stderr)
    assert len(said) == 1 and said[0].startswith("fcdp: plain FSDP runs: FCDP's core cannot be loaded ("), done.stderr
    assert said[0].endswith("); install the fcdp wheel again"), said


needs_reconfigure = pytest.mark.skipif(
    not hasattr(torch.distributed.ProcessGroup, "reconfigure"), reason="torch 2.15 changes a group's ranks in place"
)


@needs_reconfigure
def test_a_group_whose_ranks_may_change_is_left_to_plain_fsdp2(tmp_path):
    job = start(tmp_path, "reconfigurable")
    assert [rank.returncode for rank in job.ranks] == [0, 0], job.report()
    why = "its process group was made with enable_reconfigure, so its ranks may change"
    said = [words(rank.err) for rank in job.ranks]
    assert said[0][0] == f"fcdp: served 0 of 5 groups: {why}; plain FSDP2 runs" and said[1] == [], job.report()


@needs_reconfigure
def test_the_ranks_of_a_served_group_cannot_change(tmp_path):
    job = start(tmp_path, "reconfigured")
    assert all(rank.returncode != 0 for rank in job.ranks), job.report()
    assert all("so its ranks cannot change; make it with enable_reconfigure=True" in rank.err for rank in job.ranks)
    assert all("step 0" in rank.out and "step 1" not in rank.out for rank in job.ranks), job.report()


def test_what_plain_fsdp2_gathered_beside_is_counted(tmp_path):
    job = start(tmp_path, "partly", n_ranks=4, FCDP_LOCAL_SIZE="2")
    assert all(rank.returncode == 0 for rank in job.ranks), job.report()
    said = words(job.ranks[0].err)
    assert len(said) == 4 and not any(words(rank.err) for rank in job.ranks[1:]), job.report()
    served = (
        r"fcdp: serving 4 of 5 groups, [\d.]+ KB of parameters; plain FSDP gathers the other [\d.]+ KB at each use; "
    )
    assert re.match(served, said[1]), said
    assert said[0] == (
        "fcdp: served 4 of 5 groups: it has a custom all-gather (OwnGather); plain FSDP2 runs for blocks.1"
    )
    stats = stats_of(tmp_path)
    assert stats["gathers"]["plain"] == 4
    assert stats["saved"]["beside_bytes"] == 2 * (3 / 4 + 3 / 4) * BLOCK_BYTES
    counted = re.search(r"; beside that, plain FSDP gathered ([\d.]+) KB in 4 gathers$", said[2])
    assert counted and float(counted[1]) == pytest.approx(stats["saved"]["beside_bytes"] / 1000, rel=0.01), said[2]


def test_what_fsdp2_gathers_among_fewer_ranks_is_counted(tmp_path):
    """In backward, over two of four ranks: half of the block."""
    job = start(tmp_path, "small mesh", n_ranks=4, FCDP_LOCAL_SIZE="2")
    assert all(rank.returncode == 0 for rank in job.ranks), job.report()
    said, stats = words(job.ranks[0].err), stats_of(tmp_path)
    assert len(said) == 3 and said[1].endswith("in 2 gathers") and stats["bypassed"] == [], said
    assert stats["gathers"]["plain"] == 2
    assert stats["saved"]["beside_bytes"] == 2 * 1 / 2 * BLOCK_BYTES
    assert stats["collectives"]["plain_gather"] == {
        "calls": 2,
        "inter_bytes_sent": 0,
        "intra_bytes_sent": 2 * BLOCK_BYTES // 2,
    }


CHANGES = {
    "freed": "blocks.1.norm.weight cannot be gathered: the storage of its shard is freed",
    "late": "blocks.1, which FCDP serves, has changed: it has a custom all-gather (OwnGather)",
    "changing": "blocks.0, which FCDP serves, has changed: its fsdp_pre_all_gather extensions gather tensors of other",
}


@pytest.mark.parametrize("kind", CHANGES)
def test_a_gather_that_changes_too_late_is_an_error(tmp_path, kind):
    """What it would bring is not what FCDP has cached; or one rank has nothing to bring."""
    job = start(tmp_path, kind)
    for rank in job.ranks:
        assert rank.returncode > 0, job.report()
        assert any(f"RuntimeError: fcdp: {CHANGES[kind]}" in line for line in words(rank.err)), rank.err


def test_a_timeout_names_the_rank_that_did_not_come(tmp_path):
    job = start(tmp_path, "absent", n_ranks=4, FCDP_LOCAL_SIZE="2", FCDP_TIMEOUT="5")
    for rank in (0, 1, 3):
        assert job.ranks[rank].returncode > 0, job.report()
        said = [line for line in words(job.ranks[rank].err) if "RuntimeError: fcdp: agreement" in line]
        assert said and all("; did not come: rank 2: " in line for line in said), job.ranks[rank].err
