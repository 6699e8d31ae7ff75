"""tools/bench/training.py without a GPU: it says so, and its training loop runs."""

import json
import pathlib
import subprocess
import sys
import types

import pytest
import torch

pytestmark = pytest.mark.slow  # each starts a process that imports torch
ROOT = pathlib.Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "tools" / "bench" / "training.py"
sys.path.insert(0, str(SCRIPT.parent))
import training  # noqa: E402

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


def settings(**others):
    return types.SimpleNamespace(**{"most": 1 << 16, "rounds": 2, "batch": 8, "memory": 1.0, **others})


@pytest.mark.parametrize("guess", [1, 2, 7, 30, 1 << 16])
def test_the_largest_batch_is_found_from_any_guess(monkeypatch, guess):
    for true in (0, 1, 2, 3, 17, 29, 30, 31, 100, (1 << 16) - 1, 1 << 16, 1 << 20):
        tried = []

        def run(name, args, kind, batch):
            assert 1 <= batch <= args.most and batch not in tried
            tried.append(batch)
            return {"fits": batch <= true}

        monkeypatch.setattr(training, "run", run)
        assert training.largest_batch("one", settings(), guess) == min(true, 1 << 16)


def test_an_allocator_that_fails_takes_no_other_along(monkeypatch):
    def run(name, args, kind, batch):
        if name == "FCDP":
            raise training.Failed("a fault")
        return (
            {"fits": batch <= 20}
            if kind == "batch"
            else {"steps_per_s": 3.0, "reserved": 2 << 29, "allocated": 1 << 29, "states": 1 << 28}
        )

    monkeypatch.setattr(training, "run", run)
    figures = training.measure(settings())
    assert figures.pop("FCDP") == {"largest_batch": None, "failed": "a fault"}
    assert {f["largest_batch"] for f in figures.values()} == {20} and {f["steps_per_s"] for f in figures.values()} == {
        3.0
    }
    assert "a fault" in training.row("FCDP", {"largest_batch": None, "failed": "a fault"}, 3.0)


def test_what_no_time_was_left_for_is_left_out(monkeypatch):
    def run(name, args, kind, batch):
        if kind == "batch":
            raise training.OutOfTime
        return {"steps_per_s": 3.0, "reserved": 0, "allocated": 0, "states": 0}

    monkeypatch.setattr(training, "run", run)
    assert [f["largest_batch"] for f in training.measure(settings()).values()] == [None] * 3
    assert "not found" in training.row("FCDP", training.measure(settings())["FCDP"], 3.0)
