"""fcdp-memtrace diff: two reports side by side."""

from __future__ import annotations

import argparse
import json
import statistics

from fcdp_memtrace import report
from fcdp_memtrace.arguments import at_least
from fcdp_memtrace.trace_file import TraceFile, add_file
from fcdp_memtrace.units import human, ms, table

ABOUT = """\
Compare two recorded jobs.

Compares the steps that all processes of a file recorded from begin to end. Prints, of all ranks together, the median
step's time, bytes and waits; then the regions that differ most, with their means over the same steps. A is the first
file, B the second; B/A is below 1 where B has less.
"""
MEASURES = {
    "inter_bytes": ("between nodes", human),
    "intra_bytes": ("within nodes", human),
    "d2h_bytes": ("stored on the host", human),
    "h2d_bytes": ("loaded from the host", human),
    "made": ("gathers between nodes", "{:.0f}".format),
    "hits": ("unshards that needed none", "{:.0f}".format),
    "moved_ns": ("streams moved", ms),
    "hidden_ns": ("of that hidden", ms),
    "exposed_ns": ("waited", ms),
}
REGIONS = 10


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_file(parser, "file", "A")
    add_file(parser, "other", "B")
    parser.add_argument("--json", action="store_true", help="as JSON, on one line")
    parser.add_argument(
        "--skip-steps",
        type=at_least(0),
        default=1,
        metavar="N",
        help="leave the first N steps out, in which a job allocates and warms up (default 1)",
    )


def per_step(document: dict) -> dict[str, float]:
    """Median per step; 0 where no step was recorded."""
    steps = [s for s in document["steps"] if s.get("compared")]
    out = {"span_ns": statistics.median(s["span_ns"] / s["timed"] for s in steps) if steps else 0.0}
    for name in MEASURES:
        out[name] = statistics.median(s["sums"][name] for s in steps) if steps else 0.0
    return out | {"steps": len(steps), "processes": len(document["processes"])}


def compare(a: dict, b: dict) -> dict:
    """Of two documents with the same first compared step."""
    both = {"a": per_step(a), "b": per_step(b)}
    regions = []
    of_a, of_b = ({r["name"]: r.get("compared", {}) for r in d["regions"]} for d in (a, b))
    for name in sorted({*of_a, *of_b}):
        sides = [
            {k: regions_of.get(name, {}).get(k, 0) / max(both[side]["steps"], 1) for k in MEASURES}
            for side, regions_of in (("a", of_a), ("b", of_b))
        ]
        regions.append({"name": name, "a": sides[0], "b": sides[1]})
    regions.sort(key=lambda r: -max(abs(r["a"][k] - r["b"][k]) for k in ("inter_bytes", "h2d_bytes", "exposed_ns")))
    return {**both, "regions": regions}


def _side(name: str, document: dict, of: dict) -> str:
    return (
        f"{name}: {document['path']}, {report.plural(of['processes'], 'process')}, "
        f"{report.plural(of['steps'], 'step')} compared"
    )


def _ratio(a: float, b: float) -> str:
    return "=" if a == b else f"{b / a:.2f}" if a else "new"


def text(a: dict, b: dict, difference: dict) -> str:
    of_a, of_b = difference["a"], difference["b"]
    rows = [["a step took", ms(of_a["span_ns"]), ms(of_b["span_ns"]), _ratio(of_a["span_ns"], of_b["span_ns"])]]
    for name, (title, show) in MEASURES.items():
        rows.append([title, show(of_a[name]), show(of_b[name]), _ratio(of_a[name], of_b[name])])
    lines = [
        _side("A", a, of_a),
        _side("B", b, of_b),
        "",
        table(["per step, median", "A", "B", "B/A"], rows),
    ]
    if of_a["processes"] != of_b["processes"]:
        lines.insert(
            2,
            f"A is of {report.plural(of_a['processes'], 'process')}, B of {of_b['processes']}: bytes, counts and waits "
            "are the sums of all of them. Record as many of both jobs to compare these.",
        )
    for name, of in (("A", of_a), ("B", of_b)):
        if not of["steps"]:
            lines.insert(2, f"{name} has no whole step behind the first --skip-steps: there is nothing to compare.")
    changed = [r for r in difference["regions"] if r["a"] != r["b"]][:REGIONS]
    if changed:
        rows = [
            [
                r["name"] or "-",
                human(r["a"]["inter_bytes"]),
                human(r["b"]["inter_bytes"]),
                human(r["a"]["h2d_bytes"]),
                human(r["b"]["h2d_bytes"]),
                ms(r["a"]["exposed_ns"]),
                ms(r["b"]["exposed_ns"]),
            ]
            for r in changed
        ]
        head = ["region, mean per step", "between A", "B", "loaded A", "B", "waited A", "B"]
        lines += ["", table(head, rows)]
    return "\n".join(lines)


def run(args: argparse.Namespace) -> int:
    files = [TraceFile(args.file), TraceFile(args.other)]
    a, b = (report.document(file, args.skip_steps) for file in files)
    difference = compare(a, b)
    print(json.dumps(difference) if args.json else text(a, b, difference))
    compared = difference["a"]["steps"] and difference["b"]["steps"]
    return max([0 if compared else 1, *[file.warn() for file in files]])
