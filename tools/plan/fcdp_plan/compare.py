"""fcdp-plan compare: the modes side by side."""

from __future__ import annotations

import argparse
import html
import io
import json

from fcdp_memtrace.replace import replacing
from fcdp_memtrace.units import human, ms, table
from fcdp_plan import calibration, clusters, modes, profile, shapes, splits
from fcdp_plan.failure import Error

ABOUT = """\
Compare the modes: predicted step time, whether it fits, and bytes between nodes.

The profile comes from fcdp-plan describe or fcdp-plan profile. --over repeats the comparison over link rates, numbers of
nodes or batch sizes; --svg and --html draw all three.
"""
AXES = {
    "link": ["1gbit", "10gbit", "25gbit", "50gbit", "100gbit", "200gbit", "400gbit"],
    "nodes": [2, 4, 8, 16, 32, 64, 128, 256, 512, 1024],
    "batch": [1, 2, 4, 8, 16, 32, 64],
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("profile", metavar="PROFILE", help="from fcdp-plan describe or profile")
    clusters.add_arguments(parser)
    modes.add_arguments(parser)
    parser.add_argument("--over", choices=AXES, help="step times over this, too")
    parser.add_argument("--json", action="store_true", help="everything as JSON, on one line")
    parser.add_argument("--svg", metavar="FILE", help="a picture")
    parser.add_argument("--html", metavar="FILE", help="a page with the tables and the picture")


def predict(job: dict, cluster: dict, schedule: dict) -> dict[str, dict]:
    """Of each mode: its step, its memory, and samples per second."""
    regions, found = splits.regions_of(job), {}
    measured = calibration.schedules(job, schedule)
    samples = job["batch"] * cluster["n_nodes"] * cluster["gpus_per_node"] * schedule["micro_batches"]
    for name in modes.MODES:
        if not modes.is_served(name, cluster):
            continue
        step = modes.simulate(name, job["costs"], regions, cluster, **schedule | measured.get(name, {}))
        memory = modes.memory(name, job["costs"], regions, cluster, shapes.CONSTANTS)
        found[name] = {"step": step, "memory": memory, "samples_per_second": samples / step["seconds"]}
    return found


def sweep(job: dict, description: dict, nodes: int, schedule: dict, axis: str) -> list[dict]:
    """The comparison at each point of an axis."""
    points = []
    for value in AXES[axis]:
        there = description | {"link": value} if axis == "link" else description
        at = profile.at_batch(job, value) if axis == "batch" else job
        cluster = clusters.numbers(there, value if axis == "nodes" else nodes)
        points.append({"at": value, "modes": predict(at, cluster, schedule)})
    return points


def points_table(found: dict[str, dict]) -> str:
    first = next(iter(found.values()))["step"]["seconds"]
    rows = []
    for name, one in found.items():
        step, memory = one["step"], one["memory"]
        fits = "yes" if memory["fits"] else "no: host" if memory["total"] <= memory["limit"] else "no"
        times = [seconds(step["seconds"]), f"{step['seconds'] / first:.2f}", seconds(step["compute_seconds"])]
        sent = human(step["forward_inter"] + step["backward_inter"])
        held = [human(memory["total"]), human(memory["host"])]
        rows.append([name, fits, *times, sent, *held, modes.SETTINGS[name]])
    head = ["mode", "fits", "step", "of FSDP2", "computes", "sent per node", "per GPU", "host", "  setting"]
    for row in rows:
        row[-1] = "  " + row[-1]
    widest = max(len(row[-1]) for row in rows)
    return table([*head[:-1], head[-1].ljust(widest)], [[*row[:-1], row[-1].ljust(widest)] for row in rows], left=2)


def seconds(value: float) -> str:
    return ms(value * 1e9) if value < 1 else f"{value:.3g} s" if value < 1000 else f"{value:.0f} s"


def sweep_table(axis: str, points: list[dict]) -> str:
    """Step times; (*) where the job does not fit. Over nodes: what the agreements of a step take, as well."""
    names = list(dict.fromkeys(name for point in points for name in point["modes"]))
    rows = []
    for point in points:
        cells = []
        for name in names:
            one = point["modes"].get(name)
            cells.append(seconds(one["step"]["seconds"]) + ("" if one["memory"]["fits"] else "*") if one else "-")
        if axis == "nodes":
            cells.append(ms(point["modes"]["FCDP"]["step"]["agreement_seconds"] * 1e9))
        rows.append([str(point["at"]), *cells])
    return table([axis, *names, *(["agreements"] if axis == "nodes" else [])], rows)


def title(job: dict, cluster: dict) -> str:
    parameters = sum(r["trainable"] + r["frozen"] for r in job["regions"])
    where = f"{cluster['n_nodes']:.0f} nodes x {cluster['gpus_per_node']:.0f} GPUs"
    link = f"{human(cluster['inter_rate'])}/s of payload between nodes" if cluster["inter_rate"] else "unlimited links"
    return f"{parameters / 1e9:.3g} G parameters, {job['batch']:g} sequences per GPU, {where}, {link}"


def page(heading: str, picture: str, tables: list[tuple[str, str]]) -> str:
    """One HTML page with nothing outside of it."""
    parts = "".join(f"<h2>{html.escape(name)}</h2><pre>{html.escape(text)}</pre>" for name, text in tables)
    style = "body{font:15px sans-serif;margin:2em;max-width:75em}pre{overflow:auto}svg{max-width:100%;height:auto}"
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>fcdp-plan</title><style>{style}</style>"
        f"<h1>{html.escape(heading)}</h1>{picture}{parts}<p>Predicted by fcdp-plan; nothing was measured. "
        "An asterisk marks what does not fit.</p></html>\n"
    )


def run(args: argparse.Namespace) -> int:
    job = profile.read(args.profile)
    schedule, description = modes.schedule_of(args, job), clusters.described(args, job)
    cluster = clusters.numbers(description, args.nodes)
    found = predict(job, cluster, schedule)
    drawn = args.svg or args.html
    axes = list(AXES) if drawn else [args.over] if args.over else []
    swept = {axis: sweep(job, description, args.nodes, schedule, axis) for axis in axes}
    if args.json:
        print(json.dumps({"cluster": cluster, "modes": found, "over": swept}))
    else:
        print(f"{title(job, cluster)}\n\n{points_table(found)}")
        if args.over:
            print(f"\nstep time over {args.over} (* does not fit)\n{sweep_table(args.over, swept[args.over])}")
    if not drawn:
        return 0
    try:
        from fcdp_plan import draw
    except ImportError:
        raise Error("--svg and --html need matplotlib: pip install matplotlib") from None
    picture = io.StringIO()
    draw.draw(title(job, cluster), found, swept, picture)
    svg = picture.getvalue()
    if args.svg:
        with replacing(args.svg, args.profile) as part, open(part, "w") as file:
            file.write(svg)
    if args.html:
        tables = [("Modes", points_table(found))]
        tables += [(f"Step time over {axis}", sweep_table(axis, points)) for axis, points in swept.items()]
        with replacing(args.html, args.profile) as part, open(part, "w") as file:
            file.write(page(title(job, cluster), svg[svg.index("<svg") :], tables))
    return 0
