"""tools/bench/training.py without a GPU: it says so, and its training loop runs."""
import json
import pathlib
import subprocess
import sys

import pytest
import torch

pytestmark = pytest.mark.slow  # each starts a process that imports torch
SCRIPT = pathlib.Path(__file__).resolve().parent.parent / "tools" / "bench" / "training.py"
SMALL = ["--layers", "2", "--dim", "32", "--heads", "4", "--seq", "32", "--batch", "2", "--steps", "2"]


def run(*arguments):
    job = subprocess.run([sys.executable, SCRIPT, *arguments], capture_output=True, text=True, timeout=300)
    assert job.returncode == 0, job.stderr
    return job.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_device_it_says_so():
    assert "No CUDA device can be reached" in run()


@pytest.mark.parametrize("kind, key", [("speed", "steps_per_s"), ("batch", "fits")])
def test_the_loop_trains(kind, key):
    assert json.loads(run("--device", "cpu", "--one", kind, *SMALL).splitlines()[-1])[key]
