"""The picture of a comparison: step time per mode, and over link rates, nodes and batch sizes."""

from __future__ import annotations

from typing import IO

import matplotlib

matplotlib.use("Agg")
from matplotlib.figure import Figure

COLOURS = {
    "FSDP2": "#6b7280",
    "FSDP2 keep": "#9aa3b2",
    "FSDP2 hpZ": "#e08a2e",
    "HSDP": "#c2553f",
    "HFSDP": "#5f8f7b",
    "ZeRO-Offload": "#8d7b63",
    "FCDP": "#2f6fdb",
    "FCDP whole": "#6aa2f5",
    "FCDP device": "#7c5cd6",
    "FCDP file": "#2a9d8f",
}
STYLE = {"svg.fonttype": "none", "svg.hashsalt": "fcdp-plan", "font.size": 9}
PANELS = {
    "link": ("Step time over link rates", "seconds"),
    "nodes": ("Step time over nodes", "seconds"),
    "batch": ("Throughput over batches per GPU", "samples per second"),
}


def _bars(axes, found: dict) -> None:
    names = list(found)
    for i, name in enumerate(names):
        one = found[name]
        time = one["step"]["seconds"]
        axes.barh(i, time, color=COLOURS[name], alpha=1 if one["memory"]["fits"] else 0.3)
        axes.text(
            time, i, f" {time:.3g} s" + ("" if one["memory"]["fits"] else ", does not fit"), va="center", fontsize=8
        )
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.35 * max(one["step"]["seconds"] for one in found.values()))
    axes.set_title("Step time", loc="left", fontweight="bold")


def _lines(axes, axis: str, points: list[dict]) -> None:
    """A mode's line is thin where the job does not fit."""
    names = list(dict.fromkeys(name for point in points for name in point["modes"]))
    for name in names:
        at = [i for i, point in enumerate(points) if name in point["modes"]]
        of = [points[i]["modes"][name] for i in at]
        values = [one["samples_per_second"] if axis == "batch" else one["step"]["seconds"] for one in of]
        axes.plot(at, values, color=COLOURS[name], linewidth=0.6, alpha=0.6)
        fits = [value if one["memory"]["fits"] else float("nan") for value, one in zip(values, of)]
        axes.plot(at, fits, color=COLOURS[name], linewidth=1.8, marker="o", markersize=2.5)
    axes.set_yscale("log")
    axes.set_xticks(range(len(points)), [str(point["at"]).removesuffix("bit") for point in points], fontsize=8)
    axes.set_ylabel(PANELS[axis][1])
    axes.set_title(PANELS[axis][0], loc="left", fontweight="bold")
    axes.grid(True, axis="y", color="#e5e7eb", linewidth=0.8)


def draw(title: str, found: dict, swept: dict[str, list[dict]], out: IO[str]) -> None:
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(11.5, 7.4), layout="constrained")
        panels = figure.subplots(2, 2).flatten()
        _bars(panels[0], found)
        for axes, (axis, points) in zip(panels[1:], swept.items()):
            _lines(axes, axis, points)
        for axes in panels:
            axes.spines[["top", "right"]].set_visible(False)
        figure.suptitle(f"{title}: thick lines fit", fontsize=10, x=0.01, ha="left")
        figure.savefig(out, format="svg", metadata={"Date": None})
