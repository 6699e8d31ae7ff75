"""FCDP_ALLOC=native: PyTorch's allocator and FCDP's pages side by side; before either says that memory is out,
it gets what the other does not use."""

import pathlib
import subprocess
import sys

import pytest

import cpp
import launch
from configurations import CONFIGURATIONS
from conftest import needs_fcdp
from test_nccl import double  # noqa: F401
from test_tensors import sim_library

HERE = pathlib.Path(__file__).resolve().parent


@needs_fcdp
def test_each_gets_what_the_other_does_not_use(tmp_path, double):  # noqa: F811
    """Over NCCL's double: with collectives by Python's callables no thread may wait for the device there."""
    env = CONFIGURATIONS["tau0-slice"] | {"FCDP_SIM_CAPACITY": "32M", "FCDP_ALLOC": "native"} | double
    job = launch.forked(HERE / "neighbour_job.py", [tmp_path], tmp_path, env)
    assert job.returncode == 0, job.output
    assert len(job.ranks) == launch.WORLD
    for rank in job.ranks:
        assert rank["alone"] > 0 and rank["given"] > 0, rank
        assert rank["more"] * (2 << 20) == rank["given"], rank  # all of it reached the driver
        assert rank["emptied"] == 1 and rank["again"] == 0, rank
    assert len({tuple(rank["losses"]) for rank in job.ranks}) == 1 and len(set(job.ranks[0]["losses"])) == 4


@pytest.fixture(scope="module")
def libraries(tmp_path_factory):
    tmp = tmp_path_factory.mktemp("native")
    cpp.shared_library(tmp / "native.so", HERE / "native.cpp", ["c10", "c10_cuda"])
    cpp.shared_library(tmp / "standin.so", HERE / "standin_runtime.cpp")
    return tmp


@needs_fcdp
def test_pytorchs_own_allocator_asks(tmp_path, libraries):
    env = launch.environment(
        launch.new_tag(),
        tmp_path,
        {
            "FCDP_SIM_CAPACITY": "64M",
            "FCDP_CHECK": "1",
            "FCDP_LOG": "info",
            "STANDIN_DRIVER": str(sim_library()),
            "LD_PRELOAD": str(libraries / "standin.so"),
        },
    )
    job = subprocess.run(
        [sys.executable, HERE / "native_job.py", libraries / "native.so", sim_library(), libraries / "standin.so"],
        env=env,
        cwd=HERE,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=300,
    )
    assert job.returncode == 0 and "all is well" in job.stdout, job.stdout
    given = "info: gave 41.9 MB of device memory back to the driver, as PyTorch's allocator lacked 41.9 MB"
    assert given in job.stdout, job.stdout
