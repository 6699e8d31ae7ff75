"""The simulated device is built once for all of these tests, against the torch that is there."""

import ctypes
import os
import pathlib
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
HERE = pathlib.Path(__file__).resolve().parent
DOUBLE = ROOT / "build" / "dev" / "sim" / "nccl" / "libfcdp_simnccl.so"
sys.path += [str(ROOT / "tests"), str(ROOT / "tests" / "torch_plugin")]


def with_fabric(env, tmp, n_ranks):
    """What lets the double of NCCL join the ranks of one job, if they ask for NCCL."""
    if (env or {}).get("FCDP_TRANSPORT") != "nccl":
        return env
    if not DOUBLE.exists():
        pytest.skip(f"{DOUBLE} is not built")
    fabric, of_node = tmp / "fabric", int(env["FCDP_LOCAL_SIZE"])
    assert ctypes.CDLL(str(DOUBLE)).simnccl_fabric_make(os.fsencode(fabric), n_ranks // of_node, of_node) == 0
    return env | {"SIMNCCL_FABRIC": str(fabric)}


@pytest.fixture(scope="session")
def built():
    """Jobs load what this has built. The tests' own process must not: it would have the device for good."""
    import launch

    launch.build_sim()


@pytest.fixture(scope="session")
def run_job(built, tmp_path_factory):
    """Runs a script of this folder in so many ranks, forked off a process that has imported torch; returns what they wrote."""
    import launch

    def run(script, *arguments, n_ranks=1, env=None, timeout_s=300):
        tmp = tmp_path_factory.mktemp(pathlib.Path(script).name)
        arguments = [tmp if argument == "OUT" else argument for argument in arguments]
        env_of_job = with_fabric(env, tmp, n_ranks)
        job = launch.Spawned(HERE / script, arguments, tmp, env_of_job, n_ranks=n_ranks, warm=True)
        assert job.wait(timeout_s), f"{script} hung\n{job.report()}"
        assert not any(rank.returncode for rank in job.ranks), job.report()
        assert not any("simnccl:" in rank.err for rank in job.ranks), job.report()  # a rule of NCCL's is broken
        return launch.ranks_in(tmp)

    return run
