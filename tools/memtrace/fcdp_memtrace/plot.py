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

Three parts over the same time: where each region's bytes were (regions down, colour is the tier), bytes per second over
each link, and device memory by owner. Of one process; --rank picks it.
"""
COLUMNS = 800
COLOURS = {  # of tiers; readable in grey and by the colour-blind
    "unknown": "#ffffff",
    "nowhere": "#e8e8e8",
    "file": "#c4b5d9",
    "host": "#7fb3d5",
    "kept on the device": "#f5b041",
    "in use": "#a93226",
}
LINKS = {"between nodes": "#a93226", "within the node": "#f5b041", "to the host": "#2e86c1", "to the device": "#1e8449"}
OWNERS = ["tensors", "gathered parameters", "holder 2", "holder 3"]
MAX_NAMES = 40


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_file(parser)
    parser.add_argument("-o", "--output", metavar="X.svg", required=True, help="the picture: .svg or .png")
    parser.add_argument("--rank", type=int, metavar="N", help="of this rank (default: the lowest that is there)")
    parser.add_argument("--width", type=within(4, 100, "inches"), default=11.0, metavar="INCHES", help="default 11")


def pick(file: TraceFile, rank: int | None) -> int:
    """The index of a rank's process, of the one that recorded most where a rank is there twice."""
    ranks = sorted({p["rank"] for p in file.processes if p["rank"] >= 0})
    if rank is None:
        rank = ranks[0] if ranks else -1
    found = [i for i, p in enumerate(file.processes) if p["rank"] == rank]
    if not found:
        have = ", ".join(map(str, ranks)) or "none"
        raise _trace.Error(f"{file.path} has no rank {rank}; it has {have}")
    return max(found, key=lambda i: file.processes[i]["events"])


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
        cmap=ListedColormap([COLOURS[name] for name in names]),
        norm=norm,
        extent=(0, seconds, len(rows), 0),
    )
    every = -(-len(rows) // MAX_NAMES)
    axes.set_yticks(
        [i + 0.5 for i in range(0, len(rows), every)], [rows[i]["name"] for i in range(0, len(rows), every)], fontsize=7
    )
    shown = [
        Patch(facecolor=COLOURS[n], edgecolor="#888888", label=n)
        for i, n in enumerate(names)
        if i and (data == i).any()
    ]
    axes.set_title("Where each region's bytes are", loc="left", fontsize=9)
    if shown:
        axes.legend(
            handles=shown, loc="lower right", bbox_to_anchor=(1, 1), ncols=len(shown), fontsize=7, frameon=False
        )


def _over_time(axes, title: str, series: dict[str, tuple], seconds: float, per_second: bool, stacked: bool) -> None:
    import numpy as np
    from matplotlib.ticker import FuncFormatter

    series = {name: value for name, value in series.items() if value[0].any()}
    for name, (values, colour) in series.items():
        times = np.linspace(0, seconds, len(values), endpoint=False)
        if not stacked:
            axes.step(times, values, where="post", label=name, color=colour, linewidth=1)
    if stacked and series:
        times = np.linspace(0, seconds, COLUMNS, endpoint=False)
        axes.stackplot(
            times,
            *(v for v, _ in series.values()),
            labels=list(series),
            colors=[c for _, c in series.values()],
            step="post",
        )
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: human(value) + ("/s" if per_second else "")))
    axes.tick_params(labelsize=7)
    axes.set_title(title, loc="left", fontsize=9)
    axes.set_ylim(bottom=0)
    if series:
        axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=len(series), fontsize=7, frameon=False)


def draw(file: TraceFile, index: int, path: str, width: float) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import numpy as np
    from matplotlib.figure import Figure

    series = _trace.series(file.handle, index, COLUMNS)
    seconds = max((series["last_ns"] - series["first_ns"]) / 1e9, 1e-9)
    rows = [row for row in series["rows"] if row["name"]]
    of_links, of_holders = series["columns"]
    height = min(max(len(rows), 4), 60) * 0.14 + 0.6
    figure = Figure(figsize=(width, height + 4.4), layout="constrained")
    axes = figure.subplots(3, 1, sharex=True, height_ratios=[height, 1.6, 1.6])
    if rows:
        _residency(axes[0], rows, seconds)
    links = {
        name: (np.frombuffer(data, dtype=np.float64) * COLUMNS / seconds, LINKS[name])
        for name, data in of_links.items()
    }
    _over_time(axes[1], "Bytes over each link", links, seconds, True, False)
    held = {
        name: (np.frombuffer(data, dtype=np.uint64).astype(float), colour)
        for name, data, colour in zip(OWNERS, of_holders, ["#7fb3d5", "#a93226", "#f5b041", "#1e8449"])
    }
    _over_time(axes[2], "Device memory by owner", held, seconds, False, True)
    steps = [(at - series["first_ns"]) / 1e9 for at in series["steps_ns"]]
    if len(steps) <= 100:
        for at in steps:
            for part in axes:
                part.axvline(at, color="#000000", linewidth=0.4, alpha=0.4)
    axes[2].set_xlabel("seconds; lines are optimizer steps" if steps else "seconds", fontsize=8)
    axes[0].set_xlim(0, seconds)
    process = file.processes[index]
    program, space, arguments = process["command"].partition(" ")
    command = os.path.basename(program) + space + arguments
    figure.suptitle(
        f"{process['label']} of {process['world_size'] or '?'}: {command}"[:120],
        fontsize=9,
        x=0.01,
        ha="left",
    )
    figure.savefig(path, dpi=120, metadata={"Date": None} if path.endswith(".svg") else None)


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
