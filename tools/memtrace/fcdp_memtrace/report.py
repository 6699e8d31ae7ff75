"""fcdp-memtrace report: the sums of a trace."""

from __future__ import annotations

import argparse
import json
import statistics
import sys

from fcdp_memtrace import _trace
from fcdp_memtrace.arguments import at_least
from fcdp_memtrace.replace import replacing
from fcdp_memtrace.trace_file import TraceFile, add_file
from fcdp_memtrace.units import human, ms, table

ABOUT = """\
Say what a recorded job moved, and what it waited for.

Bytes and counts are of all ranks together, unless they are given per node. Times of a step or region: "moved" is how
long the streams were at gathers, restores, loads and stores; "exposed" is how long the program or its compute stream
waited for them or for device memory; "hidden" is the rest of moved. The waits below name the option that would shorten them.

--html writes it as one page, to open in a browser or send to others, with a timeline of each rank to zoom into:
where regions were, what crossed the links, and when the program waited.
"""
STEPS, REGIONS = 10, 15
COMPARE_NONE = 2**32 - 1  # no step is to be compared: MEMTRACE_COMPARE_NONE


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_file(parser)
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="everything as JSON, on one line")
    form.add_argument(
        "--html",
        metavar="OUT.html",
        help="write a page that a browser shows, with a timeline, all steps and all regions",
    )
    parser.add_argument(
        "--steps", type=at_least(0), default=STEPS, metavar="N", help=f"rows of steps: the last N (default {STEPS})"
    )
    parser.add_argument(
        "--regions",
        type=at_least(0),
        default=REGIONS,
        metavar="N",
        help=f"rows of regions: those that moved most (default {REGIONS})",
    )


def totals(processes: list[dict]) -> dict[str, int]:
    """The sums of all processes' counters. Of a node's sums, which each of its ranks counts for the whole node: those of
    one node, the most of any rank. Processes that have a rank one after the other are added."""
    kinds = {name: what for _, _, name, _, what, _ in _trace.tables()["counters"]}
    out: dict[str, int] = {}
    of_ranks: dict[str, dict[int, int]] = {}
    for process in processes:
        for name, value in process["counters"].items():
            if kinds.get(name) == "sum":
                out[name] = out.get(name, 0) + value
            elif kinds.get(name) == "node sum":
                by_rank = of_ranks.setdefault(name, {})
                by_rank[process["rank"]] = by_rank.get(process["rank"], 0) + value
    return out | {name: max(by_rank.values()) for name, by_rank in of_ranks.items()}


def document(file: TraceFile, first_compared: int = COMPARE_NONE) -> dict:
    """The report as one JSON document. Its counters are fcdp.stats()'s: per process, and their totals."""
    report = _trace.report(file.handle, first_compared)
    counters = totals(file.processes)
    return {"path": file.path, "file": file.summary, "processes": file.processes, "counters": counters, **report}


def plural(n: int, word: str) -> str:
    return f"{n} {word}{'' if n == 1 else 'es' if word.endswith('s') else 's'}"


def _head(report: dict) -> list[str]:
    file, processes = report["file"], report["processes"]
    command = next((p["command"] for p in processes if p["command"]), "")
    lines = [
        f"{report['path']}: {plural(len(processes), 'process')}, {plural(file['events'], 'event')}, "
        f"{human(file['bytes'])}"
    ]
    if command:
        lines.append(f"{command}  ({processes[0]['host']}, {processes[0]['device']})")
    rows = [
        [
            p["label"],
            str(p["pid"]),
            f"{p['node']}/{p['n_nodes']}" if p["n_nodes"] else "-",
            str(p["step"]),
            f"{(p['last_ns'] - p['first_ns']) / 1e9:.1f} s",
            str(p["events"]),
            str(p["lost"]),
            human(max(peak, p["counters"].get("device.peak_bytes", 0))),
            p["end"],
        ]
        for p, peak in zip(processes, report["peaks"])
    ]
    head = ["process", "pid", "node", "steps", "recorded", "events", "lost", "device peak", "end"]
    return [*lines, "", table(head, rows)]


def _disks(c: dict) -> list[str]:
    """A line for each directory that the job has used."""
    lines = []
    written, read = c.get("spill.written_bytes", 0), c.get("spill.read_bytes", 0)
    lost = c.get("spill.failures", 0)
    if written or read or lost:
        lines.append(
            f"FCDP_SPILL_DIR  {human(written)} written, {human(read)} read, {ms(c.get('spill.wait_ns', 0))} of waits for it"
            + (f"; {plural(lost, 'slice')} lost and gathered again" if lost else "")
        )
    written, read = c.get("cache.written_bytes", 0), c.get("cache.read_bytes", 0)
    lost = c.get("cache.failures", 0)
    if written or read or lost:
        lines.append(
            f"FCDP_CACHE_DIR  {human(read)} of frozen parameters read, {human(written)} written"
            + (f"; {plural(lost, 'slice')} not written, or damaged" if lost else "")
        )
    return lines


def _traffic(report: dict) -> list[str]:
    """From the counters, which are exact even if events were lost."""
    c = report["counters"]
    gathered = c.get("collectives.gather.inter_bytes_sent", 0)
    plain, sent = c.get("saved.plain_bytes", 0), c.get("saved.gather_bytes", 0)
    n_uses = c.get("gathers.made", 0) + c.get("gathers.avoided", 0)
    lines = [
        f"between nodes   {human(gathered)} sent by {c.get('gathers.made', 0)} gathers; "
        f"{c.get('gathers.avoided', 0)} of {n_uses} unshards crossed no nodes",
        f"within nodes    {human(c.get('collectives.gather.intra_bytes_sent', 0))} by gathers, "
        f"{human(c.get('collectives.restore.intra_bytes_sent', 0))} by restores",
        f"host memory     {human(c.get('moves.d2h_bytes', 0))} stored, {human(c.get('moves.h2d_bytes', 0))} loaded, "
        f"{plural(c.get('moves.evictions', 0), 'eviction')}",
        *_disks(c),
    ]
    others = {
        "reduce-scatters": c.get("collectives.reduce_scatter.inter_bytes_sent", 0),
        "gathers of FSDP2's own": c.get("collectives.plain_gather.inter_bytes_sent", 0),
        "agreements": c.get("collectives.agree.inter_bytes_sent", 0),
    }
    beside = ", ".join(f"{human(value)} by {name}" for name, value in others.items() if value)
    if beside:
        total = human(gathered + sum(others.values()))
        lines.insert(1, f"                beside that {beside}: {total} in all")
    if plain:
        lines.insert(
            1,
            f"                plain FSDP2 would have sent {human(plain)} per node in place of {human(sent)}: "
            f"{100 * (1 - sent / plain):.0f} % saved",
        )
    return lines


def _sums_cells(sums: dict) -> list[str]:
    return [
        human(sums["inter_bytes"]),
        human(sums["intra_bytes"]),
        human(sums["d2h_bytes"]),
        human(sums["h2d_bytes"]),
        str(sums["made"]),
        str(sums["hits"]),
        ms(sums["moved_ns"]),
        ms(sums["hidden_ns"]),
        ms(sums["exposed_ns"]),
    ]


SUMS_HEAD = ["between", "within", "stored", "loaded", "gathers", "hits", "moved", "hidden", "exposed"]


def _steps(report: dict, n: int) -> list[str]:
    steps = report["steps"]
    shown = steps[-n:] if n else []
    rows = [
        [str(s["step"]), ms(s["span_ns"] / s["timed"]) if s["timed"] else "-", *_sums_cells(s["sums"])] for s in shown
    ]
    more = (
        f" (the last {len(shown)} of {len(steps)}; --steps {len(steps)} shows all)" if len(shown) < len(steps) else ""
    )
    return [f"Steps{more}:", table(["step", "took", *SUMS_HEAD], rows)]


def _regions(report: dict, n: int) -> list[str]:
    regions = sorted(
        report["regions"],
        key=lambda r: (-r["sums"]["exposed_ns"], -sum(r["sums"][k] for k in ("inter_bytes", "h2d_bytes", "d2h_bytes"))),
    )
    rows = [[r["name"] or "-", human(r["bytes"]), *_sums_cells(r["sums"])] for r in regions[:n]]
    more = f" ({n} of {len(regions)}; --regions {len(regions)} shows all)" if n < len(regions) else ""
    causes: dict[str, int] = {}
    for region in regions:
        for cause, count in region["causes"].items():
            causes[cause] = causes.get(cause, 0) + count
    said = ", ".join(f"{cause} {count}" for cause, count in sorted(causes.items(), key=lambda item: -item[1]))
    return [
        f"Regions, by what waited for them{more}:",
        table(["region", "bytes", *SUMS_HEAD], rows),
        *([f"Why copies became stale, or were evicted: {said}"] if said else []),
    ]


def grouped(stalls: list[dict]) -> list[dict]:
    """The waits that one change would shorten, together: [{reason, option, advice, duration_ns, stalls}], by their sum."""
    groups: dict[str, dict] = {}
    for stall in stalls:
        group = groups.setdefault(
            stall["reason"], {k: stall[k] for k in ("reason", "option", "advice")} | {"duration_ns": 0, "stalls": []}
        )
        group["duration_ns"] += stall["duration_ns"]
        group["stalls"].append(stall)
    return sorted(groups.values(), key=lambda group: -group["duration_ns"])


def stall_cells(stall: dict) -> list[str]:
    """As WAITS_HEAD says."""
    move = stall["move"]
    return [
        ms(stall["duration_ns"]),
        stall["process"],
        f"step {stall['step']}{', backward' if stall['backward'] else ''}",
        stall["region"] or "-",
        "the compute stream" if stall["kind"] == "stall" else f"the host ({stall['cause']})",
        f"{move['kind']} of {human(move['bytes'])}, {ms(move['duration_ns'])}" if move else "-",
    ]


WAITS_HEAD = ["wait", "process", "when", "region", "what waited", "what it waited for"]


def _cause(group: dict) -> list[str]:
    stalls = group["stalls"]
    lines = [f"{ms(group['duration_ns'])} in {plural(len(stalls), 'wait')}: {group['reason']}"]
    if group["advice"]:
        lines.append(f"  {group['option'] + ': ' if group['option'] else ''}{group['advice']}")
    cells = [stall_cells(stall) for stall in stalls]
    cells = [[row[0].rjust(max(len(other[0]) for other in cells)), *row[1:]] for row in cells]
    return lines + ["    " + line for line in table(WAITS_HEAD, cells, len(WAITS_HEAD)).splitlines()[1:]]


def _waits(report: dict) -> list[str]:
    lines = []
    by_cause = report["host_wait_ns"]
    total = report["total"]
    if total["stall_ns"]:
        lines.append(f"compute streams waited {ms(total['stall_ns'])}")
    for cause, ns in sorted(by_cause.items(), key=lambda item: -item[1]):
        lines.append(f"the host waited {ms(ns)} for {cause}, {plural(report['host_waits'][cause], 'time')}")
    if not report["stalls"]:
        return [*lines, "No wait was recorded."]
    lines.append(f"The {len(report['stalls'])} longest waits, by cause:")
    for group in grouped(report["stalls"]):
        lines += ["", *_cause(group)]
    return lines


def text(report: dict, steps: int = STEPS, regions: int = REGIONS) -> str:
    timed = [s["span_ns"] / s["timed"] for s in report["steps"] if s["timed"]]
    median = [f"a step took {ms(statistics.median(timed))} (median of {len(timed)})"] if timed else []
    parts = [_head(report), [*_traffic(report), *median]]
    if report["steps"]:
        parts.append(_steps(report, steps))
    if report["regions"]:
        parts.append(_regions(report, regions))
    parts.append(_waits(report))
    return "\n\n".join("\n".join(part) for part in parts)


def run(args: argparse.Namespace) -> int:
    file = TraceFile(args.file)
    report = document(file)
    if args.html:
        from fcdp_memtrace import page

        with replacing(args.html, args.file) as part:
            page.write(report, file, part)
        print(f"{args.html}: open it in a browser", file=sys.stderr)
    else:
        print(json.dumps(report) if args.json else text(report, args.steps, args.regions))
    return file.warn()
