"""One run of the job on emulated nodes, seen from outside: start it, hear from it, end it.

lab -> guard -> process 1 of a new PID namespace -> one process per node -> launcher -> ranks.
The guard waits for SIGTERM or for process 1; each of the two is killed by the kernel when its parent ends, and when
process 1 dies, the kernel kills everything below it, in any session or group. All namespaces are unnamed, so they go
with their last process. Hence nothing is left even when the lab itself gets SIGKILL.
"""

import json
import os
import select
import signal
import subprocess
import sys
import time

from fcdp_lab import namespaces

_GUARD_PATIENCE_S = 10
_GUARD_CODE = "import sys; sys.path.insert(0, sys.argv.pop(1)); from fcdp_lab.sandbox import guard; guard()"


class Sandbox:
    """A running sandbox. Events are dicts with a `kind`; engine.py lists the kinds."""

    def __init__(self, plan):
        package_root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
        events_read, events_write = os.pipe()
        plan_read, plan_write = os.pipe()
        self._events = events_read
        self._partial = b""
        self._guard = subprocess.Popen(
            [
                sys.executable,
                "-I",
                "-c",
                _GUARD_CODE,
                package_root,
                str(os.getpid()),
                str(plan_read),
                str(events_write),
            ],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            pass_fds=(plan_read, events_write),
        )
        os.close(plan_read)
        os.close(events_write)
        try:
            with open(plan_write, "w") as f:
                json.dump(plan, f)
        except BrokenPipeError:
            pass  # the guard ended at once; events() says so

    def events(self, timeout_s):
        """The events that arrived within timeout_s; None once the sandbox is gone."""
        ready, _, _ = select.select([self._events], [], [], timeout_s)
        if not ready:
            return []
        data = os.read(self._events, 65536)
        if not data:
            return None
        *lines, self._partial = (self._partial + data).split(b"\n")
        return [json.loads(line) for line in lines]

    def close(self):
        """Returns when every process and namespace of the run is gone."""
        if self._guard.poll() is None:
            self._guard.send_signal(signal.SIGTERM)
        try:
            self._guard.wait(_GUARD_PATIENCE_S)
        except subprocess.TimeoutExpired:
            self._guard.kill()
            self._guard.wait()
        os.close(self._events)


def guard():
    """The guard process."""
    lab_pid, plan_fd, events_fd = (int(a) for a in sys.argv[1:4])
    namespaces.die_with_parent()
    if os.getppid() != lab_pid:
        sys.exit(1)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGCHLD})
    with open(plan_fd) as f:
        plan = json.load(f)
    try:
        namespaces.enter(
            namespaces.CLONE_NEWPID | namespaces.CLONE_NEWNS | namespaces.CLONE_NEWNET | namespaces.CLONE_NEWIPC
        )
    except namespaces.NamespaceError as error:
        send(events_fd, kind="refused", message=str(error))
        sys.exit(1)
    sys.exit(_guard_process_one(plan, events_fd))


def _guard_process_one(plan, events_fd):
    alive_read, alive_write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(alive_write)
        namespaces.die_with_parent()
        if select.select([alive_read], [], [], 0)[0]:
            os._exit(1)
        from fcdp_lab import engine

        engine.run(plan, events_fd)
    os.close(events_fd)
    while True:
        if signal.sigwait({signal.SIGTERM, signal.SIGCHLD}) == signal.SIGTERM:
            os.kill(pid, signal.SIGKILL)
            _, status = os.waitpid(pid, 0)
            return 128 + signal.SIGTERM
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status) & 0xFF


def send(events_fd, **event):
    """One line is far below PIPE_BUF, so that writers do not interleave; longer messages are cut."""
    if "message" in event:
        event["message"] = event["message"][:3000]
    event["t"] = time.monotonic()
    os.write(events_fd, json.dumps(event).encode() + b"\n")
