"""tools/bench/training.py without a GPU: it says so, and its training loop runs. tools/bench.sh overlap --before: it builds, or says why not, and runs."""
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest
import torch

ROOT = pathlib.Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "tools" / "bench" / "training.py"
BEFORE = ROOT / "tools" / "bench" / "overlap" / "before" / "build.sh"
NO_HISTORY = 3
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


def build_before(**settings):
    path = os.pathsep.join([str(pathlib.Path(sys.executable).parent), os.environ["PATH"]])
    return subprocess.run(["bash", BEFORE], capture_output=True, text=True, timeout=600, env=os.environ | {"PATH": path} | settings)


@pytest.mark.slow
def test_the_engine_before_trains_in_the_same_loop():
    built = build_before()
    if built.returncode == NO_HISTORY:
        pytest.skip(built.stderr.strip().splitlines()[-1])
    assert built.returncode == 0, built.stdout + built.stderr
    options = ["--steps", "1", "--warm", "2", "--scale", "0.2"]
    job = subprocess.run([built.stdout.splitlines()[-1], *options], capture_output=True, text=True, timeout=300)
    assert job.returncode == 0, job.stdout + job.stderr  # that gathered parameters are what they should be, among others
    ratios = re.fullmatch(r"overlap over the bound: compute (\S+) pcie (\S+) link (\S+)", job.stdout.splitlines()[-1])
    assert ratios and all(float(ratio) >= 1 for ratio in ratios.groups()), job.stdout
    maps = re.findall(r"creates 0\.00 maps (\S+) set-access ", job.stdout)
    assert len(maps) == 3 and all(float(n) >= 31 for n in maps), job.stdout  # 16 groups in forward and 15 in backward are mapped, at least
    assert job.stdout.startswith("the engine before, of commit 55b92e3: ")


@pytest.mark.skipif(not shutil.which("git"), reason="git is not installed")
def test_without_the_history_it_says_so(tmp_path):
    subprocess.run(["git", "init", "-q", tmp_path], check=True)  # as a shallow clone: a repository without that commit
    for settings, said in [({"GIT_DIR": str(tmp_path / "nowhere")}, "not a git repository"), ({"GIT_DIR": str(tmp_path / ".git")}, "git fetch --unshallow")]:
        built = build_before(**settings)
        assert built.returncode == NO_HISTORY and said in built.stderr, built.stderr
