"""The simulated device is built once for all of these tests, against the torch that is there."""

import pathlib
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
HERE = pathlib.Path(__file__).resolve().parent
sys.path.append(str(ROOT / "tests" / "torch_plugin"))


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
        tmp = tmp_path_factory.mktemp(script)
        arguments = [tmp if argument == "OUT" else argument for argument in arguments]
        job = launch.Spawned(HERE / script, arguments, tmp, env, n_ranks=n_ranks, warm=True)
        assert job.wait(timeout_s), f"{script} hung\n{job.report()}"
        assert not any(rank.returncode for rank in job.ranks), job.report()
        return launch.ranks_in(tmp)

    return run
