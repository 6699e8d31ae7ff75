"""fcdp-memtrace record: follows a command or a process, and writes what its ranks say to a file."""

from __future__ import annotations

import argparse
import contextlib
import errno
import os
import shutil
import signal
import subprocess
import sys
import time
from typing import NoReturn

from fcdp_memtrace import _trace
from fcdp_memtrace.arguments import at_least
from fcdp_memtrace.units import human

ABOUT = """\
Write the events of a job to a file.

  fcdp-memtrace record -o run.trace -- torchrun --nproc-per-node 4 train.py
  fcdp-memtrace record -o run.trace --pid 4711

With a command: records all its processes that run with FCDP=1, whenever they start; the exit status is the command's.
With --pid: records that process, or, where it writes no trace itself (torchrun), all that it has started and starts,
until they end or Ctrl-C; give the option again for more of them. Records a process that is killed up to its last event.
Where this program itself is killed, the file can be read up to a fraction of a second before.

Refuses to replace a file without --force. Writes FILE once it has found a process, so FILE stays as it was where none
writes a trace.
"""
PERIOD_MS = 20
NEWS_S = 10


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-o", "--output", metavar="FILE", required=True, help="the file to write; with --force it may be there already"
    )
    parser.add_argument("-f", "--force", action="store_true", help="replace FILE if it is there")
    parser.add_argument(
        "--pid",
        type=at_least(1),
        action="append",
        metavar="PID",
        default=[],
        help="a process that runs already, or that has started such ones (torchrun's)",
    )
    parser.add_argument("-q", "--quiet", action="store_true", help="no progress on stderr")
    parser.add_argument("job", nargs="*", metavar="-- COMMAND", help="the command to run, behind --")


def say(text: str, end: str = "\n") -> None:
    """Writes to stderr as long as its other end is open: a recording does not end with its terminal."""
    with contextlib.suppress(OSError):
        print(text, end=end, file=sys.stderr, flush=True)


class News:
    """Shows progress on stderr: one changing line on a terminal, elsewhere a line every ten seconds."""

    def __init__(self, quiet: bool):
        self.quiet, self.on_terminal = quiet, sys.stderr.isatty()
        self.next = time.monotonic() + (0 if self.on_terminal else NEWS_S)
        self.shown = False

    @staticmethod
    def line(progress: dict) -> str:
        lost = f", {progress['lost']} lost" if progress["lost"] else ""
        return (
            f"{progress['processes']} process{'' if progress['processes'] == 1 else 'es'} ({progress['live']} live), "
            f"step {progress['step']}, {progress['events']} events{lost}, {human(progress['bytes'])}"
        )

    def tell(self, progress: dict) -> None:
        if self.quiet or time.monotonic() < self.next:
            return
        self.next = time.monotonic() + (0.5 if self.on_terminal else NEWS_S)
        self.shown = True
        end = "\x1b[K\r" if self.on_terminal else "\n"
        say(f"fcdp-memtrace: {self.line(progress)}", end)

    def end(self, path: str, progress: dict) -> None:
        if self.on_terminal and self.shown:
            say("\x1b[K", end="")
        if not progress["processes"]:
            say(
                f"fcdp-memtrace: no process with a trace was found, so {path} was not written. A job writes a trace "
                "where it runs with FCDP=1 and without FCDP_TRACE=0."
            )
        elif not self.quiet:
            say(f"fcdp-memtrace: {path}: {self.line(progress)}")
        if progress["lost"]:
            say(
                "fcdp-memtrace: events were overwritten before they were read: a larger FCDP_TRACE_BUFFER keeps more, "
                "FCDP_TRACE=1 writes fewer. Sums that are counters are right all the same."
            )


def reap_orphans(command: subprocess.Popen) -> None:
    """Makes this process the parent of processes that the command leaves behind, and reaps them."""
    while True:
        try:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        if ended is None or ended.si_pid == command.pid:
            return
        os.waitpid(ended.si_pid, os.WNOHANG)


def follow(recorder, running, news: News) -> None:
    """Until `running(progress)` says no."""
    while True:
        progress = _trace.recorder_poll(recorder, PERIOD_MS)
        news.tell(progress)
        if not running(progress):
            return


def cannot_run(program: str, number: int) -> int:
    """A shell's exit status for it."""
    print(f"fcdp-memtrace: cannot run {program}: {os.strerror(number)}", file=sys.stderr)
    return 127 if number == errno.ENOENT else 126


def run_command(args: argparse.Namespace) -> int:
    """Passes this program's signals on to the command; Ctrl-C reaches both from the terminal."""
    if not shutil.which(args.job[0]):
        return cannot_run(args.job[0], errno.EACCES if os.path.exists(args.job[0]) else errno.ENOENT)
    _trace.adopt_orphans()
    recorder = _trace.recorder_create(args.output, [os.getpid()], [], args.force)
    news, failure = News(args.quiet), None
    try:
        command = subprocess.Popen(args.job)
    except OSError as error:
        _trace.recorder_close(recorder)
        return cannot_run(args.job[0], error.errno)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda n, frame: command.send_signal(n))

    def running(progress: dict) -> bool:
        reap_orphans(command)
        return command.poll() is None

    try:
        follow(recorder, running, news)
    except _trace.Error as error:  # the job goes on without
        failure = error
        say(f"fcdp-memtrace: {error}. The command runs on, and is not recorded any more.")
    status = command.wait()
    try:
        news.end(args.output, _trace.recorder_close(recorder))
    except _trace.Error as error:
        if not failure:
            say(f"fcdp-memtrace: {error}")
    return 128 - status if status < 0 else status


def interrupt(number: int, frame: object) -> NoReturn:
    """Does not use SIGINT, which background programs of a shell ignore."""
    raise KeyboardInterrupt


def has_started_traces(pid: int) -> bool:
    """Does the process write no trace itself, while some of its descendants do?"""
    traced = _trace.traced(pid)
    return bool(traced) and pid not in traced


def run_pids(args: argparse.Namespace) -> int:
    news = News(args.quiet)
    ancestors = [pid for pid in args.pid if has_started_traces(pid)]
    pids = [pid for pid in args.pid if pid not in ancestors]
    recorder = _trace.recorder_create(args.output, ancestors, pids, args.force)
    try:
        signal.signal(signal.SIGTERM, interrupt)
        follow(recorder, lambda progress: progress["live"] or progress["ancestors"], news)
    except KeyboardInterrupt:
        pass
    except BaseException:
        with contextlib.suppress(_trace.Error):  # what failed first is what is told
            _trace.recorder_close(recorder)
        raise
    news.end(args.output, _trace.recorder_close(recorder))
    return 0


def run(args: argparse.Namespace) -> int:
    if args.output == "-":
        print(
            "fcdp-memtrace record: error: a recording cannot go to stdout: name a file with -o (./- for one of that name)",
            file=sys.stderr,
        )
        return 2
    if bool(args.job) == bool(args.pid):
        print(
            "usage: fcdp-memtrace record -o FILE -- COMMAND | --pid PID\n"
            "fcdp-memtrace record: error: give a command behind --, or --pid of a process that runs",
            file=sys.stderr,
        )
        return 2
    return run_pids(args) if args.pid else run_command(args)
