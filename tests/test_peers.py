"""tools/bench.sh peers: its table, from what fcdp-lab measures, and libraries that cannot be installed. No network."""

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
    assert list(compare.rows(["FSDP2", "FCDP", "other", "broken"], documents)) == [
        ["FSDP2", "3.00 W", "7.50 W", "1.00", "1.00", "reference", "0"],
        ["FCDP", "2.00 W", "2.00 W", "0.50", "0.38", "bitwise equal", "0"],
        ["other", "1.00 W", "1.00 W", "0.50", "0.25", "another order of sums, the same losses", "5e-04"],
        ["broken", "2.00 W", "2.00 W", "0.50", "0.25", "bitwise equal, NOT EQUAL", "1e-01"],
    ]


def test_every_row_has_a_cell_for_every_column():
    assert len(compare.NOT_MEASURED) == compare.HEAD.count("|") + 1


def test_what_is_written_replaces_what_stood_there(tmp_path, monkeypatch):
    monkeypatch.setattr(compare, "DOCUMENT", tmp_path / "peers.md")
    compare.DOCUMENT.write_text("a\n<!-- peers: begin -->\nold\n<!-- peers: end -->\nb\n")
    compare.put("new\n")
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


@pytest.mark.parametrize("argument, code, words", [("--help", 0, "--repeat N"), ("--repeat=0", 2, "1 or larger")])
def test_the_command_line(argument, code, words):
    done = subprocess.run([sys.executable, FOLDER / "compare.py", argument], capture_output=True, text=True)
    assert (
        done.returncode == code
        and words in done.stdout + done.stderr
        and "tools/bench.sh peers" in done.stdout + done.stderr
    )
