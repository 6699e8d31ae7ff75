"""FCDP_TRANSPORT=nccl: the collectives go through NCCL's entry points, here a double's (sim/nccl), and
training is bit for bit the same."""

import ctypes
import importlib.util
import os
import pathlib
import re
import subprocess
import sys

import pytest

import cases  # noqa: F401
import launch
from configurations import CONFIGURATIONS, PLAIN, TRAINED
from conftest import needs_fcdp

BUILD = pathlib.Path(__file__).resolve().parents[2] / "build" / "dev"
DOUBLE = BUILD / "sim" / "nccl" / "libfcdp_simnccl.so"
WITNESS = BUILD / "tests" / "simnccl" / "libnccl_witness.so"
# Every shard group of theirs is the whole world: the double has no lanes of another.
NAMES = [name for name in TRAINED if re.match(r"full_|lora|unshard|accumul|mixed_|prefetch|frozen|tied_|ema_", name)]
POLICIES = ("tau", "next-use")

# A process group of one rank.
START_ALONE = "import torch.distributed as d; d.init_process_group('gloo', store=d.HashStore(), rank=0, world_size=1)"


@pytest.fixture
def double(tmp_path):
    """The environment in which the ranks of one job use the double, over a fabric of this test's."""
    if not DOUBLE.exists():
        pytest.skip(f"{DOUBLE} is not built")
    fabric = tmp_path / "fabric"
    assert ctypes.CDLL(str(DOUBLE)).simnccl_fabric_make(os.fsencode(fabric), 2, 2) == 0
    simgpu = pathlib.Path(importlib.util.find_spec("fcdp").origin).with_name("libfcdp_simgpu.so")
    return {
        "FCDP_TRANSPORT": "nccl",
        "FCDP_NCCL_LIBRARY": str(DOUBLE),
        "FCDP_SIM_LIBRARY": str(simgpu),
        "SIMNCCL_FABRIC": str(fabric),
    }


@needs_fcdp
@pytest.mark.parametrize("policy", POLICIES)
def test_training_is_bitwise_equal(tmp_path, double, launches, policy):
    assert len(NAMES) > 10
    plain, _ = launches.get(NAMES, PLAIN)
    got, jobs = launch.run_cases(NAMES, tmp_path, CONFIGURATIONS["tau0-slice"] | double | {"FCDP_POLICY": policy})
    differences = {name: d for name in NAMES if (d := launch.first_difference(plain[name], got[name])) is not None}
    assert not differences, differences
    assert {result["stats"][1]["transport"] for result in got[NAMES[-1]]} == {"nccl"}
    output = "".join(job.output for job in jobs)
    # the double names a rule of NCCL's that is broken
    assert "plain FSDP2 for" not in output and "simnccl:" not in output, output


@needs_fcdp
@pytest.mark.parametrize("codec", ["none", "delta"])
def test_survivors_name_the_rank_that_died(tmp_path, double, codec):
    """NCCL knows of no peers: the ranks ask each other, through the job's store. Differences cross beside it."""
    env = CONFIGURATIONS["tau0-slice"] | double | {"FCDP_TIMEOUT": "10", "FCDP_CODEC": codec}
    job = launch.Spawned(launch.HERE / "victim.py", ["forward", "--victim", 2], tmp_path, env, warm=True)
    job.wait_until_said("step 1", 300)
    assert job.wait(90), "a survivor hangs\n" + job.report()
    survivors = [rank for i, rank in enumerate(job.ranks) if i != 2]
    assert all(rank.returncode > 0 for rank in survivors), job.report()
    said = [line for rank in survivors for line in rank.err.splitlines() if "fcdp:" in line]
    assert any("waiting for 'blocks." in line and "NCCL" in line for line in said), job.report()
    said = [line for line in said if "did not come: " in line]  # one that fails late finds the first rank's store gone
    assert said, job.report()
    # others may wait elsewhere by then
    assert all(re.search(r"did not come: [^;]*\brank 2\b", line) for line in said), said


@needs_fcdp
def test_where_differences_have_no_way_parameters_cross_whole_over_nccl(tmp_path, double):
    env = CONFIGURATIONS["tau0-slice"] | double | {"FCDP_TIMEOUT": "10", "FCDP_CODEC": "delta"}
    job = launch.forked(launch.HERE / "unreached_job.py", [tmp_path], tmp_path, env)
    assert not job.timed_out and job.returncode == 0 and len(job.ranks) == launch.WORLD, job.output
    for rank in job.ranks:
        assert rank["transport"] == "nccl" and not rank["bypassed"] and rank["deltas"]["gathers"] == 0, rank
    said = re.findall("FCDP_CODEC=delta: parameters cross the nodes whole: (.*)", job.output)
    assert said and len(set(said)) == 1, job.output  # a rank of each node says so
    assert re.match(r"rank 0: no connection after 5 s to rank 2 \(is to call 127\.0\.0\.1:\d+\)", said[0]), said


@needs_fcdp
def test_a_library_that_is_not_there_stops_every_rank(tmp_path):
    env = CONFIGURATIONS["tau0-slice"] | {"FCDP_TRANSPORT": "nccl", "FCDP_NCCL_LIBRARY": "/nowhere/libnccl.so.2"}
    job = launch.forked(launch.HERE / "plain_script.py", [], tmp_path, env)
    assert job.returncode != 0 and "FCDP_TRANSPORT=nccl, but rank 0: " in job.output, job.output


@needs_fcdp
def test_without_an_order_on_the_device_every_rank_stops(tmp_path, double):
    env = CONFIGURATIONS["tau0-slice"] | double | {"NCCL_LAUNCH_ORDER_IMPLICIT": "0"}
    job = launch.forked(launch.HERE / "plain_script.py", [], tmp_path, env)
    assert job.returncode != 0 and "NCCL_LAUNCH_ORDER_IMPLICIT is 0" in job.output, job.output


@needs_fcdp
@pytest.mark.parametrize(
    "env, before, value",
    [
        ({"FCDP": "1"}, "", "1"),
        ({"FCDP": "1", "NCCL_LAUNCH_ORDER_IMPLICIT": "0"}, "", "0"),
        ({}, "", "None"),
        ({}, "import fcdp; fcdp.enable()", "1"),
        ({}, START_ALONE + "; import fcdp; fcdp.enable()", "None"),
    ],
    ids=["from the start", "the job's own", "without FCDP", "by hand", "by hand, too late"],
)
def test_nccl_is_told_of_the_order_before_it_reads_it(env, before, value):
    code = before + "\nimport os; print(os.environ.get('NCCL_LAUNCH_ORDER_IMPLICIT'))"
    clean = {name: v for name, v in os.environ.items() if not name.startswith(("FCDP", "NCCL"))}
    out = subprocess.run([sys.executable, "-c", code], env=clean | env, capture_output=True, text=True, check=True)
    assert out.stdout.strip() == value, out.stderr


@needs_fcdp
def test_no_python_is_in_the_path_to_nccl(tmp_path, double):
    """From an unshard to ncclAllGather no thread has the GIL, and none takes it. Counted per step; gloo, whose
    collectives are Python's, shows that it counts."""
    if not WITNESS.exists():
        pytest.skip(f"{WITNESS} is not built")
    common = CONFIGURATIONS["tau0-slice"] | {"FCDP_COALESCE": "0"}  # each group crosses in its own unshard
    over_nccl = launch.forked(
        launch.HERE / "gil_job.py",
        [tmp_path / "nccl", WITNESS],
        tmp_path / "nccl",
        common | double | {"FCDP_NCCL_LIBRARY": str(WITNESS)},
    )
    over_gloo = launch.forked(launch.HERE / "gil_job.py", [tmp_path / "gloo"], tmp_path / "gloo", common)
    for job in (over_nccl, over_gloo):
        assert not job.timed_out and job.returncode == 0 and len(job.ranks) == launch.WORLD, job.output
    for rank in over_gloo.ranks:
        assert rank["transport"] == "gloo" and rank["python_calls"] == 2 * rank["collectives"] > 0, rank
    for rank in over_nccl.ranks:
        assert rank["transport"] == "nccl" and rank["knows"] == [1, 0], rank
        assert rank["nccl_calls"] >= rank["collectives"] > 0, rank
        assert rank["nccl_calls_with_gil"] == 0 and rank["python_calls"] == 0, rank
