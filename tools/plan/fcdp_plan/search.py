"""fcdp-plan search: the tier of each region."""

from __future__ import annotations

import argparse
import json

from fcdp_memtrace.replace import replacing
from fcdp_memtrace.units import human, size, table
from fcdp_plan import _plan, clusters, modes, plan_file, profile, shapes
from fcdp_plan.compare import seconds, title
from fcdp_plan.failure import Error

ABOUT = """\
Find the best tier of each region within the memory of a GPU and of a node.

Each region is kept on the device, restored by slice or whole, read from a file, or gathered again. The search is exact for
the sum of what holds up a pipeline that fetches one region ahead; where that would take too long, a bound says how far from
the best the answer can be. What is found is simulated beside the fixed settings, and so is what another GB and another
Gbit/s would buy. --batches finds the batch size as well. -o writes the plan to a file, which a job follows with
FCDP_PLAN=FILE.
"""
STATES = 1 << 13
UNLIMITED = 1e30


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("profile", metavar="PROFILE", help="from fcdp-plan describe or profile")
    clusters.add_arguments(parser)
    modes.add_arguments(parser)
    parser.add_argument(
        "--device-budget", type=size, metavar="SIZE", help="for kept regions; default: what the job leaves"
    )
    parser.add_argument("--batches", action="store_true", help="try other batch sizes; the most samples per second win")
    parser.add_argument("--json", action="store_true", help="the plan as JSON, on one line")
    parser.add_argument("-o", "--output", metavar="FILE", help="the plan, for FCDP_PLAN")


def left_on_device(job: dict, regions: list[dict], cluster: dict) -> float:
    """Bytes of a GPU that FCDP does not need when it keeps nothing there."""
    memory = modes.memory("FCDP", job["costs"], regions, cluster, shapes.CONSTANTS)
    return memory["limit"] - memory["total"]


def plan(job: dict, cluster: dict, schedule: dict, budget: float) -> dict | None:
    """By the simulation, the best of what the search finds, the same with kept regions spaced evenly, and one tier for
    all; None: nothing fits."""
    regions = profile.regions_of(job)
    host = cluster["host_memory_bytes"] or UNLIMITED
    tiers, found = _plan.search_tiers(job["costs"], regions, cluster, budget, host, STATES)
    if not found["fits"]:
        return None
    candidates = [tiers, _plan.spread_tiers(job["costs"], regions, cluster, tiers)] + [
        bytes([tier] * len(regions)) for tier in modes.TIERS
    ]
    best = None
    for candidate in candidates:
        memory = modes.memory("FCDP", job["costs"], regions, cluster, shapes.CONSTANTS, candidate)
        no_disk = _plan.IN_FILE in candidate and cluster["file_rate"] <= 0
        if memory["cache"] > budget or no_disk or (cluster["host_memory_bytes"] and memory["host"] > host):
            continue
        step = modes.simulate("FCDP", job["costs"], regions, cluster, candidate, **schedule)
        if best is None or step["seconds"] < best["step"]["seconds"]:
            best = {"tiers": list(candidate), "step": step, "memory": memory, "search": found}
    return best


def split_largest(job: dict, cluster: dict) -> tuple[str, int, float] | None:
    """What `fcdp.split()` takes from the peak: the region that decides it, in how many parts it decides it no longer (16 at
    most), and the bytes of a GPU. None: the next region is half as large at least, or the largest one stays gathered."""
    regions = profile.regions_of(job)
    sizes = [0.0 if region["stays"] else region["trainable"] + region["frozen"] for region in regions]
    largest = max(range(len(sizes)), key=lambda i: sizes[i])
    others = max([0.0, *(size for i, size in enumerate(sizes) if i != largest)])
    if not sizes[largest] or sizes[largest] < 2 * others:
        return None
    n = next((n for n in (2, 4, 8) if sizes[largest] <= n * others), 16)
    part = {key: value if key == "stays" else value / n for key, value in regions[largest].items()}
    parts = regions[:largest] + [part] * n + regions[largest + 1 :]
    whole, split = (modes.memory("FCDP", job["costs"], one, cluster, shapes.CONSTANTS) for one in (regions, parts))
    return job["regions"][largest]["name"], n, whole["total"] - split["total"]


def what_more_buys(job: dict, description: dict, args: argparse.Namespace, schedule: dict, budget: float) -> list:
    """(what, seconds of a step) with one more GB, and a faster link."""
    cluster = clusters.numbers(description, args.nodes)
    rows = []
    more = plan(job, cluster, schedule, budget + 1e9)
    if more:
        rows.append(("1 GB more on each GPU", more["step"]["seconds"]))
    if cluster["inter_rate"]:
        faster = plan(job, cluster | {"inter_rate": cluster["inter_rate"] + 1.25e8}, schedule, budget)
        if faster:
            rows.append(("1 Gbit/s more between nodes", faster["step"]["seconds"]))
    return rows


def choose(job: dict, cluster: dict, schedule: dict, args: argparse.Namespace) -> tuple[dict, dict | None, float]:
    """The job at the batch that gives most samples per second, its plan, and the budget that it has."""
    best: tuple[dict, dict | None, float] = (job, None, 0.0)
    most = 0.0
    for batch in [2**k for k in range(10)] if args.batches else [job["batch"]]:
        there = profile.at_batch(job, batch) if args.batches else job
        room = left_on_device(there, profile.regions_of(there), cluster)
        if room < 0:
            if args.batches:
                break
            raise Error(
                f"the job takes {human(-room)} more than a GPU has, with nothing kept: fcdp-plan batch says what fits"
            )
        budget = room if args.device_budget is None else min(room, args.device_budget)
        found = plan(there, cluster, schedule, budget)
        if found and batch / found["step"]["seconds"] > most:
            most = batch / found["step"]["seconds"]
            best = (there, found, budget)
    return best


def binds(job: dict, found: dict, cluster: dict) -> str:
    """The resource that is busy for most of the step."""
    step = found["step"]
    names = {
        "compute_seconds": "computing",
        "inter_seconds": "the links between nodes",
        "node_seconds": "the links within a node",
        "to_device_seconds": "copies to the device",
        "to_host_seconds": "copies to the host",
        "file_seconds": "the disk",
    }
    most = max(names, key=lambda key: step[key])
    return f"{names[most]} ({100 * step[most] / step['seconds']:.0f} % of the step)"


def setting(found: dict, prefetch: int, plan_at: str | None) -> str:
    """The variables that have a job follow the plan in this file. Without a file: those that come closest; which regions
    a budget serves, FCDP chooses by itself then."""
    tiers = {*found["tiers"]}
    if tiers == {_plan.GATHERED}:
        return "FCDP=0"
    ahead = [f"FCDP_PREFETCH={prefetch}"] if prefetch != 1 else []
    if plan_at:
        files = ["FCDP_SPILL_DIR=DIR"] if _plan.IN_FILE in tiers else []
        return " ".join(["FCDP=1", f"FCDP_PLAN={plan_at}", *ahead, *files])
    parts = ["FCDP=1", *ahead]
    if _plan.ON_DEVICE in tiers:
        parts.append("FCDP_TAU=1" if len(tiers) == 1 else "FCDP_POLICY=next-use")
    if _plan.WHOLE in tiers:
        parts.append("FCDP_RESTORE=whole")
    if _plan.IN_FILE in tiers:
        parts.append("FCDP_SPILL_DIR=DIR")
    if tiers & {_plan.IN_FILE, _plan.GATHERED}:
        parts.append(f"FCDP_HOST_BUDGET={max(1, found['memory']['host'] / 1e6):.0f}MB")  # 0 sets no limit
    return " ".join(parts)


def run(args: argparse.Namespace) -> int:
    job = profile.read(args.profile)
    schedule, description = modes.schedule_of(args, job), clusters.described(args, job)
    cluster = clusters.numbers(description, args.nodes)
    if cluster["n_nodes"] < 2:
        raise Error("FCDP serves jobs on two nodes or more: --nodes 2")
    job, found, budget = choose(job, cluster, schedule, args)
    if not found:
        raise Error("no plan fits into the device's and the host's memory: fcdp-plan batch says what does")
    fixed = {}
    for name in modes.MODES:
        if modes.is_served(name, cluster):
            regions = profile.regions_of(job)
            memory = modes.memory(name, job["costs"], regions, cluster, shapes.CONSTANTS)
            step = modes.simulate(name, job["costs"], regions, cluster, **schedule)
            fixed[name] = {"seconds": step["seconds"], "fits": memory["fits"]}
    buys = what_more_buys(job, description, args, schedule, budget)
    if args.output:
        with replacing(args.output, args.profile) as part, open(part, "w") as file:
            file.write(json.dumps(plan_file.make(job, found, args.prefetch), indent=1) + "\n")
    if args.json:
        document = {"batch": job["batch"], "device_budget_bytes": budget, **found, "fixed": fixed, "buys": dict(buys)}
        document["setting"] = setting(found, args.prefetch, args.output)
        if (split := split_largest(job, cluster)) is not None:
            document["split"] = dict(zip(("region", "parts", "bytes"), split))
        document["tiers"] = [modes.TIERS[tier] for tier in found["tiers"]]
        print(json.dumps(document))
        return 0
    print(title(job, cluster))
    step, exact = found["step"], found["search"]
    print(f"plan: {seconds(step['seconds'])} a step, with {human(budget)} of each GPU for kept regions")
    for tier, name in modes.TIERS.items():
        which = [region["name"] for region, one in zip(job["regions"], found["tiers"]) if one == tier]
        if which:
            print(f"  {name}: {len(which)} regions, {which[0]}" + (f" to {which[-1]}" if len(which) > 1 else ""))
    print(f"  setting: {setting(found, args.prefetch, args.output)}")
    best = min((name for name in fixed if fixed[name]["fits"]), key=lambda name: fixed[name]["seconds"], default=None)
    if best and fixed[best]["seconds"] < 0.99 * step["seconds"]:
        print(f"  faster, and fits: {best} ({modes.SETTINGS[best]}), {seconds(fixed[best]['seconds'])} a step")
    gap = exact["seconds"] / exact["bound"] - 1 if exact["bound"] > 0 else 0
    print("  exact" if exact["is_exact"] else f"  within {100 * gap:.2g} % of the best", "for what the search adds up")
    print(f"  most of the step is busy: {binds(job, found, cluster)}")
    for what, value in buys:
        print(f"  {what}: {seconds(value)} a step")
    if (split := split_largest(job, cluster)) is not None:
        name, n, spared = split
        print(
            f"  {name} in {n} parts, if it is a linear layer (fcdp.split): {human(spared)} less of each GPU at the peak"
        )
    rows = [[name, seconds(one["seconds"]), "" if one["fits"] else "does not fit"] for name, one in fixed.items()]
    print(table(["fixed setting", "step", ""], rows))
    return 0
