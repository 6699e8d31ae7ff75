"""Traces for tests: recorded from processes that fill a segment as they are told (segment.py). No test here needs torch."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

HERE = pathlib.Path(__file__).resolve().parent
PYTHON = [sys.executable, "-I", "-S"]  # without site-packages: it starts in a few hundredths of a second
MILLISECOND = 1_000_000

memtrace = pytest.importorskip("fcdp_memtrace", reason="the wheel is not installed here (tools/setup.sh does it)")
from fcdp_memtrace import _trace  # noqa: E402

TABLES = _trace.tables()
KIND = {name: number for _, number, name, *_ in TABLES["events"]}
CAUSE = {name: number for _, number, name, *_ in TABLES["causes"]}
COUNTER = {name: number for _, number, name, *_ in TABLES["counters"]}
STREAM = {name: number for _, number, name, *_ in TABLES["streams"]}
IN_USE, KEPT = 2, 4  # FCDP_OBJECT_...
ON_STREAM, BACKWARD, STATE_SHIFT = 1, 2, 3
POOL = 3
GATHERED = 1 | POOL << 8  # of that pool, the holder of gathered parameters


class Script:
    """What a process writes: events whose times follow one another, counters, objects."""

    def __init__(self, rank=0, world_size=1, **segment):
        self.segment = {"rank": rank, "world_size": world_size} | segment
        self.lines = []
        self.time = 1000

    def event(self, kind, cause=None, stream=None, **fields):
        fields = {"kind": KIND[kind] if isinstance(kind, str) else kind} | fields
        if cause:
            fields["cause"] = CAUSE[cause]
        if stream:
            fields["thread"] = STREAM[stream]
            fields["flags"] = fields.get("flags", 0) | ON_STREAM
        fields.setdefault("time_ns", self.time)
        self.time = max(self.time, fields["time_ns"] + fields.get("duration_ns", 0)) + 1000
        self.lines.append(["event", fields])
        return fields

    def state(self, number, device, host, flags=0, **fields):
        return self.event("state", object=number, a=device, b=host, flags=(1 | flags) << STATE_SHIFT, **fields)

    def object(self, number, name, **fields):
        self.lines.append(["object", {"number": number, "name": name} | fields])

    def counter(self, name, value):
        self.lines.append(["counter", [COUNTER[name] if isinstance(name, str) else name, value]])

    def step(self, n):
        """Optimizer step n (from 1 on) ends."""
        self.event("step", a=n)
        self.lines.append(["header", ["step", n]])


class Process:
    """Runs a script's lines, then waits."""

    def __init__(self, script):
        self.pipe = subprocess.Popen(
            [*PYTHON, str(HERE / "segment.py")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.pid = self.pipe.pid
        self.pipe.stdin.write(json.dumps(script.segment) + "\n")
        self.pipe.stdin.flush()
        assert self.pipe.stdout.readline() == "ready\n"
        self.write(script.lines)

    def write(self, lines):
        self.pipe.stdin.write(json.dumps(lines) + "\n")
        self.pipe.stdin.flush()
        assert self.pipe.stdout.readline() == "written\n"

    def end(self):
        self.pipe.communicate("\n", timeout=60)

    def kill(self):
        self.pipe.kill()
        self.pipe.communicate(timeout=60)


def record(path, *scripts, how="end"):
    """A file with a process for each script; how they go: "end", "kill", or "stay" until it is closed."""
    processes = [Process(script) for script in scripts]
    recorder = _trace.recorder_create(str(path), [], [process.pid for process in processes], True)
    for process in processes:
        {"end": process.end, "kill": process.kill, "stay": lambda: None}[how]()
    progress = _trace.recorder_poll(recorder, 0)
    _trace.recorder_close(recorder)
    if how == "stay":
        for process in processes:
            process.end()
    return progress


def a_job(rank=0, world_size=1, steps=2, regions=2, size=1 << 20, shard_group=0):
    """A script in which every rule is kept: regions that are gathered, stored, passed on, loaded, kept, evicted."""
    s = Script(rank, world_size)
    said = dict.fromkeys(COUNTER, 0)
    half = size // 2

    def count(**added):
        for name, value in added.items():
            said[name.replace("__", ".")] += value

    s.event("pages_create", bytes=4 * size, a=POOL, b=4 * size)
    s.event("pages_take", bytes=2 * size, a=GATHERED, b=2 * size)
    for number in range(1, regions + 1):
        s.object(number, f"model.layers.{number - 1}", size=size, shard_group=shard_group)
        s.event("region_create", object=number, bytes=size)
        s.state(number, 0, 0)
    for step in range(steps):
        for number in range(1, regions + 1):
            slot = number % 2
            s.event("stale", "optimizer", object=number, bytes=half)
            s.event("use", "made", object=number, bytes=half)
            s.event("acquire", object=number, a=slot, b=size)
            s.event("fill", object=number, a=1, b=step + 1)
            s.event(
                "gather", stream="inter 0", object=number, bytes=half + 64, a=half, b=64, duration_ns=3 * MILLISECOND
            )
            s.event("stall", stream="compute", object=number, duration_ns=MILLISECOND, time_ns=s.time - MILLISECOND)
            s.state(number, size, 0, IN_USE)
            s.event("store", stream="d2h", object=number, bytes=half, duration_ns=2 * MILLISECOND)
            s.state(number, size, half, IN_USE)
            s.event("release", "passed_on", object=number, a=slot)
            s.state(number, 0, half)
            count(gathers__made=1, moves__d2h_bytes=half, stalls__count=1, stalls__ns=MILLISECOND)
            said["collectives.gather.inter_bytes_sent"] += half
            said["collectives.gather.intra_bytes_sent"] += 64
        for number in range(regions, 0, -1):
            slot = number % 2
            s.event("use", "hit", object=number, flags=BACKWARD)
            s.event("acquire", object=number, a=slot, b=size)
            s.event("load", stream="h2d", object=number, bytes=half, duration_ns=MILLISECOND, flags=BACKWARD)
            s.event(
                "restore", stream="node", object=number, bytes=half, b=half, duration_ns=MILLISECOND, flags=BACKWARD
            )
            s.state(number, size, half, IN_USE)
            s.event("release", "kept", object=number, a=slot)
            s.state(number, size, half, KEPT)
            s.event("evict", "memory_short", object=number, a=slot, bytes=size)
            s.state(number, 0, half)
            count(gathers__avoided=1, moves__h2d_bytes=half, moves__evictions=1)
            said["collectives.restore.intra_bytes_sent"] += half
        s.event("host_wait", "agreement", duration_ns=500_000)
        s.step(step + 1)
        count(steps=1)
    said |= {
        "device.created_bytes": 4 * size,
        "device.cached_bytes": 2 * size,
        "device.gathered_bytes": 2 * size,
        "device.peak_bytes": 2 * size,
        "saved.plain_bytes": 4 * steps * regions * half,
        "saved.gather_bytes": steps * regions * half,
    }
    for name, value in said.items():
        s.counter(name, value)
    s.said = said
    return s


def memtrace_run(*arguments, **kwargs):
    env = {k: v for k, v in os.environ.items() if not k.startswith("FCDP")}
    return subprocess.run(
        [sys.executable, "-m", "fcdp_memtrace", *map(str, arguments)],
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
        **kwargs,
    )
