"""fcdp-memtrace diff: two reports side by side."""

from __future__ import annotations

import argparse
import json
import statistics

from fcdp_memtrace import report
from fcdp_memtrace.trace_file import add_file
from fcdp_memtrace.units import human, ms, table

ABOUT = """\
Compare two recorded jobs.

Per step, the median over the steps that both ends were recorded of: its time, bytes and waits, of all ranks together;
then the regions that differ most. A is the first, B the second; B/A is below 1 where B has less.
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
        type=int,
        default=1,
        metavar="N",
        help="leave the first N steps out: they are others (default 1)",
    )


def per_step(document: dict, skip: int) -> dict[str, float]:
    """Median per step; 0 where no step was recorded."""
    steps = [s for s in document["steps"] if s["timed"] and s["step"] >= skip]
    out = {"span_ns": statistics.median(s["span_ns"] / s["timed"] for s in steps) if steps else 0.0}
    for name in MEASURES:
        out[name] = statistics.median(s["sums"][name] for s in steps) if steps else 0.0
    return out | {"steps": len(steps)}


def compare(a: dict, b: dict, skip: int) -> dict:
    regions = []
    of_a, of_b = ({r["name"]: r["sums"] for r in d["regions"]} for d in (a, b))
    for name in sorted({*of_a, *of_b}):
        sides = [
            {k: side.get(name, {}).get(k, 0) / max(len(d["steps"]), 1) for k in MEASURES}
            for side, d in ((of_a, a), (of_b, b))
        ]
        regions.append({"name": name, "a": sides[0], "b": sides[1]})
    regions.sort(key=lambda r: -max(abs(r["a"][k] - r["b"][k]) for k in ("inter_bytes", "h2d_bytes", "exposed_ns")))
    return {"a": per_step(a, skip), "b": per_step(b, skip), "regions": regions}


def _ratio(a: float, b: float) -> str:
    return "=" if a == b else f"{b / a:.2f}" if a else "new"


def text(a: dict, b: dict, difference: dict) -> str:
    of_a, of_b = difference["a"], difference["b"]
    rows = [["a step took", ms(of_a["span_ns"]), ms(of_b["span_ns"]), _ratio(of_a["span_ns"], of_b["span_ns"])]]
    for name, (title, show) in MEASURES.items():
        rows.append([title, show(of_a[name]), show(of_b[name]), _ratio(of_a[name], of_b[name])])
    lines = [
        f"A: {a['path']}, {of_a['steps']} steps compared",
        f"B: {b['path']}, {of_b['steps']} steps compared",
        "",
        table(["per step, median", "A", "B", "B/A"], rows),
    ]
    if not (of_a["steps"] and of_b["steps"]):
        lines.insert(
            2, "No step was recorded from its begin to its end behind the first --skip-steps: nothing to compare."
        )
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
    a, b = report.document(args.file), report.document(args.other)
    difference = compare(a, b, args.skip_steps)
    print(json.dumps(difference) if args.json else text(a, b, difference))
    return 0
