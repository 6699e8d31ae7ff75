"""The simulated device is built once for all of these tests, against the torch that is there."""

import pathlib
import shutil
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
HERE = pathlib.Path(__file__).resolve().parent
sys.path.append(str(ROOT / "tests" / "torch_plugin"))


@pytest.fixture(scope="session")
def built():
    """Jobs load what this has built. The tests' own process must not: it would have the device for good."""
    if not (shutil.which("g++") or shutil.which("clang++")):
        pytest.skip("needs g++ or clang++: the simulated device is compiled against this torch")
    command = [sys.executable, ROOT / "sim" / "torch" / "torch_sim" / "build.py"]
    build = subprocess.run(command, capture_output=True, text=True)
    assert build.returncode == 0, build.stderr[-8000:]


@pytest.fixture(scope="session")
def run_job(built, tmp_path_factory):
    """Runs a script of this folder in so many ranks, forked off a process that has imported torch; returns what they wrote."""
    import launch

    def run(script, *arguments, n_ranks=1, env=None, timeout_s=300):
        tmp = tmp_path_factory.mktemp(pathlib.Path(script).name)
        arguments = [tmp if argument == "OUT" else argument for argument in arguments]
        job = launch.Spawned(HERE / script, arguments, tmp, env, n_ranks=n_ranks, warm=True)
        assert job.wait(timeout_s), f"{script} hung\n{job.report()}"
        assert not any(rank.returncode for rank in job.ranks), job.report()
        return launch.ranks_in(tmp)

    return run
