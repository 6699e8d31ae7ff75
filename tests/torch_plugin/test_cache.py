"""Frozen parameters that the last run has left on the node's disk (FCDP_CACHE_DIR): the next one gathers none of them,
and trains bit for bit the same."""

import fcntl
import json
import os
import pathlib
import subprocess
import sys
import time

import pytest

from conftest import needs_fcdp
from models import Net
from test_bad_input import on, start

pytestmark = needs_fcdp
FROZEN = 2  # a block, of four
ARGUMENTS = {"fsdp2": ["--freeze", FROZEN], "fsdp1": ["--fsdp1", "--freeze", FROZEN]}
FROZEN_BYTES = sum(p.nbytes for p in Net(dim=128, n_blocks=1).blocks.parameters())


def total(outcome, *path):
    """Over the ranks, of their stats."""
    values = [result["stats"] for result in outcome.results]
    for key in path:
        values = [value[key] for value in values]
    return sum(values)


def doctor(*arguments, **settings):
    env = {name: value for name, value in os.environ.items() if not name.startswith("FCDP")} | settings
    program = pathlib.Path(sys.executable).with_name("fcdp-doctor")
    return subprocess.run([program, *arguments], env=env, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("kind", ARGUMENTS)
def test_a_second_run_gathers_no_frozen_byte(tmp_path, kind):
    cache = tmp_path / "cache"
    plain = start(tmp_path / "plain", arguments=ARGUMENTS[kind])
    outcomes = []
    for run in ("first", "second"):
        outcomes.append(
            start(tmp_path / run, on(FCDP_CODEC="none", FCDP_CACHE_DIR=str(cache)), arguments=ARGUMENTS[kind])
        )
        assert outcomes[-1].went_on(plain) == []
        assert outcomes[-1].messages[1:] == [[], [], []], outcomes[-1].messages
    first, second = outcomes
    assert total(first, "cache", "read_bytes") == total(second, "cache", "written_bytes") == 0
    written, read = total(first, "cache", "written_bytes"), total(second, "cache", "read_bytes")
    assert read >= 2 * FROZEN_BYTES and read / 2 <= written <= read  # two nodes share the directory
    assert total(first, "cache", "failures") == total(second, "cache", "failures") == 0
    saved = [total(one, "collectives", "gather", "inter_bytes_sent") for one in outcomes]
    assert saved[0] - saved[1] >= FROZEN_BYTES, saved  # half of it from each of two nodes
    assert " came from FCDP_CACHE_DIR and 0 B were written there" in second.messages[0][2], second.messages
    groups = {group["name"]: group for group in second.results[0]["stats"]["groups"]}
    assert [name for name, group in groups.items() if group["on_disk"]] == [f"blocks.{FROZEN}"], groups
    assert groups[f"blocks.{FROZEN}"]["gather_bytes"] == 0, groups
    listed = doctor("--cache", "--json", FCDP_CACHE_DIR=str(cache))
    document = json.loads(listed.stdout)
    assert {entry["name"] for entry in document["files"]} == {f"blocks.{FROZEN}"}, document
    assert sorted(entry["slice"] for entry in document["files"]) == [0, 1], document
    shown = doctor("--cache", str(cache)).stdout
    assert shown.startswith(f"{cache}: ") and f"blocks.{FROZEN}" in shown, shown
    assert doctor("--cache", str(cache), "--clear").stdout.endswith(" removed\n")
    assert [path.name for path in cache.iterdir()] == [".lock"]


def is_waiting(pid):
    """For a lock of a file."""
    return any(" -> FLOCK " in line and f" {pid} " in line for line in open("/proc/locks"))


def test_the_doctor_removes_nothing_while_a_job_makes_a_file(tmp_path):
    kept = tmp_path / f"{0:032x}.frozen"
    kept.write_bytes(b"x" * 5000)
    program = pathlib.Path(sys.executable).with_name("fcdp-doctor")
    with (tmp_path / ".lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        clearing = subprocess.Popen([program, "--cache", tmp_path, "--clear"], stdout=subprocess.PIPE, text=True)
        until = time.monotonic() + 60
        while not is_waiting(clearing.pid) and clearing.poll() is None and time.monotonic() < until:
            time.sleep(0.05)
        assert clearing.poll() is None and kept.exists()
    assert clearing.communicate(timeout=60)[0].endswith(" removed\n") and not kept.exists()


def test_the_doctor_says_what_it_cannot_remove(tmp_path):
    """Root may write everywhere: directories stand where files are wanted."""
    (tmp_path / f"{0:032x}.frozen").write_bytes(b"x" * 5000)
    (tmp_path / f"{1:032x}.frozen").mkdir()
    done = doctor("--cache", str(tmp_path), "--clear")
    said = f"fcdp-doctor: {tmp_path}/{1:032x}.frozen: Is a directory. 5 KB were removed before it\n"
    assert (done.returncode, done.stdout, done.stderr) == (1, "", said)
    (tmp_path / ".lock").unlink()
    (tmp_path / ".lock").mkdir()
    (tmp_path / f"{0:032x}.frozen").write_bytes(b"x" * 5000)
    done = doctor("--cache", str(tmp_path), "--clear")
    said = f"fcdp-doctor: {tmp_path}/.lock: Is a directory. Nothing was removed: --clear needs to write there\n"
    assert (done.returncode, done.stdout, done.stderr) == (1, "", said)
    assert (tmp_path / f"{0:032x}.frozen").exists()


def test_a_directory_that_cannot_be_used_is_said_once_a_node(tmp_path):
    plain = start(tmp_path / "plain", arguments=ARGUMENTS["fsdp2"])
    outcome = start(tmp_path / "run", on(FCDP_CACHE_DIR="/dev/null/cache"), arguments=ARGUMENTS["fsdp2"])
    outcome.went_on(plain)
    said = [[line for line in messages if "/dev/null/cache" in line] for messages in outcome.messages]
    assert [len(lines) for lines in said] == [1, 0, 1, 0], outcome.messages
    assert said[0][0].endswith("Not a directory; frozen parameters are gathered"), said


@pytest.mark.parametrize(
    "arguments, settings, said",
    [
        (["--cache"], {}, "which directory? Set FCDP_CACHE_DIR"),
        (["--cache", "/nowhere/at/all"], {}, "/nowhere/at/all is no directory"),
        (["--cache", "/usr"], {"FCDP_CACHE_SIZE": "lots"}, "FCDP_CACHE_SIZE=lots: "),
    ],
)
def test_the_doctor_says_what_it_needs(arguments, settings, said):
    done = doctor(*arguments, **settings)
    assert done.returncode == 1 and done.stderr.startswith(f"fcdp-doctor: {said}"), done.stderr


def test_the_doctor_tells_of_the_directory(tmp_path):
    good, bad = (doctor(FCDP_CACHE_DIR=directory) for directory in (str(tmp_path), "/dev/null/there"))
    assert good.returncode == 0 and f" free in {tmp_path}; " in good.stdout, good.stdout
    assert bad.returncode == 0 and "Not a directory; frozen parameters are gathered" in bad.stdout, bad.stdout
