"""record: it finds the processes, reads a killed one to its last event, and leaves a readable file however it ends."""

import argparse
import functools
import os
import resource
import signal
import subprocess
import sys
import threading

import pytest

from traces import HERE, Process, Script, _trace, a_job, memtrace_run, record

# A command with two ranks, of which the second starts when the first has ended; both write `n` events.
COMMAND = """
import json, resource, subprocess, sys
resource.setrlimit(resource.RLIMIT_FSIZE, 2 * resource.getrlimit(resource.RLIMIT_FSIZE)[1:])
n, status = int(sys.argv[1]), int(sys.argv[2])
for rank in range(2):
    p = subprocess.Popen([sys.executable, {segment!r}], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    print(json.dumps({{"rank": rank, "world_size": 2}}), file=p.stdin, flush=True)
    assert p.stdout.readline() == "ready\\n"
    print(json.dumps([["event", {{"kind": 76, "time_ns": i}}] for i in range(n)]), file=p.stdin, flush=True)
    assert p.stdout.readline() == "written\\n"
    if len(sys.argv) > 3:
        open(sys.argv[3], "a").write("x")
        sys.stdin.readline()
    p.communicate("\\n")
sys.exit(status)
"""


@pytest.fixture
def command(tmp_path):
    path = tmp_path / "command.py"
    path.write_text(COMMAND.format(segment=str(HERE / "segment.py")))
    return [sys.executable, str(path)]


def processes(path):
    return _trace.file_processes(_trace.file_open(str(path)))


class Recorder:
    """fcdp-memtrace record as a process, whose command waits until `release`."""

    def __init__(self, path, *arguments, limit=resource.RLIM_INFINITY, sigint=signal.SIG_DFL):
        self.path = path
        self.process = subprocess.Popen(
            [sys.executable, "-m", "fcdp_memtrace", "record", "-o", str(path), *map(str, arguments)],
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=functools.partial(self._in_child, limit, sigint),
        )

    @staticmethod
    def _in_child(limit, sigint):
        """Not as tests in the background of a shell, where SIGINT is ignored."""
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        signal.signal(signal.SIGINT, sigint)

    def wait_for(self, holds):
        """Polls; the test's own limit of time ends it."""
        event = threading.Event()
        while not holds():
            assert self.process.poll() is None, self.process.stderr.read()
            event.wait(0.01)

    def has_events(self, n):
        if not self.path.exists() or self.path.stat().st_size < 64:
            return False
        return sum(p["events"] for p in processes(self.path)) >= n


def test_a_command_s_processes_are_found_whenever_they_start(tmp_path, command):
    done = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "fcdp_memtrace",
            "record",
            "-o",
            str(tmp_path / "x.trace"),
            "--",
            *command,
            "50",
            "7",
            str(tmp_path / "mark"),
        ],
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    for rank in range(2):
        while (
            not (tmp_path / "x.trace").exists()
            or (tmp_path / "x.trace").stat().st_size < 64
            or len([p for p in processes(tmp_path / "x.trace") if p["rank"] == rank]) == 0
        ):
            assert done.poll() is None, done.stderr.read()
            threading.Event().wait(0.01)
        done.stdin.write("\n")
        done.stdin.flush()
    _, said = done.communicate(timeout=60)
    assert done.returncode == 7, said
    found = processes(tmp_path / "x.trace")
    assert [(p["rank"], p["events"], p["end"], p["lost"]) for p in found] == [(0, 50, "ended", 0), (1, 50, "ended", 0)]
    assert "2 processes" in said and "100 events" in said
    assert oct((tmp_path / "x.trace").stat().st_mode & 0o777) == "0o600"


def test_the_exit_status_is_the_command_s(tmp_path):
    for code, status in (("import sys; sys.exit(3)", 3), ("import os; os.kill(os.getpid(), 15)", 143)):
        done = memtrace_run("record", "-o", tmp_path / "x.trace", "--", sys.executable, "-c", code)
        assert done.returncode == status
        assert "no process with a trace was found" in done.stderr and "FCDP=1" in done.stderr
    assert memtrace_run("record", "-o", tmp_path / "x.trace", "--", "no-such-command").returncode == 127


def test_a_file_that_is_there_is_replaced_by_force_alone(tmp_path, job):
    """And only by a recording that has something in it."""
    before = job.read_bytes()
    mark = tmp_path / "mark"
    nothing = ["--", sys.executable, "-c", f"open({str(mark)!r}, 'w')"]
    done = memtrace_run("record", "-o", job, *nothing)
    assert done.returncode == 1 and f"{job} is there already" in done.stderr and "--force" in done.stderr
    assert not mark.exists() and job.read_bytes() == before
    done = memtrace_run("record", "--force", "-o", job, *nothing)
    assert done.returncode == 0 and f"so {job} was not written" in done.stderr and mark.exists()
    assert job.read_bytes() == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["job.trace", "mark"]
    process = Process(a_job(steps=1))
    job.chmod(0o644)
    recorder = Recorder(job, "--force", "--pid", process.pid)
    recorder.wait_for(lambda: len(processes(job)) == 1)
    process.end()
    _, said = recorder.process.communicate(timeout=60)
    assert recorder.process.returncode == 0, said
    (found,) = processes(job)
    assert found["step"] == 1 and found["end"] == "ended" and job.stat().st_mode & 0o777 == 0o600
    assert sorted(p.name for p in tmp_path.iterdir()) == ["job.trace", "mark"]


def test_an_empty_file_and_a_link_are_written(tmp_path):
    """mktemp makes the first."""
    process = Process(a_job())
    path, link = tmp_path / "x.trace", tmp_path / "link"
    path.touch()
    link.symlink_to(path)
    _trace.recorder_close(_trace.recorder_create(str(link), [], [process.pid]))
    assert link.is_symlink() and processes(path)[0]["pid"] == process.pid
    process.end()


@pytest.mark.parametrize("target", ["elsewhere/x.trace", "/elsewhere/x.trace"])
def test_a_link_to_a_file_that_is_not_there_yet_leads_to_it(tmp_path, target):
    process = Process(a_job())
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "link").symlink_to(f"{tmp_path}{target}" if target[0] == "/" else target)
    _trace.recorder_close(_trace.recorder_create(str(tmp_path / "link"), [], [process.pid]))
    assert (tmp_path / "link").is_symlink()
    assert processes(tmp_path / "elsewhere" / "x.trace")[0]["pid"] == process.pid
    process.end()


def test_a_file_that_comes_while_a_recording_begins_is_kept(tmp_path, command):
    path, part, mark = tmp_path / "x.trace", tmp_path / ".x.trace.part", tmp_path / "mark"
    comes = ["sh", "-c", f'printf precious >{path}; exec "$@"', "sh", *command, "1", "0", mark]
    recorder = Recorder(path, "--", *comes)
    recorder.wait_for(lambda: mark.exists() and (not part.exists() or part.stat().st_size > 64))  # its first chunk
    _, said = recorder.process.communicate("\n\n", timeout=60)
    assert path.read_text() == "precious" and f"{path} is there already, with 8 bytes" in said, said


def test_what_a_killed_recorder_left_is_used_again(tmp_path):
    part = tmp_path / ".x.trace.part"
    part.write_bytes(b"x" * 1000)
    process = Process(a_job())
    _trace.recorder_close(_trace.recorder_create(str(tmp_path / "x.trace"), [], [process.pid]))
    assert not part.exists() and _trace.file_summary(_trace.file_open(str(tmp_path / "x.trace")))["is_complete"]
    part.symlink_to(tmp_path / "x.trace")  # another user's, in a folder that others may write
    with pytest.raises(_trace.Error, match="cannot write"):
        _trace.recorder_create(str(tmp_path / "y.trace").replace("y", "x"), [], [process.pid], True)
    assert _trace.file_summary(_trace.file_open(str(tmp_path / "x.trace")))["is_complete"]
    process.end()


def test_a_trace_of_one_s_own_replaces_the_one_before(tmp_path, monkeypatch):
    """As a script's other outputs."""
    from fcdp_memtrace import recording

    process = Process(a_job())
    monkeypatch.setattr(recording.os, "getpid", lambda: process.pid)
    for _ in range(2):
        with recording.trace(tmp_path / "x.trace"):
            pass
    process.end()


def test_stdout_and_devices_are_refused(tmp_path):
    done = memtrace_run("record", "-o", "-", "--", "true", cwd=tmp_path)
    assert done.returncode == 2 and "name a file" in done.stderr and not list(tmp_path.iterdir())
    done = memtrace_run("record", "-o", "/dev/null", "--", "true")
    assert done.returncode == 1 and "/dev/null: it is not a file" in done.stderr


def test_the_pid_of_a_launcher_records_all_that_it_starts(tmp_path, command):
    """As top takes it. The second rank begins when the first has ended; the recording ends with the launcher."""
    launcher = subprocess.Popen([*command, "50", "0", str(tmp_path / "mark")], stdin=subprocess.PIPE)
    event = threading.Event()
    while not (tmp_path / "mark").exists():
        event.wait(0.01)
    path = tmp_path / "x.trace"
    recorder = Recorder(path, "--pid", launcher.pid)
    for n_events in 50, 100:
        recorder.wait_for(lambda n=n_events: recorder.has_events(n))
        launcher.stdin.write(b"\n")
        launcher.stdin.flush()
    _, said = recorder.process.communicate(
        timeout=60
    )  # the launcher has ended, and its parent has not asked for its status
    launcher.communicate(timeout=60)
    assert recorder.process.returncode == 0, said
    assert [(p["rank"], p["events"]) for p in processes(path)] == [(0, 50), (1, 50)]


def test_a_killed_process_is_read_to_its_last_event(tmp_path):
    script = a_job()
    n = sum(name == "event" for name, _ in script.lines)
    record(tmp_path / "x.trace", script, how="kill")
    (process,) = processes(tmp_path / "x.trace")
    assert (process["end"], process["events"], process["lost"]) == ("killed", n, 0)


def test_a_killed_recorder_leaves_a_readable_file(tmp_path, command):
    path = tmp_path / "x.trace"
    recorder = Recorder(path, "--", *command, 500, 0, tmp_path / "mark")
    recorder.wait_for(lambda: recorder.has_events(500))
    child = int(
        subprocess.check_output(["ps", "-o", "pid=", "--ppid", str(recorder.process.pid)], text=True).split()[0]
    )
    recorder.process.kill()
    recorder.process.communicate(timeout=60)
    os.kill(child, signal.SIGKILL)
    summary = _trace.file_summary(_trace.file_open(str(path)))
    assert summary["events"] == 500 and not summary["is_complete"] and not summary["is_growing"]
    done = memtrace_run("report", path)
    assert done.returncode == 0 and "no index" in done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_process_by_its_pid_until_interrupted(tmp_path, number):
    process = Process(a_job())
    path = tmp_path / "x.trace"
    recorder = Recorder(path, "--pid", process.pid)
    recorder.wait_for(lambda: recorder.has_events(10))
    recorder.process.send_signal(number)
    _, said = recorder.process.communicate(timeout=60)
    assert recorder.process.returncode == 0, said
    summary = _trace.file_summary(_trace.file_open(str(path)))
    assert summary["is_complete"] and processes(path)[0]["end"] == "running"
    process.end()


def test_in_the_background_of_a_shell_it_ends_by_sigterm(tmp_path):
    """Where SIGINT is ignored."""
    process = Process(a_job())
    recorder = Recorder(tmp_path / "x.trace", "--pid", process.pid, sigint=signal.SIG_IGN)
    recorder.wait_for(lambda: recorder.has_events(10))
    recorder.process.send_signal(signal.SIGTERM)
    _, said = recorder.process.communicate(timeout=60)
    assert recorder.process.returncode == 0, said
    process.end()


def test_a_process_that_cannot_be_recorded_costs_no_file(tmp_path):
    from fcdp_memtrace import recording

    process = Process(a_job())
    path = tmp_path / "x.trace"
    for before in (None, b"another job's"):
        if before:
            path.write_bytes(before)
        done = memtrace_run("record", "--force", "-o", path, "--pid", process.pid, "--pid", 2**22 + 1)
        assert done.returncode == 1 and "there is no process" in done.stderr
        with pytest.raises(_trace.Error, match="writes no trace"), recording.trace(path):
            pass
        assert (path.read_bytes() if path.exists() else None) == before
    process.end()


def test_a_command_that_cannot_run_costs_no_file(tmp_path):
    path = tmp_path / "x.trace"
    path.write_bytes(b"another job's")
    for command, status in (("no-such-command", 127), (tmp_path / "no" / "command", 127), (path, 126)):
        done = memtrace_run("record", "--force", "-o", path, "--", command)
        assert done.returncode == status and f"cannot run {command}: " in done.stderr, done.stderr
        assert path.read_bytes() == b"another job's"


def test_whatever_ends_a_recording_its_file_is_closed(tmp_path, monkeypatch):
    from fcdp_memtrace import record as command

    process = Process(a_job())
    path = tmp_path / "x.trace"

    def fails(*_):
        raise ZeroDivisionError

    monkeypatch.setattr(command, "follow", fails)
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # which are this process's
    with pytest.raises(ZeroDivisionError):
        command.run_pids(argparse.Namespace(output=str(path), pid=[process.pid], quiet=True, force=False))
    assert _trace.file_summary(_trace.file_open(str(path)))["is_complete"]
    process.end()


def test_a_full_disk_is_named_where_a_process_is_recorded(tmp_path):
    process = Process(a_job(steps=100))
    recorder = Recorder(tmp_path / "x.trace", "--pid", process.pid, limit=20000)
    _, said = recorder.process.communicate(timeout=60)
    assert recorder.process.returncode == 1 and "File too large" in said, said
    process.end()


def test_what_cannot_be_recorded_is_said(tmp_path):
    path = tmp_path / "x.trace"
    done = memtrace_run("record", "-o", path, "--pid", os.getpid())
    assert done.returncode == 1 and "writes no trace" in done.stderr and "FCDP=1" in done.stderr
    assert not path.exists()
    done = memtrace_run("record", "-o", path, "--pid", 2**22 + 1)
    assert done.returncode == 1 and "there is no process" in done.stderr
    done = memtrace_run("record", "-o", tmp_path / "no" / "x", "--", "true")
    assert done.returncode == 1 and "cannot write" in done.stderr
    assert memtrace_run("record", "-o", path).returncode == 2
    other = Process(Script(version=9))
    done = memtrace_run("record", "-o", path, "--pid", other.pid)
    assert done.returncode == 1 and "version 9" in done.stderr
    other.end()


def test_a_segment_that_may_shrink_is_not_read(tmp_path):
    """Its reader would die of it."""
    process = Process(Script(seals=0))
    with pytest.raises(_trace.Error, match="may shrink"):
        _trace.recorder_create(str(tmp_path / "x.trace"), [], [process.pid])
    process.end()


def test_a_header_that_changes_leads_nobody_out_of_the_segment(tmp_path):
    process = Process(a_job())
    recorder = Recorder(tmp_path / "x.trace", "--pid", process.pid)
    recorder.wait_for(lambda: recorder.has_events(10))
    process.write([["header", [name, 1 << 30]] for name in ("ring_events", "n_objects", "n_counters")])
    process.write([["event", {"kind": 76, "time_ns": 10**9 + i}] for i in range(100)])
    process.end()
    _, said = recorder.process.communicate(timeout=60)
    assert recorder.process.returncode == 0, said
    (found,) = processes(tmp_path / "x.trace")
    assert found["lost"] == 0 and found["end"] == "ended"


def test_two_recorders_do_not_share_a_file(tmp_path):
    recorder = _trace.recorder_create(str(tmp_path / "x.trace"), [])
    with pytest.raises(_trace.Error, match="another fcdp-memtrace"):
        _trace.recorder_create(str(tmp_path / "x.trace"), [])
    _trace.recorder_close(recorder)


def test_lost_events_are_counted(tmp_path):
    script = Script(ring=64)
    for i in range(10):
        script.event("pass")
    process = Process(script)
    recorder = _trace.recorder_create(str(tmp_path / "x.trace"), [], [process.pid])
    _trace.recorder_poll(recorder, 0)
    process.write([["event", {"kind": 76, "time_ns": 10**9 + i}] for i in range(100)])
    process.end()
    progress = _trace.recorder_poll(recorder, 0)
    _trace.recorder_close(recorder)
    assert (progress["events"], progress["lost"]) == (74, 36)
    (found,) = processes(tmp_path / "x.trace")
    assert (found["events"], found["lost"]) == (74, 36)
    said = "36 events were lost: overwritten before they were recorded (FCDP_TRACE_BUFFER); sums of events lack them"
    assert f"x.trace: {said}" in memtrace_run("report", tmp_path / "x.trace").stderr
    assert "x.trace: 36 events are missing and not checked\n" in memtrace_run("check", tmp_path / "x.trace").stderr


def test_a_full_disk_ends_the_recording_and_not_the_command(tmp_path, command):
    """By a limit of the file's size, which the command's own files do not have."""
    path = tmp_path / "x.trace"
    recorder = Recorder(path, "--", *command, 5000, 7, tmp_path / "mark", limit=20000)
    recorder.wait_for(lambda: path.exists() and path.stat().st_size == 20000)
    _, said = recorder.process.communicate("\n\n")
    assert recorder.process.returncode == 7, said
    assert "File too large" in said and "The command runs on" in said
    assert path.stat().st_size == 20000
    assert processes(path)[0]["rank"] == 0
