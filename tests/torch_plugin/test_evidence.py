import os
import subprocess
import sys

import pytest

import launch


@pytest.mark.parametrize("seed", range(3))
def test_parameters_are_read_as_python_reads_them(seed):
    """After writes, steps, swaps, casts, freed storages, in inference mode, with every reader."""
    job = subprocess.run(
        [sys.executable, launch.HERE / "evidence_job.py", str(seed)],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"FCDP": "0"},
    )
    assert job.returncode == 0, job.stdout + job.stderr
