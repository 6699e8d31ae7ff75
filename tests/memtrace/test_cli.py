"""The command line: what is refused, what goes to stdout, what is said where stdout cannot be written."""

import json
import os
import subprocess
import sys

import pytest

from traces import memtrace_run


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["check", "x", "--max-stall", "-5"], "'-5' is no number of milliseconds that is 0 to 1e+12"),
        (["check", "x", "--max-stall", "nan"], "'nan' is no number of milliseconds"),
        (["check", "x", "--max-stall", "five"], "'five' is no number of milliseconds"),
        (["check", "x", "--skip-steps", "-1"], "'-1' is no whole number that is 0 or larger"),
        (["diff", "x", "x", "--skip-steps", "-1"], "'-1' is no whole number"),
        (["report", "x", "--steps", "-1"], "'-1' is no whole number"),
        (["report", "x", "--regions", "1.5"], "'1.5' is no whole number"),
        (["plot", "x", "-o", "x.svg", "--width", "0"], "'0' is no number of inches that is 4 to 100"),
        (["plot", "x", "-o", "x.svg", "--width", "inf"], "'inf' is no number of inches"),
        (["record", "-o", "x", "--pid", "0"], "'0' is no whole number that is 1 or larger"),
        (["serve", "--pid", "-7"], "'-7' is no whole number that is 1 or larger"),
        (["top", "--json", "--pid", "-7"], "'-7' is no whole number that is 1 or larger"),
        (["top", "--json", "--pid", "99999999999"], "'99999999999' is too large"),
        (["diff", "x", "x", "--skip-steps", "4294967296"], "'4294967296' is too large"),
        (["check", "x", "--max-stall", "1e303"], "'1e303' is no number of milliseconds"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_number_that_makes_no_sense_is_refused(tmp_path, arguments, said):
    done = memtrace_run(*arguments, cwd=tmp_path)
    assert done.returncode == 2 and said in done.stderr, done.stderr


def test_what_is_asked_for_and_is_not_there_is_named(job, tmp_path):
    pytest.importorskip("matplotlib")
    done = memtrace_run("plot", job, "-o", tmp_path / "x.svg", "--rank", 7)
    assert (done.returncode, done.stderr) == (1, f"fcdp-memtrace: {job} has no rank 7; it has 0, 1\n")
    assert not (tmp_path / "x.svg").exists()
    done = memtrace_run("plot", job, "-o", tmp_path / "x.pdf")
    assert done.returncode == 2 and "x.pdf: the picture's name must end with .svg or .png" in done.stderr, done.stderr
    done = memtrace_run("top", "--interval", "0")
    said = "fcdp-memtrace: --interval must be 0.05 to 3600 seconds, not 0\n"
    assert (done.returncode, done.stderr) == (1, said)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["-o", "-", "--", "true"], "a recording cannot go to stdout: name a file with -o (./- for one of that name)"),
        (["-o", "x"], "give a command behind --, or --pid of a process that runs"),
        (["-o", "x", "--pid", "7", "--", "true"], "give a command behind --, or --pid of a process that runs"),
    ],
    ids=["stdout", "neither", "both"],
)
def test_a_recording_of_nothing_is_refused(tmp_path, arguments, said):
    done = memtrace_run("record", *arguments, cwd=tmp_path)
    assert done.returncode == 2 and f"fcdp-memtrace record: error: {said}\n" in done.stderr, done.stderr
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("command, library", [("plot", "matplotlib"), ("serve", "prometheus_client")])
def test_a_library_that_is_not_there_is_named_with_its_package(job, tmp_path, monkeypatch, capsys, command, library):
    from fcdp_memtrace import cli

    monkeypatch.setitem(sys.modules, library, None)
    arguments = [str(job), "-o", str(tmp_path / "x.svg")] if command == "plot" else ["--pid", str(os.getpid())]
    assert cli.main([command, *arguments]) == 1
    said = f"{command} needs {library}: pip install {library.replace('_', '-')}"
    assert capsys.readouterr().err == f"fcdp-memtrace: {said}\n"


@pytest.mark.slow
def test_the_narrowest_picture_is_drawn_without_a_warning(job, tmp_path):
    pytest.importorskip("matplotlib")
    done = memtrace_run("plot", job, "-o", tmp_path / "x.svg", "--width", "4")
    assert done.returncode == 0 and not done.stderr


@pytest.mark.parametrize("beside", [False, True])
def test_an_export_to_stdout_is_the_file_s(job, tmp_path, beside):
    profile = tmp_path / "profile.json"
    profile.write_text(json.dumps({"traceEvents": [{"ph": "M", "name": "of the profile"}]}))
    more = ["--beside", profile] if beside else []
    assert memtrace_run("export", job, *more, "-o", tmp_path / "out.json").returncode == 0
    done = memtrace_run("export", job, *more, "-o", "-", cwd=tmp_path)
    assert done.returncode == 0 and "stdout: " in done.stderr, done.stderr
    assert done.stdout == (tmp_path / "out.json").read_text() and json.loads(done.stdout)
    assert not (tmp_path / "-").exists()


def test_a_full_disk_under_an_export_is_named(job, tmp_path):
    """What goes to stdout is a file first."""
    small = "import resource as r, runpy, sys; r.setrlimit(r.RLIMIT_FSIZE, (100, 100)); sys.argv = sys.argv[1:]; "
    run = "runpy.run_module('fcdp_memtrace', run_name='__main__')"
    places = {"-": f"a file in {tmp_path}; TMPDIR names another folder", f"{tmp_path}/x": f"{tmp_path}/x"}
    for path, place in places.items():
        command = [sys.executable, "-c", small + run, "fcdp-memtrace", "export", str(job), "-o", path]
        done = subprocess.run(command, env=os.environ | {"TMPDIR": str(tmp_path)}, capture_output=True, text=True)
        said = f"fcdp-memtrace: cannot write the JSON: File too large ({place})\n"
        assert (done.returncode, done.stdout, done.stderr) == (1, "", said)


@pytest.mark.parametrize(
    "command", [["report"], ["report", "--json"], ["diff"], ["check"], ["export", "-o", "-"]], ids=" ".join
)
def test_a_full_stdout_is_named(job, command):
    files = [job, job] if command[0] == "diff" else [job]
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "fcdp_memtrace", command[0], *map(str, files), *command[1:]],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=120,
        )
    assert done.returncode == 1, done.stderr
    assert done.stderr.splitlines()[-1] == "fcdp-memtrace: cannot write to stdout: No space left on device"
    assert "Traceback" not in done.stderr and "Exception" not in done.stderr


def test_a_reader_that_goes_is_no_failure(job):
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as gone:
        command = [sys.executable, "-m", "fcdp_memtrace", "export", str(job), "-o", "-"]
        done = subprocess.run(command, stdout=gone, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 0 and "Traceback" not in done.stderr and "Exception" not in done.stderr, done.stderr


@pytest.mark.parametrize("command", [["report"], ["export", "-o", "-"]], ids=" ".join)
def test_a_closed_stdout_is_named(job, command):
    line = f"{sys.executable} -m fcdp_memtrace {command[0]} {job} {' '.join(command[1:])} >&-"
    done = subprocess.run(line, shell=True, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr == "fcdp-memtrace: cannot write to stdout: it is closed\n"
