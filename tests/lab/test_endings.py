"""However a run ends, its processes and namespaces end with it, and the user sees the script's own error."""

import contextlib
import os
import pathlib
import select
import signal
import subprocess
import sys
import tempfile
import time

import pytest

# Says in which namespace it is, starts a daemon that left its session, then waits for what never comes.
WAIT_FOREVER = """
import os, signal, subprocess, sys
subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"], start_new_session=True)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
with open(sys.argv[1], "w") as f:
    f.write(os.readlink("/proc/self/ns/net") + "\\n")
signal.pause()
"""
N_RANKS = 4


@pytest.fixture
def waiting(lab):
    """A lab whose ranks all wait: (lab, its process, the namespaces of its ranks)."""
    fifo = lab.folder / "fifo"
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    keep_open = os.open(fifo, os.O_WRONLY)
    process = subprocess.Popen(
        lab.command(lab.script(WAIT_FOREVER), str(fifo), options=["--modes", "fsdp"]),
        env=lab.env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # nohup, around the tests, ignores it for all
    )
    said = ""
    try:
        while said.count("\n") < N_RANKS and select.select([reader], [], [], 300)[0]:
            said += os.read(reader, 4096).decode()
        if said.count("\n") == N_RANKS:
            yield lab, process, set(said.split())
    finally:
        process.kill()
        _, errors = process.communicate(timeout=300)
        os.close(reader)
        os.close(keep_open)
    assert said.count("\n") == N_RANKS, f"ranks did not come up: {errors}"


def _wait_for_end(pids, timeout_s):
    """By pidfd, so that no time is guessed."""
    deadline = time.monotonic() + timeout_s
    for pid in pids:
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        ended = select.select([descriptor], [], [], max(0, deadline - time.monotonic()))[0]
        os.close(descriptor)
        assert ended, f"process {pid} lives on"


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_stop_signal_leaves_nothing_and_is_the_exit_status(waiting, signum):
    lab, process, namespaces = waiting
    assert len(namespaces) == 2 and namespaces <= lab.namespaces_in_use()
    process.send_signal(signum)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 128 + signum
    assert err == f"fcdp-lab: ended by {signum.name}\n"
    assert lab.processes() == []
    assert not namespaces & lab.namespaces_in_use()


def test_a_rank_sees_every_signal(lab):
    text = "import signal, sys; open(sys.argv[1], 'w').write(repr(signal.pthread_sigmask(signal.SIG_BLOCK, [])))"
    mask = lab.folder / "mask"
    done = lab.run(lab.script(text), str(mask), options=["--nodes", "1", "--ranks", "1", "--modes", "fsdp"])
    assert done.returncode == 0, done.stderr
    assert mask.read_text() == repr(signal.pthread_sigmask(signal.SIG_BLOCK, []))


def test_sigkill_of_the_lab_leaves_nothing(waiting):
    lab, process, namespaces = waiting
    started = lab.processes()
    assert len(started) > 2 * N_RANKS
    process.kill()
    _wait_for_end(started, 120)
    assert lab.processes() == []
    assert not namespaces & lab.namespaces_in_use()


def test_a_run_that_exceeds_its_time_is_ended_and_says_how_far_it_came(lab):
    fifo = lab.folder / "file"
    done = lab.run(lab.script(WAIT_FOREVER), str(fifo), options=["--modes", "fsdp", "--timeout", "2"])
    assert done.returncode == 1
    assert "not finished after 2 s (--timeout)" in done.stderr
    assert lab.processes() == []


FAILING = """
import os, signal, sys, time
rank = int(os.environ["RANK"])
def fail_in_own_function():
    raise ValueError("the learning rate is a fish")
if rank == 2:
    {action}
signal.pause()
"""


@pytest.mark.parametrize(
    ("action", "said"),
    [
        ("fail_in_own_function()", "ValueError: the learning rate is a fish"),
        ("print('no such data set', file=sys.stderr); sys.exit(3)", "exited with code 3:\nno such data set"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "was killed by SIGKILL"),
        (
            "print('oops', file=sys.stderr, flush=True); os.kill(os.getpid(), signal.SIGSEGV)",
            "SIGSEGV; its last words:\noops",
        ),
    ],
)
def test_the_first_failing_rank_is_named_with_its_own_words(lab, action, said):
    done = lab.run(lab.script(FAILING.format(action=action)), options=["--modes", "fsdp,fcdp"])
    assert done.returncode == 1
    assert "rank 2 (node 1, local rank 0)" in done.stderr
    assert said in done.stderr
    assert lab.processes() == []


@pytest.mark.slow
def test_under_torchrun_the_traceback_stands_alone(lab):
    pytest.importorskip("torch")
    text = FAILING.format(action="fail_in_own_function()").replace("signal.pause()", "")
    done = lab.run(lab.script(text), options=["--ranks", "2", "--nodes", "2", "--modes", "fsdp"], launcher="torchrun")
    assert done.returncode == 1
    assert "rank 2 (node 1, local rank 0) failed:\nTraceback" in done.stderr
    assert "the learning rate is a fish" in done.stderr
    assert "elastic" not in done.stderr and "ChildFailedError" not in done.stderr
    assert lab.processes() == []


NOBODY = {"user": 65534, "group": 65534, "extra_groups": []}


def _python_of_everybody():
    for python in (sys.executable, "/usr/bin/python3"):
        with contextlib.suppress(OSError):
            if (
                subprocess.run([python, "-c", "import sys; assert sys.version_info >= (3, 10)"], **NOBODY).returncode
                == 0
            ):
                return python
    pytest.skip("no Python 3.10 that an unprivileged user may run")


def test_an_unprivileged_user_gets_a_lab_or_an_advice(lab):
    if os.geteuid() != 0:
        pytest.skip("every other test runs as an unprivileged user")
    lab.python = _python_of_everybody()
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        lab.folder = pathlib.Path(folder)
        script = lab.script("import os; assert os.environ['RANK']")
        done = lab.run(script, options=["--modes", "fsdp"], cwd="/", **NOBODY)
    allowed = subprocess.run(["unshare", "--user", "--net", "true"], capture_output=True, **NOBODY)
    if allowed.returncode == 0:
        assert done.returncode == 0, done.stderr
    else:
        assert "Run fcdp-lab as root, or allow user namespaces" in done.stderr
    assert lab.processes() == []


def test_a_mode_that_asked_for_fcdp_and_has_none_is_an_error(lab):
    """A broken one stands before any that is installed."""
    folder = lab.folder / "broken"
    (folder / "fcdp").mkdir(parents=True)
    (folder / "fcdp" / "__init__.py").write_text("raise ImportError('broken on purpose')")
    text = "import sys; assert 'fcdp' not in sys.modules"
    done = lab.run(lab.script(text), options=["--ranks", "1", "--modes", "fsdp,fcdp", "--env", f"PYTHONPATH={folder}"])
    assert done.returncode == 1
    assert "fcdp was not loaded in the ranks" in done.stderr


def test_the_user_s_own_sitecustomize_still_runs(lab):
    folder = lab.folder / "site"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text("import os; os.environ['SEEN_BY_SITE'] = 'yes'")
    text = "import os, sys; assert os.environ.get('SEEN_BY_SITE') == 'yes'; assert 'torch' not in sys.modules"
    done = lab.run(lab.script(text), options=["--ranks", "1", "--modes", "fsdp", "--env", f"PYTHONPATH={folder}"])
    assert done.returncode == 0, done.stderr
