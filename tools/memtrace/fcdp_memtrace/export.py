"""fcdp-memtrace export: a trace for Perfetto."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from typing import TextIO

from fcdp_memtrace import _trace
from fcdp_memtrace.replace import replacing
from fcdp_memtrace.trace_file import TraceFile, add_file

ABOUT = """\
Convert a trace for other viewers.

--chrome writes Chrome's JSON, which ui.perfetto.dev and chrome://tracing open: a process per rank; in it the steps, a
track per thread, stream and region, counters for each link's rate and the device memory, and arrows from what brought
a region's bytes to the use that waited for them. The clock is that of PyTorch's profiler, whose traces
(export_chrome_trace) --beside puts into the same file.
"""
# Kineto counts from the last multiple of three average Gregorian months since 1970, so that traces of a job's ranks
# fit together.
PERIOD_NS = 7889238 * 10**9


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_file(parser)
    parser.add_argument("--chrome", action="store_true", help="as Chrome's JSON: the default, and the only format")
    parser.add_argument("-o", "--output", metavar="OUT", help="the file to write; - is stdout (default: FILE.json)")
    parser.add_argument(
        "--beside",
        metavar="PROFILE",
        action="append",
        default=[],
        help="a JSON trace of PyTorch's profiler to put beside; again for more",
    )


def profile_events(path: str, base_ns: int) -> list[dict]:
    """A profile's events, in times from base_ns on."""
    try:
        with open(path, encoding="utf-8") as stream:
            profile = json.load(stream)
        events = profile["traceEvents"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _trace.Error(f"{path} is no JSON trace of PyTorch's profiler: {error}") from None
    shift = (profile.get("baseTimeNanoseconds", 0) - base_ns) / 1e3
    return [event | {"ts": event["ts"] + shift} if "ts" in event else event for event in events]


@contextlib.contextmanager
def output(path: str, *inputs: str) -> Iterator[TextIO]:
    """A seekable stream. Its content becomes `path`, or goes to stdout, once it is complete."""
    if path != "-":
        with replacing(path, *inputs) as part, open(part, "w+", encoding="utf-8") as stream:
            yield stream
        return
    with tempfile.TemporaryFile("w+", encoding="utf-8") as stream:
        try:
            yield stream
            stream.flush()
        except OSError as error:
            folder = tempfile.gettempdir()
            raise _trace.Error(
                f"cannot write a file in {folder}: {error.strerror}; TMPDIR names another folder"
            ) from None
        stream.buffer.seek(0)
        shutil.copyfileobj(stream.buffer, sys.stdout.buffer)


def write(file: TraceFile, path: str, beside: list[str]) -> int:
    """Returns the number of events written."""
    start = next((p["start_real_ns"] for p in file.processes if p["start_real_ns"]), 0)
    base_ns = start - start % PERIOD_NS
    more = [event for profile in beside for event in profile_events(profile, base_ns)]
    with output(path, file.path, *beside) as stream:
        try:
            n = _trace.chrome_write(file.handle, stream.fileno(), base_ns, json.dumps)
        except _trace.Error as error:  # it reports what it cannot write, and nothing else
            where = path if path != "-" else f"a file in {tempfile.gettempdir()}; TMPDIR names another folder"
            raise _trace.Error(f"{error} ({where})") from None
        if more:
            stream.seek(0, os.SEEK_END)
            stream.seek(stream.tell() - len("\n]}\n"))
            stream.write("".join(f",\n{json.dumps(event)}" for event in more) + "\n]}\n")
    return n + len(more)


def run(args: argparse.Namespace) -> int:
    file = TraceFile(args.file)
    path = args.output or f"{args.file}.json"
    n = write(file, path, args.beside)
    status = file.warn()
    name = "stdout" if path == "-" else path
    print(f"{name}: {n} events; open it in ui.perfetto.dev or chrome://tracing", file=sys.stderr)
    return status
