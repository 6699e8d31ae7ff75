"""What the tests of fcdp-memtrace share."""

import pathlib
import shutil
import tempfile

import pytest

import live
from traces import a_job, record


@pytest.fixture
def job(tmp_path):
    """A trace of two ranks."""
    path = tmp_path / "job.trace"
    record(path, a_job(0, 2), a_job(1, 2))
    return path


@pytest.fixture(scope="session")
def synthetic():
    """tools/memtrace/synthetic.c as a program that any user may run."""
    if not shutil.which("cc"):
        pytest.skip("no C compiler, which builds the job that is looked at")
    with tempfile.TemporaryDirectory(prefix="memtrace-") as folder:
        pathlib.Path(folder).chmod(0o755)
        live.build(pathlib.Path(folder) / "memtrace_synthetic")
        yield pathlib.Path(folder) / "memtrace_synthetic"


@pytest.fixture
def play(synthetic):
    """play(options...) starts a live job; all end with the test."""
    started = []

    def start(*options, **how):
        started.append(live.Job(synthetic, *options, **how))
        return started[-1]

    yield start
    for one in started:
        if one.process.poll() is None:
            one.end()
