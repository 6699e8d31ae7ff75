"""fcdp-memtrace plot: a trace as a picture."""

from __future__ import annotations

import argparse
import os
import sys

from fcdp_memtrace import _trace
from fcdp_memtrace.arguments import within
from fcdp_memtrace.replace import replacing
from fcdp_memtrace.trace_file import TraceFile, add_file
from fcdp_memtrace.units import human

ABOUT = """\
Draw a trace as an SVG or PNG picture.

Over the same time: where each region's bytes were (regions down, colour is the tier), bytes per second over each link
that was used, and device memory by owner below its budget. The picture is of one process; --rank picks it. An event
without a duration has no rate and is drawn as a mark.
"""
COLUMNS = 800
TIERS = {  # readable in grey and by the colour-blind
    "unknown": "#ffffff",
    "nowhere": "#e8e8e8",
    "file": "#c4b5d9",
    "host": "#7fb3d5",
    "mapped": "#2e6f9e",
    "kept on the device": "#f5b041",
    "in use": "#a93226",
}
# No colour of a tier: one colour means one thing in all of a picture.
LINK = "#4a4a4a"
OWNERS = {"tensors": "#b9b9b9", "gathered parameters": "#5f8f7b", "holder 2": "#8d7b63", "holder 3": "#d0c3ad"}
MAX_NAMES = 40
SHOWN_BUDGET = 2.5  # times what was held at most: a line farther up would flatten the rest


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_file(parser)
    parser.add_argument("-o", "--output", metavar="X.svg", required=True, help="the picture: .svg or .png")
    parser.add_argument("--rank", type=int, metavar="N", help="of this rank (default: the lowest that is there)")
    parser.add_argument("--width", type=within(4, 100, "inches"), default=11.0, metavar="INCHES", help="default 11")


def pick(file: TraceFile, rank: int | None) -> int:
    """The index of a rank's process. If a rank has several, that of the one that recorded most."""
    ranks = sorted({p["rank"] for p in file.processes if p["rank"] >= 0})
    if rank is None:
        rank = ranks[0] if ranks else -1
    found = [i for i, p in enumerate(file.processes) if p["rank"] == rank]
    if not found:
        have = ", ".join(map(str, ranks)) or "none"
        raise _trace.Error(f"{file.path} has no rank {rank}; it has {have}")
    return max(found, key=lambda i: file.processes[i]["events"])


def _legend(axes, handles=None) -> None:
    handles = axes.get_legend_handles_labels()[0] if handles is None else handles
    if handles:
        axes.legend(
            handles=handles,
            loc="lower right",
            bbox_to_anchor=(1, 1),
            ncols=len(handles),
            fontsize=7,
            frameon=False,
            borderaxespad=0.2,
        )


def _residency(axes, rows: list[dict], seconds: float) -> None:
    import numpy as np
    from matplotlib.colors import BoundaryNorm, ListedColormap
    from matplotlib.patches import Patch

    names = _trace.tiers()
    data = np.array([list(row["tiers"]) for row in rows], dtype=np.uint8).reshape(len(rows), -1)
    norm = BoundaryNorm([i - 0.5 for i in range(len(names) + 1)], len(names))
    axes.imshow(
        data,
        aspect="auto",
        interpolation="nearest",
        cmap=ListedColormap([TIERS[name] for name in names]),
        norm=norm,
        extent=(0, seconds, len(rows), 0),
    )
    every = -(-len(rows) // MAX_NAMES)
    axes.set_yticks(
        [i + 0.5 for i in range(0, len(rows), every)], [rows[i]["name"] for i in range(0, len(rows), every)], fontsize=7
    )
    shown = [
        Patch(facecolor=TIERS[n], edgecolor="#888888", label=n) for i, n in enumerate(names) if i and (data == i).any()
    ]
    axes.set_title("Where each region's bytes are", loc="left", fontsize=9)
    _legend(axes, shown)


def changes(values) -> list[int]:
    """The columns in which the value changes: a picture needs no others."""
    return [i for i in range(len(values)) if i == 0 or values[i] != values[i - 1]]


def _steps_of(values, seconds: float) -> tuple[list[float], list[float]]:
    """Points of a line in steps, one per change, and the end."""
    at = changes(values)
    return [i * seconds / len(values) for i in at] + [seconds], [float(values[i]) for i in [*at, at[-1]]]


def _axis_of_bytes(axes, suffix: str = "") -> None:
    from matplotlib.ticker import FuncFormatter

    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: human(value) + suffix))
    axes.tick_params(labelsize=7)


def _link(axes, name: str, rates, marks: list[tuple[float, str]], seconds: float) -> None:
    """One strip per link, each on a scale of its own, so that none hides another."""
    axes.fill_between(*_steps_of(rates, seconds), step="post", color=LINK, linewidth=0)
    _axis_of_bytes(axes, "/s")
    most = max(rates, default=0)
    if most:
        axes.set_ylim(0, 1.25 * most)
        axes.locator_params(axis="y", nbins=2)
    else:
        axes.set_ylim(0, 1)
        axes.set_yticks([])
    axes.set_title(name, loc="left", fontsize=8, pad=2)
    for kind in sorted({kind for _, kind in marks}):
        at = [time for time, of in marks if of == kind]
        shape = "v" if kind == "reduce_scatter" else "d"
        label = f"{kind}: when, not how long"
        transform = axes.get_xaxis_transform()
        axes.plot(
            at,
            [0.86] * len(at),
            shape,
            color=LINK,
            markerfacecolor="white",
            markersize=4,
            markeredgewidth=0.7,
            transform=transform,
            label=label,
            clip_on=False,
        )
    _legend(axes)


def _memory(axes, held: dict, budget: int, seconds: float) -> None:
    """Owners above each other, below the budget."""
    held = {name: values for name, values in held.items() if any(values)}
    at = sorted({i for values in held.values() for i in changes(values)} | {0})
    floor = [0.0] * (len(at) + 1)
    columns = max(map(len, held.values()), default=1)
    times = [i * seconds / columns for i in at] + [seconds]
    for name, values in held.items():
        ceiling = [low + float(values[i]) for low, i in zip(floor, [*at, at[-1]])]
        axes.fill_between(times, floor, ceiling, step="post", color=OWNERS[name], linewidth=0, label=name)
        floor = ceiling
    title = "Device memory by owner"
    if budget and budget <= SHOWN_BUDGET * max(floor):
        axes.axhline(budget, color="#000000", linewidth=1, linestyle=(0, (5, 2)), label=f"budget, {human(budget)}")
    elif budget:
        title += f"; the budget is {human(budget)}"
    _axis_of_bytes(axes)
    axes.set_title(title, loc="left", fontsize=9)
    axes.set_ylim(0, 1.12 * max([*floor, budget if budget <= SHOWN_BUDGET * max(floor) else 0]) or 1)
    _legend(axes)


def budget_of(process: dict) -> int:
    """In bytes; 0: it is not known."""
    return process["counters"].get("device.budget_bytes", 0) or process["device_budget_bytes"]


def title_of(process: dict) -> str:
    program, space, arguments = process["command"].partition(" ")
    return f"{process['label']} of {process['world_size'] or '?'}: {os.path.basename(program)}{space}{arguments}"


def draw(file: TraceFile, index: int, path: str, width: float) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    series = _trace.series(file.handle, index, COLUMNS)
    seconds = max((series["last_ns"] - series["first_ns"]) / 1e9, 1e-9)
    rows = [row for row in series["rows"] if row["name"]]
    links, marks = links_of(series, seconds)
    height = min(max(len(rows), 4), 60) * 0.14 + 0.6
    heights = [height, *[0.45] * len(links), 1.2]
    # texts as texts, and ids that do not differ from one drawing to the next: smaller, and as easy to compare
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "fcdp-memtrace"}):
        figure = Figure(figsize=(width, sum(heights) + 1.3 + 0.1 * len(links)), layout="constrained")
        axes = list(figure.subplots(len(heights), 1, sharex=True, height_ratios=heights))
        if rows:
            _residency(axes[0], rows, seconds)
        for part, (name, rates) in zip(axes[1:], links.items()):
            _link(part, name, rates, marks[name], seconds)
        process = file.processes[index]
        _memory(axes[-1], dict(zip(OWNERS, held_of(series))), budget_of(process), seconds)
        steps = [(at - series["first_ns"]) / 1e9 for at in series["steps_ns"]]
        if len(steps) <= 100:
            for at in steps:
                for part in axes:
                    part.axvline(at, color="#000000", linewidth=0.4, alpha=0.4)
        axes[-1].set_xlabel("seconds; thin lines are optimizer steps" if steps else "seconds", fontsize=8)
        axes[-1].set_xlim(0, seconds)
        figure.suptitle(title_of(process)[:120], fontsize=9, x=0.01, ha="left")
        figure.savefig(path, dpi=120, metadata={"Date": None} if path.endswith(".svg") else None)


def links_of(series: dict, seconds: float) -> tuple[dict, dict[str, list]]:
    """For each link that was used: bytes per second in each column, and (second, kind) of events without a rate."""
    columns, _ = series["columns"]
    marks: dict[str, list] = {name: [] for name in columns}
    for time_ns, kind, link, _ in series["marks"]:
        marks[link].append(((time_ns - series["first_ns"]) / 1e9, kind))
    rates = {
        name: [value * len(data) / 8 / seconds for value in memoryview(data).cast("d")]
        for name, data in columns.items()
    }
    return {name: values for name, values in rates.items() if any(values) or marks[name]}, marks


def held_of(series: dict) -> list[list[int]]:
    """Of each holder: bytes in each column."""
    return [list(memoryview(data).cast("Q")) for data in series["columns"][1]]


def run(args: argparse.Namespace) -> int:
    if not args.output.endswith((".svg", ".png")):
        print(
            f"fcdp-memtrace plot: error: {args.output}: the picture's name must end with .svg or .png", file=sys.stderr
        )
        return 2
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise _trace.Error("plot needs matplotlib: pip install matplotlib") from None
    file = TraceFile(args.file)
    with replacing(args.output, args.file) as part:
        draw(file, pick(file, args.rank), part, args.width)
    return file.warn()
