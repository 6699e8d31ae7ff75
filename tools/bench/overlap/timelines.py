"""Draws one step of a rank's streams: python tools/bench/overlap/timelines.py OUT.svg TITLE TIMELINE.json

The timeline is one that simgpu wrote for a rank of fcdp-overlap. The step goes from the end of an optimizer
to the end of the next, and is the median one of those after the first few; times are modelled. A bar begins
when its operation could run, so on the links it includes the wait for its turn.
"""

import json
import sys

import matplotlib
from matplotlib.figure import Figure

ROWS = (  # stream, what it is called here, colours of even and odd groups
    ("compute", "compute", ("#2f6fdb", "#6aa2f5")),
    ("inter 0", "between nodes 0", ("#2a9d8f", "#7cc7bd")),
    ("inter 1", "between nodes 1", ("#2a9d8f", "#7cc7bd")),
    ("node", "within the node", ("#7c5cd6", "#b3a1e8")),
    ("d2h", "to the host", ("#c2553f", "#e0998a")),
    ("h2d", "from the host", ("#c2553f", "#e0998a")),
    ("reduce-scatter", "reduce-scatter", ("#e08a2e", "#efb97e")),
)
NO_GROUP = "#6b7280"
STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "fcdp-overlap",
    "font.family": "sans-serif",
    "font.size": 9,
    "text.color": "#1f2430",
    "font.sans-serif": ["Helvetica Neue", "Helvetica", "Arial", "DejaVu Sans"],
}
N_WARM = 4  # the first of them makes the first content, before the first step
LEAST_US = 1  # what is shorter is not seen
LABEL_US = 4000  # what is longer has its group's number on it


def operations(path):
    """{stream: [(begin, duration, name), ...]} in microseconds, in order."""
    with open(path, encoding="utf-8") as file:
        events = json.load(file)
    streams = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    found = {name: [] for name, _, _ in ROWS}
    for e in events:
        args = e.get("args", {})
        if streams.get(e["tid"]) in found and args.get("modelled_us", 0) >= LEAST_US:
            found[streams[e["tid"]]].append((args["ready_us"], args["modelled_us"], e["name"]))
    return {name: sorted(rows) for name, rows in found.items()}


def step_of(rows):
    """(begin, end) of the median step."""
    ends = [begin + duration for begin, duration, name in rows["compute"] if name == "optimizer"]
    steps = sorted(zip(ends[N_WARM:], ends[N_WARM + 1 :]), key=lambda step: step[1] - step[0])
    if not steps:
        sys.exit(f"{len(ends)} optimizer steps in the timeline: more than {N_WARM + 1} are needed")
    return steps[len(steps) // 2]


def group_of(name):
    """Its number, as text; "" of what is no group's: the optimizer, and kernels that FCDP launches."""
    return name.split()[-1] if name.split()[-1].isdigit() else ""


def draw(out, title, rows):
    begin, end = step_of(rows)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(12, 2.6), layout="constrained")
        axes = figure.subplots()
        for y, (stream, _, colours) in enumerate(ROWS):
            shown = [(b, d, name) for b, d, name in rows[stream] if b + d > begin and b < end]
            colour = [colours[int(group_of(name)) % 2] if group_of(name) else NO_GROUP for _, _, name in shown]
            axes.broken_barh([((b - begin) / 1e3, d / 1e3) for b, d, _ in shown], (y - 0.38, 0.76), facecolors=colour)
            for b, d, name in shown:
                if d >= LABEL_US * (end - begin) / 250e3 and stream == "compute" and group_of(name):
                    axes.text(
                        (b - begin + d / 2) / 1e3,
                        y,
                        group_of(name),
                        ha="center",
                        va="center",
                        color="white",
                        fontsize=7,
                    )
        axes.set_yticks(range(len(ROWS)), [label for _, label, _ in ROWS])
        axes.invert_yaxis()
        axes.set_xlim(0, (end - begin) / 1e3)
        axes.set_xlabel("ms")
        axes.set_title(title, loc="left", fontsize=10)
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.tick_params(length=0)
        figure.savefig(out, format="svg", metadata={"Date": None}, facecolor="white")


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    draw(sys.argv[1], sys.argv[2], operations(sys.argv[3]))
