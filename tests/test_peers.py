"""tools/bench.sh peers: its table, from what fcdp-lab measures, and libraries that cannot be installed. No network."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

FOLDER = pathlib.Path(__file__).resolve().parents[1] / "tools" / "bench" / "peers"
sys.path.insert(0, str(FOLDER))
import compare  # noqa: E402


def measured(sent, step, losses=("5.0", "4.0"), shards=True, **env):
    """A mode as fcdp-lab writes it."""
    return {
        "sent_bytes_per_step": sent,
        "step_s": step,
        "env": env,
        "W_bytes": 100,
        "equal": {"shards": shards, "losses": losses == ("5.0", "4.0")},
        "runs": [{"losses": list(losses)}],
    }


def test_a_row_says_bytes_time_and_whether_training_differs():
    plain = [measured(300, 2.0), measured(750, 4.0)]
    exact = [measured(200, 1.0, FCDP="1"), measured(200, 1.5, FCDP="1")]
    rounded = [measured(100, 1.0, ("5.0", "4.002"), None), measured(100, 1.0, ("5.0", "4.0"), None)]
    broken = [measured(200, 1.0, FCDP="1"), measured(200, 1.0, ("5.5", "4.0"), False, FCDP="1")]
    documents = list(zip(plain, exact, rounded, broken))
    taken = {"FSDP2": (2.0, 100, 0.0), "FCDP": (1.5, 100, 1.0), "other": (1.255, 100, 0.0), "broken": (3.0, 100, 0.0)}
    assert list(compare.rows(["FSDP2", "FCDP", "other", "broken"], documents, taken)) == [
        ["FSDP2", "3.00 W", "7.50 W", "1.00", "1.00", "2.00 W", "reference", "0"],
        ["FCDP", "2.00 W", "2.00 W", "0.50", "0.38", "1.50 W", "bitwise equal", "0"],
        ["other", "1.00 W", "1.00 W", "0.50", "0.25", "1.25 W", "another order of sums, the same losses", "5e-04"],
        ["broken", "2.00 W", "2.00 W", "0.50", "0.25", "3.00 W", "bitwise equal, NOT EQUAL", "1e-01"],
    ]


def test_memory_is_that_of_the_rank_that_takes_most(monkeypatch):
    """The median of a title's runs, which take turns; a mode may have arguments of the job already."""
    taken, modes = iter([10, 30, 20, 30, 60, 40]), []

    def lab(rate, job, given, more):
        (mode,) = given
        modes.append(mode.rpartition(" ")[0])
        device = next(taken)
        lines = [json.dumps({"W_bytes": 20, "device_bytes": n}) for n in (device, device - 1)]
        pathlib.Path(mode.rpartition(" ")[2]).write_text("".join(f"{line}\n" for line in lines))
        return [{"host_peak_bytes": 20}]

    monkeypatch.setattr(compare.frameworks, "lab", lab)
    assert compare.memory([("a", "-- --hsdp"), ("b", "FCDP=1")], 3) == {"a": (1.0, 20, 1.0), "b": (1.5, 20, 1.0)}
    assert modes == ["-- --hsdp --memory", "FCDP=1 -- --memory"] * 3


JOB = """\
import sys
sys.path.insert(0, sys.argv[1])
import json, pathlib, torch
from types import SimpleNamespace
import memory

MIB = 1 << 20


class Block(torch.nn.Module):
    def forward(self, x):
        return x * 2


class GPT(torch.nn.Module):
    def __init__(self, args):
        super().__init__()
        self.block, self.weight = gpt.Block(), torch.nn.Parameter(torch.ones(2 * MIB))

    def forward(self):
        return gpt.Block.forward(self.block, self.weight).sum()


gpt = SimpleNamespace(GPT=GPT, Block=Block)
watch = memory.Watch(gpt)
model = gpt.GPT(SimpleNamespace(micro_batches=2))
for size in (100, 100, 4, 32):  # those of the first step do not count
    held = torch.ones(size * MIB // 4)
    loss = model()
    loss.backward()
    del held, loss
    model.zero_grad()
watch.write(sys.argv[2])
"""


def test_memory_is_measured_behind_the_first_step(tmp_path):
    """8 MiB of parameters, their gradients and 8 MiB of activations, beside what the job holds."""
    (tmp_path / "job.py").write_text(JOB)
    given = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    subprocess.run([sys.executable, tmp_path / "job.py", FOLDER, tmp_path / "out"], env=given, check=True)
    line = json.loads((tmp_path / "out").read_text())
    assert line["W_bytes"] == 8 << 20 and 48 << 20 <= line["device_bytes"] <= 60 << 20, line


def test_every_row_has_a_cell_for_every_column():
    assert len(compare.NOT_MEASURED) == compare.HEAD.count("|") + 1


def test_memory_alone_replaces_its_column():
    taken = {"HSDP": (2.5, 100, 0.0)}
    old = [["HSDP", *"abcdefg"], ["another", *"abcdefg"]]
    new = [["HSDP", *"abcd", "2.50 W", *"fg"], ["another", *"abcdefg"]]
    text = ["W = 100 MB", "", *compare.frameworks.lines(compare.HEAD, old)]
    expected = ["W = 100 MB", "", *compare.frameworks.lines(compare.HEAD, new)]
    assert compare.with_memory("\n".join(text), taken).splitlines() == expected


def test_memory_alone_is_written(tmp_path, monkeypatch, capsys):
    """And what is said of it below the table; nothing else is measured."""
    title, said = compare.REDUCE_WHOLE[0], "<!-- memory: begin -->\nold\n<!-- memory: end -->\n"
    table = "\n".join(compare.frameworks.lines(compare.HEAD, [["HSDP", *"abcdefg"]]))
    monkeypatch.setattr(compare, "DOCUMENT", tmp_path / "peers.md")
    compare.DOCUMENT.write_text(f"<!-- peers: begin -->\n{table}\n<!-- peers: end -->\n{said}")
    monkeypatch.setattr(compare, "environments", lambda: ({}, dict.fromkeys(compare.LIBRARIES, "no network")))
    monkeypatch.setattr(compare.frameworks, "stop_on_signals", lambda: None)
    monkeypatch.setattr(compare.frameworks, "lab", None)
    monkeypatch.setattr(compare, "memory", lambda peers, _: {name: (2.5, 1e8, 1.0) for name, _ in peers})
    monkeypatch.setattr(sys, "argv", ["compare.py", "--memory", "--write"])
    assert not compare.main()
    written, printed = compare.DOCUMENT.read_text(), capsys.readouterr().out
    assert "| HSDP | a | b | c | d | 2.50 W | f | g |" in written and "old" not in written
    assert f"| {title} | 2.50 W |" in printed and "DeepSpeed" not in printed
    assert "1.00 W per node" in written and "1.00 W per node" in printed


def test_what_is_written_replaces_what_stood_there(tmp_path, monkeypatch):
    monkeypatch.setattr(compare, "DOCUMENT", tmp_path / "peers.md")
    compare.DOCUMENT.write_text("a\n<!-- peers: begin -->\nold\n<!-- peers: end -->\nb\n")
    compare.put("peers", lambda old: old.replace("old", "new"))
    assert compare.DOCUMENT.read_text() == "a\n<!-- peers: begin -->\nnew\n<!-- peers: end -->\nb\n"


def test_a_library_that_cannot_be_installed_is_left_out_and_said(tmp_path, monkeypatch):
    def pip(command, **_):
        failed = "deepspeed==0.19.8" in command
        return subprocess.CompletedProcess(command, int(failed), stderr="a warning\nno network\n" if failed else "")

    monkeypatch.setattr(compare, "ROOT", tmp_path)
    monkeypatch.setattr(compare.subprocess, "run", pip)
    monkeypatch.setattr(compare.venv, "create", lambda folder, **_: compare.modules_of(folder).mkdir(parents=True))
    found, missing = compare.environments()
    assert list(found) == ["megatron-fsdp"] and missing == {"deepspeed": "no network"}
    monkeypatch.setattr(compare.venv, "create", None)  # what is complete is not made again
    assert compare.environment("megatron-fsdp") == found["megatron-fsdp"]


@pytest.mark.parametrize("argument, code, words", [("--help", 0, "--memory"), ("--repeat=0", 2, "1 or larger")])
def test_the_command_line(argument, code, words):
    done = subprocess.run([sys.executable, FOLDER / "compare.py", argument], capture_output=True, text=True)
    assert (
        done.returncode == code
        and words in done.stdout + done.stderr
        and "tools/bench.sh peers" in done.stdout + done.stderr
    )
