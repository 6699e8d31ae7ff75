"""Which thread may free what, and where."""

import pathlib
import subprocess
import sys

import launch
from conftest import needs_fcdp
from test_tensors import sim_library

HERE = pathlib.Path(__file__).resolve().parent


@needs_fcdp
def test_a_garbage_collection_on_a_worker_waits_for_nobody(tmp_path):
    env = launch.environment(
        launch.new_tag(), tmp_path, {"FCDP_SIM_CAPACITY": "256M", "FCDP_HOST_BUDGET": "64M", "FCDP_CHECK": "3"}
    )
    job = subprocess.run(
        [sys.executable, HERE / "handles_job.py", sim_library()],
        env=env,
        cwd=HERE,
        text=True,
        capture_output=True,
        timeout=120,
    )
    assert job.returncode == 0 and job.stdout == "fine\n", job.stdout + job.stderr
