"""A report as one HTML page, with nothing outside of it: page.html, its tables, and the timeline's data as JSON."""

from __future__ import annotations

import html
import importlib.resources
import json
import statistics

from fcdp_memtrace import _trace, report
from fcdp_memtrace.plot import OWNERS, TIERS, budget_of, changes, held_of, links_of, title_of
from fcdp_memtrace.trace_file import TraceFile
from fcdp_memtrace.units import human, ms

COLUMNS = 8192  # of time: a zoom shows no less than this part of the whole
MAX_PROCESSES = 16  # whose timelines are in the page


def _runs(values, form=lambda value: value) -> list:
    """[column, value, column, value, ...]: the columns in which the value changes."""
    return [part for i in changes(values) for part in (i, form(values[i]))]


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")


def timeline(file: TraceFile, index: int) -> dict:
    """The data of one process that page.html draws. Times are seconds since its first event."""
    series = _trace.series(file.handle, index, COLUMNS)
    process, labels = file.processes[index], [process["label"] for process in file.processes]
    seconds = max((series["last_ns"] - series["first_ns"]) / 1e9, 1e-9)
    links, marks = links_of(series, seconds)
    per_column = seconds * 1e9 / COLUMNS
    waited = [min(ns / per_column, 1) for ns in memoryview(series["waited"]).cast("d")]
    return {
        "index": index,
        "label": process["label"] + (f" (pid {process['pid']})" if labels.count(process["label"]) > 1 else ""),
        "title": title_of(process),
        "first_ns": series["first_ns"],
        "seconds": seconds,
        "columns": COLUMNS,
        "steps": [(at - series["first_ns"]) / 1e9 for at in series["steps_ns"]],
        "regions": [
            {"name": row["name"], "bytes": row["bytes"], "runs": _runs(row["tiers"])}
            for row in series["rows"]
            if row["name"]
        ],
        "links": [
            {"name": name, "runs": _runs([_rounded(v) for v in rates]), "marks": marks[name]}
            for name, rates in links.items()
        ],
        "waits": _runs([round(share, 3) for share in waited]),
        "owners": [
            {"name": name, "colour": colour, "runs": _runs(held)}
            for (name, colour), held in zip(OWNERS.items(), held_of(series))
            if any(held)
        ],
        "budget": budget_of(process),
    }


def _table(head: list[str], rows: list[list[str]], left: int = 1, attributes: list[str] | None = None) -> str:
    """The first `left` columns are texts, the others numbers. `attributes` are those of the rows."""

    def line(cells: list[str], tag: str) -> str:
        return "".join(
            f"<{tag}{'' if i < left else ' class=n'}>{html.escape(cell)}</{tag}>" for i, cell in enumerate(cells)
        )

    body = "".join(f"<tr{of}>{line(row, 'td')}</tr>" for of, row in zip(attributes or [""] * len(rows), rows))
    return f"<div class=scroll><table><thead><tr>{line(head, 'th')}</tr></thead><tbody>{body}</tbody></table></div>"


def _cards(document: dict) -> str:
    counters, total, steps = document["counters"], document["total"], document["steps"]
    timed = [step["span_ns"] / step["timed"] for step in steps if step["timed"]]
    plain, sent = counters.get("saved.plain_bytes", 0), counters.get("saved.gather_bytes", 0)
    exposed = total["exposed_ns"] / total["moved_ns"] if total["moved_ns"] else 0
    peak = max(
        (
            max(peak, p["counters"].get("device.peak_bytes", 0))
            for p, peak in zip(document["processes"], document["peaks"])
        ),
        default=0,
    )
    budget = max((budget_of(p) for p in document["processes"]), default=0)
    cards = [
        ("a step", ms(statistics.median(timed)) if timed else "-", f"median of {len(timed)}"),
        ("saved between nodes", f"{100 * (1 - sent / plain):.0f} %" if plain else "-", "of what plain FSDP gathers"),
        (
            "moves hidden",
            f"{100 * max(0, 1 - exposed):.0f} %" if total["moved_ns"] else "-",
            f"streams moved for {ms(total['moved_ns'])}, waits took {ms(total['exposed_ns'])}",
        ),
        (
            "evictions",
            str(total["evictions"]),
            f"{human(total['h2d_bytes'])} loaded, {human(total['d2h_bytes'])} stored",
        ),
        ("device peak", human(peak), f"budget {human(budget)}" if budget else "the budget is not known"),
    ]
    return "".join(
        f"<div class=card><b>{html.escape(value)}</b><span>{html.escape(name)}</span><i>{html.escape(note)}</i></div>"
        for name, value, note in cards
    )


def _waits(document: dict) -> str:
    total = document["total"]
    says = {name: text for _, _, name, text in _trace.tables()["causes"]}
    n_stalls = document["kinds"].get("stall", 0)
    rows = (
        [["the compute stream", "until the region was ready", ms(total["stall_ns"]), str(n_stalls)]] if n_stalls else []
    )
    for cause, ns in sorted(document["host_wait_ns"].items(), key=lambda item: -item[1]):
        rows.append([f"the host ({cause})", says.get(cause, ""), ms(ns), str(document["host_waits"][cause])])
    head = ["what waited", "what for", "how long", "times"]
    return _table(head, rows, 2) if rows else "<p>No wait was recorded.</p>"


def _advice(document: dict) -> str:
    """One part per cause of the longest waits."""
    parts = []
    for group in report.grouped(document["stalls"]):
        option = f"<code>{html.escape(group['option'])}</code>: " if group["option"] else ""
        advice = f"<p class=advice>{option}{html.escape(group['advice'])}</p>" if group["advice"] else ""
        rows = [report.stall_cells(stall) for stall in group["stalls"]]
        when = [
            f" data-process={s['process_index']} data-at={s['time_ns']} data-ns={s['duration_ns']}"
            for s in group["stalls"]
        ]
        parts.append(
            f"<details open><summary><b>{ms(group['duration_ns'])}</b> in {len(rows)} of them: "
            f"{html.escape(group['reason'])}</summary>{advice}{_table(report.WAITS_HEAD, rows, len(rows[0]), when)}</details>"
        )
    return "".join(parts) or "<p>None.</p>"


def _steps(document: dict) -> str:
    rows = [
        [
            str(step["step"]),
            ms(step["span_ns"] / step["timed"]) if step["timed"] else "-",
            *report._sums_cells(step["sums"]),
        ]
        for step in document["steps"]
    ]
    return _table(["step", "took", *report.SUMS_HEAD], rows)


def _regions(document: dict) -> str:
    regions = sorted(document["regions"], key=lambda region: -region["sums"]["exposed_ns"])
    rows = [[r["name"] or "-", human(r["bytes"]), *report._sums_cells(r["sums"])] for r in regions]
    return _table(["region", "bytes", *report.SUMS_HEAD], rows)


def _notes(file: TraceFile, n_drawn: int) -> list[str]:
    notes = list(file.summary["notes"])
    lost = sum(process["lost"] for process in file.processes)
    if lost:
        notes.append(f"{lost} events were lost: sums of events lack them, counters do not.")
    if n_drawn < len(file.processes):
        notes.append(f"The timeline has {n_drawn} of {len(file.processes)} processes, the lowest ranks.")
    return notes


def write(document: dict, file: TraceFile, path: str) -> None:
    """`document` is report.document's, of `file`."""
    order = sorted(range(len(file.processes)), key=lambda i: (file.processes[i]["rank"] < 0, file.processes[i]["rank"]))
    drawn = [i for i in order if file.processes[i]["events"]][:MAX_PROCESSES]
    data = {
        "tiers": [{"name": name, "colour": TIERS[name]} for name in _trace.tiers()],
        "processes": [timeline(file, i) for i in drawn],
    }
    command = next((p["command"] for p in document["processes"] if p["command"]), "")
    parts = {
        "title": html.escape(document["path"]),
        "command": html.escape(command),
        "notes": "".join(f"<p class=note>{html.escape(note)}</p>" for note in _notes(file, len(drawn))),
        "cards": _cards(document),
        "traffic": html.escape("\n".join(report._traffic(document))),
        "waits": _waits(document),
        "advice": _advice(document),
        "steps": _steps(document),
        "regions": _regions(document),
        "data": json.dumps(data, separators=(",", ":")).replace("<", "\\u003c"),  # no name ends the script
    }
    page = importlib.resources.files("fcdp_memtrace").joinpath("page.html").read_text(encoding="utf-8")
    head, *rest = page.split("{{")
    filled = [head]
    for piece in rest:
        name, _, text = piece.partition("}}")
        filled += [parts[name], text]
    with open(path, "w", encoding="utf-8", errors="replace") as out:
        out.write("".join(filled))
