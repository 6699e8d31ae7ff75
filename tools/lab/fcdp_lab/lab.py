"""Runs the modes one after the other, each in a sandbox of its own, and shows their progress."""

import contextlib
import dataclasses
import glob
import json
import os
import signal
import subprocess
import time

from fcdp_lab import failure, machine, network
from fcdp_lab.device import DeviceError, Simulated
from fcdp_lab.sandbox import Sandbox

_POLL_S = 0.25
_INJECT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "inject")
_STOP_SIGNALS = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}


class RunFailed(Exception):
    """The job itself failed, or its sandbox could not be built."""


class Stopped(Exception):
    """A signal asked the lab to end."""

    def __init__(self, signum):
        super().__init__(signal.Signals(signum).name)
        self.exit_code = 128 + signum


@dataclasses.dataclass(frozen=True)
class Setup:
    """What all runs have in common."""

    job: tuple
    nodes: int
    ranks: int
    rate_bits: float | None
    delay_s: float
    env: dict
    launcher: str
    python: str
    timeout_s: float
    grace_s: float
    device: Simulated | None = None  # None: the CPU


@dataclasses.dataclass
class Run:
    mode: object
    folder: str
    node_sent: dict  # node -> bytes over the whole run, start and rendezvous included
    node_received: dict
    wall_s: float
    others_cpus: float | None = None  # that other programs used meanwhile


def stop_on_signals():
    """From here on a stop signal is an exception in the main thread; under nohup, SIGHUP stays ignored."""

    def stop(signum, frame):
        raise Stopped(signum)

    for signum in _STOP_SIGNALS:
        if signum != signal.SIGHUP or signal.getsignal(signum) != signal.SIG_IGN:
            signal.signal(signum, stop)


@contextlib.contextmanager
def _undisturbed():
    earlier = signal.pthread_sigmask(signal.SIG_BLOCK, _STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, earlier)


def order_of_runs(modes, n_repeats):
    """Modes interleaved, every second round backwards, so that a drift of the machine favours none."""
    for repeat in range(n_repeats):
        for mode in modes if repeat % 2 == 0 else reversed(modes):
            yield repeat, mode


def build_device(setup, progress):
    try:
        setup.device.build(setup.python, progress, _POLL_S)
    except DeviceError as error:
        raise RunFailed(str(error)) from None


def run_mode(setup, mode, folder, progress):
    """Returns a Run, or raises RunFailed. No process of the run is left when this returns or raises."""
    plan = _plan(setup, mode, folder)
    started = time.monotonic()
    watch = machine.Watch()
    sandbox = None
    try:
        with _undisturbed():
            sandbox = Sandbox(plan)
        exits = _follow(sandbox, setup, mode, folder, progress, started + setup.timeout_s)
    finally:
        with _undisturbed():
            if sandbox is not None:
                sandbox.close()
    if any(event["code"] for event in exits.values()) or len(exits) < setup.nodes:
        raise RunFailed(failure.explain(folder, setup.nodes, setup.ranks))
    return Run(
        mode,
        folder,
        {node: event["sent"] for node, event in exits.items()},
        {node: event["received"] for node, event in exits.items()},
        time.monotonic() - started,
        watch.others_cpus(),
    )


def _plan(setup, mode, folder):
    for name in ("probe", "logs"):
        os.makedirs(f"{folder}/{name}")
    with open(f"{folder}/hosts", "w") as f:
        f.write(network.hosts_file(setup.nodes))
    return {
        "nodes": setup.nodes,
        "ranks": setup.ranks,
        "rate_bits": setup.rate_bits,
        "delay_s": setup.delay_s,
        "hosts_file": f"{folder}/hosts",
        "logs": f"{folder}/logs",
        "launcher": setup.launcher,
        "python": setup.python,
        "grace_s": setup.grace_s,
        "job": [*setup.job, *mode.args],
        "env": rank_environment(setup, mode, folder),
    }


# Said by the interpreter of the ranks, whose fcdp it is. Where it has none, the first run tells.
_REFUSED_OPTION = """\
try:
    from fcdp import _fcdp
except ImportError:
    raise SystemExit
try:
    _fcdp.options_load()
except _fcdp.Error as error:
    print(error.args[0])
"""


def refused_option(setup, mode):
    """Why FCDP would stop the mode's ranks; "": it would not."""
    done = subprocess.run(
        [setup.python, "-c", _REFUSED_OPTION],
        env={**os.environ, **setup.env, **mode.env},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    return done.stdout.strip()


def rank_environment(setup, mode, folder):
    """The user's environment, then the lab's, then --env, then the mode's; only a mode or --env sets FCDP."""
    env = {k: v for k, v in os.environ.items() if k != "FCDP"}
    threads = max(1, len(os.sched_getaffinity(0)) // (setup.nodes * setup.ranks))
    env.setdefault("OMP_NUM_THREADS", str(threads))
    env["PYTHONUNBUFFERED"] = "1"
    simulated = setup.device.environment() if setup.device else {}
    if simulated:  # NCCL's double is shared memory, and none of the links that are measured
        env.setdefault("FCDP_TRANSPORT", "torch")
    env |= simulated | setup.env | mode.env
    found = [_INJECT, env.get("PYTHONPATH"), setup.device and setup.device.python_path]
    env["PYTHONPATH"] = os.pathsep.join(filter(None, found))
    env["LAB_PROBE_DIR"] = f"{folder}/probe"
    return env


def _follow(sandbox, setup, mode, folder, progress, deadline):
    exits, watch = {}, _Watch(folder)
    while True:
        events = sandbox.events(_POLL_S)
        if events is None:
            return exits
        for event in events:
            if event["kind"] in ("refused", "broken"):
                raise RunFailed(event["message"])
            if event["kind"] == "node_exit":
                exits[event["node"]] = event
        watch.look()
        progress.update(watch.steps, watch.step_s, watch.last_line)
        if time.monotonic() > deadline:
            raise RunFailed(
                f"not finished after {setup.timeout_s:g} s (--timeout): {_steps_of_all(folder)}.\n"
                f"Last words of rank 0: {watch.last_line or 'none'}"
            )


def _steps_of_all(folder):
    records = failure.read_records(f"{folder}/probe")
    done = {rank: sum(line["kind"] == "step" for line in lines) for rank, lines in sorted(records.items())}
    return ", ".join(f"rank {rank} made {n} steps" for rank, n in done.items()) or "no rank came up"


class _Watch:
    """Rank 0's steps and its last line of output, as they appear."""

    def __init__(self, folder):
        self._folder = folder
        self._file = None
        self._t_out = None
        self.steps, self.step_s, self.last_line = 0, None, ""

    def look(self):
        if self._file is None:
            found = glob.glob(f"{self._folder}/probe/rank0.*.jsonl")
            if not found:
                return
            self._file = open(found[0], "rb")
        while True:
            at = self._file.tell()
            line = self._file.readline()
            if not line.endswith(b"\n"):
                self._file.seek(at)
                break
            self._step(json.loads(line))
        log = failure.rank_log(f"{self._folder}/logs", 0, 0, "stdout")
        self.last_line = failure.tail(log, 1) if log else ""

    def _step(self, record):
        if record["kind"] != "step" or record["optimizer"] != 0:
            return
        if self._t_out is not None:
            self.step_s = record["t_in"] - self._t_out
        self.steps, self._t_out = record["step"], record["t_out"]
