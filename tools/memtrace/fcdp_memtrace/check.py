"""fcdp-memtrace check: are the rules kept?"""

from __future__ import annotations

import argparse
import json
import sys

from fcdp_memtrace import _trace
from fcdp_memtrace.arguments import at_least, within
from fcdp_memtrace.trace_file import TraceFile, add_file
from fcdp_memtrace.units import human, ms, size

ANY = 2**64 - 1
ABOUT = """\
Validate every state transition and every sum of a trace.

Exits with 1 on the first violation, and prints the event. With --max-...: a gate for a CI, which a job must pass. What
lost events would have said is not checked.

rules:
"""
ABOUT += "\n".join(f"  {name:10} {says}" for name, says in _trace.check_rules()) + "\n"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_file(parser)
    parser.add_argument(
        "--max-stall",
        type=within(0, 1e12, "milliseconds"),
        metavar="MS",
        help="the longest wait allowed, in milliseconds",
    )
    parser.add_argument(
        "--max-peak", type=size, metavar="BYTES", help="device memory that a process may have at once, e.g. 2GiB"
    )
    parser.add_argument(
        "--max-inter", type=size, metavar="BYTES", help="bytes that a rank may send between nodes in a step, e.g. 20M"
    )
    parser.add_argument(
        "--skip-steps",
        type=at_least(0),
        default=0,
        metavar="N",
        help="let the first N steps wait and send what they like",
    )
    parser.add_argument("--json", action="store_true", help="the result as JSON, on one line")


def _event(event: dict) -> str:
    kind = event["kind"] or f"kind {event['kind_number']}"
    of = f" of {event['region']}" if event["region"] else f" of object {event['object']}" if event["object"] else ""
    parts = [
        f"event {event['number']}: {kind}{of}",
        f"step {event['step']}",
        *([f"cause {event['cause']}"] if event["cause"] else []),
        f"at {event['time_ns']} ns",
        *([f"for {ms(event['duration_ns'])}"] if event["duration_ns"] else []),
        f"bytes {event['bytes']}, a {event['a']}, b {event['b']}, flags {event['flags']}, thread {event['thread']}",
    ]
    return ", ".join(parts)


def run(args: argparse.Namespace) -> int:
    file = TraceFile(args.file)
    stall = ANY if args.max_stall is None else min(int(args.max_stall * 1e6), ANY)
    peak = ANY if args.max_peak is None else args.max_peak
    inter = ANY if args.max_inter is None else args.max_inter
    result = _trace.check(file.handle, stall, peak, inter, args.skip_steps)
    violation = result["violation"]
    if args.json:
        print(json.dumps({**result, "file": file.summary}))
    status = max(file.warn_of_damage(), 1 if violation else 0)
    if args.json:
        return status
    if violation:
        where = f"{violation['process']}: " if violation["process"] else ""
        print(f"{args.file} breaks the rule {violation['rule']}: {violation['says']}\n  {where}{violation['text']}")
        if violation["event"]:
            print(f"  {_event(violation['event'])}")
        return status
    n_applied = sum(result["applied"].values())
    print(
        f"{args.file}: {result['events']} events, {n_applied} checks, no violation; the longest wait took "
        f"{ms(result['max_stall_ns'])}, device peak {human(result['max_peak_bytes'])}, a rank sent at most "
        f"{human(result['max_inter_bytes'])} between nodes in a step"
    )
    if result["lost"]:
        print(f"fcdp-memtrace: {args.file}: {result['lost']} events are missing and not checked", file=sys.stderr)
    return status
