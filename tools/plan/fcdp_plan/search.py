"""fcdp-plan search: the tier of each region, and in how many parts its linear layers are."""

from __future__ import annotations

import argparse
import json

from fcdp_memtrace.replace import replacing
from fcdp_memtrace.units import human, size, table
from fcdp_plan import _plan, clusters, modes, plan_file, profile, shapes, splits
from fcdp_plan.compare import seconds, title
from fcdp_plan.failure import Error

ABOUT = """\
Find the best tier of each region within the memory of a GPU and of a node.

Each region is kept on the device, restored by slice or whole, read from a file, or gathered again. If the job does not fit
otherwise, or is faster so, linear layers are in parts (fcdp.split), and the lines to add to the script are printed. The search
is exact for the sum of what holds up a pipeline that fetches one region ahead; where that would take too long, a bound says
how far from the best the answer can be. What is found is simulated beside the fixed settings, and so is what another GB and
another Gbit/s would buy. --batches finds the batch size as well. -o writes the plan to a file, which a job follows with
FCDP_PLAN=FILE.
"""
STATES = 1 << 13
UNLIMITED = 1e30
# Shares of a step, or of samples per second. For less than the first, no script is changed to split its layers; for less than
# the second, they are in no more parts.
WORTH, NEAR = 0.05, 0.01
ROUNDING = 1.0  # bytes: sums of the same numbers in another order
MOST_KINDS, MOST_PIECES = 8, 4096  # what is simulated with other numbers of parts


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


def gathered(job: dict, cluster: dict) -> float:
    """Bytes of a GPU at the peak, with no layer in parts."""
    return modes.memory("FCDP", job["costs"], splits.regions_of(job), cluster, shapes.CONSTANTS)["gathered"]


def try_one(job: dict, cluster: dict, schedule: dict, budget: float, parts: bytes, tiers: bytes) -> dict | None:
    """The plan with this choice, as it is simulated without jitter; None: it does not fit."""
    regions, of_pieces = splits.in_pieces(job, list(parts), list(tiers), schedule["prefetch"])
    memory = modes.memory("FCDP", job["costs"], regions, cluster, shapes.CONSTANTS, of_pieces)
    whole = gathered(job, cluster)
    no_disk = _plan.IN_FILE in tiers and cluster["file_rate"] <= 0
    host = cluster["host_memory_bytes"] or UNLIMITED
    if memory["cache"] + memory["gathered"] > budget + whole + ROUNDING or no_disk or memory["host"] > host:
        return None
    calm = schedule | {"jitter": 0, "n_steps": 1}
    step = modes.simulate("FCDP", job["costs"], regions, cluster, of_pieces, **calm)
    spared = whole - memory["gathered"]
    return {"tiers": list(tiers), "parts": list(parts), "step": step, "memory": memory, "spared_bytes": spared}


def plan(
    job: dict, cluster: dict, schedule: dict, budget: float, n_splits: int = 1, whole: dict | None = None
) -> dict | None:
    """By the simulation, the best of what the search finds, the same with kept regions spaced evenly, and one tier for
    all; None: nothing fits. Where layers may be in parts, also of those, and of `whole`, a plan without parts, with other
    numbers of parts. `budget`: for kept regions, beside what is gathered with no layer in parts; what parts spare
    may be used as well, and a negative budget is what they have to spare."""
    regions, linears = splits.regions_of(job), splits.linears_of(job)
    limits = {
        "device_bytes": budget + gathered(job, cluster) + ROUNDING,
        "host_bytes": cluster["host_memory_bytes"] or UNLIMITED,
        "ahead": schedule["prefetch"],
        "n_splits": n_splits,
        "max_states": STATES,
    }
    tiers, parts, found = _plan.choose(job["costs"], regions, linears, cluster, limits)
    if not found["fits"]:
        return None
    candidates = [tiers, _plan.spread_tiers(job["costs"], regions, cluster, tiers, parts)]
    candidates += [bytes([tier] * len(regions)) for tier in modes.TIERS]
    tried = [try_one(job, cluster, schedule, budget, parts, candidate) for candidate in candidates]
    best = min((one for one in tried if one), key=lambda one: one["step"]["seconds"], default=None)
    if best and n_splits > 1:
        starts = [best, whole and try_one(job, cluster, schedule, budget, bytes(whole["parts"]), bytes(whole["tiers"]))]
        tuned = [tune_parts(job, cluster, schedule, budget, start) for start in starts if start]
        best = min(tuned, key=lambda one: one["step"]["seconds"])
    if best and schedule["jitter"]:
        regions, of_pieces = splits.in_pieces(job, best["parts"], best["tiers"], schedule["prefetch"])
        best["step"] = modes.simulate("FCDP", job["costs"], regions, cluster, of_pieces, **schedule)
    return best and best | {"search": found}


def kinds_of(job: dict, found: dict) -> list[list[int]]:
    """Regions with linear layers, those that are alike together; the largest first."""
    kinds: dict[tuple, list[int]] = {}
    for i, (region, n) in enumerate(zip(job["regions"], found["parts"])):
        if region.get("linears"):
            kinds.setdefault((region["trainable"] + region["frozen"], region["stays"], n), []).append(i)
    return [kinds[key] for key in sorted(kinds, reverse=True)][:MOST_KINDS]


def tune_parts(job: dict, cluster: dict, schedule: dict, budget: float, found: dict) -> dict:
    """The plan with other numbers of parts, kind by kind of regions, as they are simulated: the search's sums do not see that
    reductions of parts begin earlier. Then as few parts as are no slower, but for NEAR."""

    def tried(found: dict, which: list[int], n: int) -> dict | None:
        rows = min(one["rows"] for one in job["regions"][which[0]]["linears"])
        parts = bytes(n if i in which else k for i, k in enumerate(found["parts"]))
        if n > 1 and (rows < n * splits.BLOCK or splits.n_pieces(job, parts) > MOST_PIECES):
            return None
        return try_one(job, cluster, schedule, budget, parts, bytes(found["tiers"]))

    numbers = [1 << k for k in range(_plan.N_SPLITS)]
    for which in kinds_of(job, found):
        for n in numbers:
            one = tried(found, which, n)
            if one and one["step"]["seconds"] < found["step"]["seconds"]:
                found = one
    most = found["step"]["seconds"] * (1 + NEAR)
    for which in kinds_of(job, found):
        for n in numbers[: numbers.index(found["parts"][which[0]])]:
            one = tried(found, which, n)
            if one and one["step"]["seconds"] <= most:
                found = one
                break
    return found


def is_worth(split: dict | None, whole: dict | None, of_split: float = 1, of_whole: float = 1) -> bool:
    """Is the plan with layers in parts faster by WORTH, with so many samples in a step?"""
    if not split or max(split["parts"]) == 1:
        return False
    return not whole or split["step"]["seconds"] / of_split < (1 - WORTH) * whole["step"]["seconds"] / of_whole


def plan_in_parts(job: dict, cluster: dict, schedule: dict, budget: float, whole: dict | None) -> dict | None:
    """The best plan whose linear layers may be in parts; None: nothing fits, or there are none."""
    if not any(splits.linears_of(job)):
        return None
    return plan(job, cluster, schedule, budget, _plan.N_SPLITS, whole)


def best_plan(job: dict, cluster: dict, schedule: dict, budget: float) -> dict | None:
    whole = plan(job, cluster, schedule, budget)
    split = plan_in_parts(job, cluster, schedule, budget, whole)
    return split if is_worth(split, whole) else whole


def split_largest(job: dict, cluster: dict, ahead: int) -> tuple[str, int, float] | None:
    """What `fcdp.split()` would take from the peak, of a region whose linear layers the profile does not know, if it is one:
    the region that decides the peak, in how many parts it decides it no longer (16 at most), and the bytes of a GPU.
    None: the next region is half as large at least, or the largest one stays gathered."""
    regions = splits.regions_of(job)
    sizes = [0.0 if region["stays"] else region["trainable"] + region["frozen"] for region in regions]
    largest = max(range(len(sizes)), key=lambda i: sizes[i])
    others = max([0.0, *(size for i, size in enumerate(sizes) if i != largest)])
    if not sizes[largest] or sizes[largest] < 2 * others or job["regions"][largest].get("linears"):
        return None
    at_once = 1 + max(1, ahead)
    n = next((n for n in (2, 4, 8) if sizes[largest] * at_once <= n * others), 16)
    spared = sizes[largest] - max(others, sizes[largest] * min(1.0, at_once / n))
    return job["regions"][largest]["name"], n, spared * job["costs"]["parameter_bytes"]


def what_more_buys(job: dict, description: dict, args: argparse.Namespace, schedule: dict, budget: float) -> list:
    """(what, seconds of a step) with one more GB, and a faster link."""
    cluster = clusters.numbers(description, args.nodes)
    rows = []
    more = best_plan(job, cluster, schedule, budget + 1e9)
    if more:
        rows.append(("1 GB more on each GPU", more["step"]["seconds"]))
    if cluster["inter_rate"]:
        faster = best_plan(job, cluster | {"inter_rate": cluster["inter_rate"] + 1.25e8}, schedule, budget)
        if faster:
            rows.append(("1 Gbit/s more between nodes", faster["step"]["seconds"]))
    return rows


def choose(job: dict, cluster: dict, schedule: dict, args: argparse.Namespace) -> tuple[dict, dict | None, float]:
    """The job at the batch that gives most samples per second, its plan, and the budget that it has. Layers are in parts
    where nothing fits otherwise, or for more samples by WORTH."""
    nothing: tuple[dict, dict | None, float] = (job, None, 0.0)
    whole = split = nothing
    for batch in [2**k for k in range(10)] if args.batches else [job["batch"]]:
        there = profile.at_batch(job, batch) if args.batches else job
        room = left_on_device(there, splits.regions_of(there), cluster)
        budget = room if args.device_budget is None else min(room, args.device_budget)
        found = plan(there, cluster, schedule, budget) if room >= 0 else None
        parts = plan_in_parts(there, cluster, schedule, budget, found)
        if room < 0 and not parts:
            if args.batches:
                break
            any_linear = " (splitting its linear layers does not help)" if any(splits.linears_of(there)) else ""
            raise Error(
                f"the job takes {human(-room)} more than a GPU has, with nothing kept: fcdp-plan batch says what fits"
                f"{any_linear}"
            )
        if found and (not whole[1] or _speed(there, found) > _speed(whole[0], whole[1])):
            whole = (there, found, budget)
        if parts and (not split[1] or _speed(there, parts) > _speed(split[0], split[1])):
            split = (there, parts, budget)
    return split if is_worth(split[1], whole[1], split[0]["batch"], whole[0]["batch"]) else whole


def _speed(job: dict, found: dict) -> float:
    return job["batch"] / found["step"]["seconds"]


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


def in_parts(job: dict, found: dict) -> list[str]:
    """What is split, and the lines that split it."""
    chosen = splits.chosen(job, found["parts"])
    if not chosen:
        return []
    first = chosen[0]
    more = f", and {len(chosen) - 1} other layers" if len(chosen) > 1 else ""
    said = f"in parts: {first['layer']} ({first['rows']} x {first['columns']}) in {first['parts']} parts{more}, "
    said += f"{human(found['spared_bytes'])} less of each GPU at the peak; before fully_shard, add"
    return [said, *(f"    {line}" for line in splits.lines(chosen))]


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
            regions = splits.regions_of(job)
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
        document["splits"] = splits.chosen(job, found["parts"])
        document["lines"] = splits.lines(document["splits"])
        if (split := split_largest(job, cluster, args.prefetch)) is not None:
            document["split"] = dict(zip(("region", "parts", "bytes"), split))
        document["tiers"] = [modes.TIERS[tier] for tier in found["tiers"]]
        print(json.dumps(document))
        return 0
    print(title(job, cluster))
    step, exact = found["step"], found["search"]
    room = max(0.0, budget + found["spared_bytes"])
    print(f"plan: {seconds(step['seconds'])} a step, with {human(room)} of each GPU for kept regions")
    for tier, name in modes.TIERS.items():
        which = [region["name"] for region, one in zip(job["regions"], found["tiers"]) if one == tier]
        if which:
            print(f"  {name}: {len(which)} regions, {which[0]}" + (f" to {which[-1]}" if len(which) > 1 else ""))
    for line in in_parts(job, found):
        print(f"  {line}")
    print(f"  setting: {setting(found, args.prefetch, args.output)}")
    best = min((name for name in fixed if fixed[name]["fits"]), key=lambda name: fixed[name]["seconds"], default=None)
    if best and fixed[best]["seconds"] < 0.99 * step["seconds"]:
        print(f"  faster, and fits: {best} ({modes.SETTINGS[best]}), {seconds(fixed[best]['seconds'])} a step")
    gap = exact["seconds"] / exact["bound"] - 1 if exact["bound"] > 0 else 0
    print("  exact" if exact["is_exact"] else f"  within {100 * gap:.2g} % of the best", "for what the search adds up")
    print(f"  most of the step is busy: {binds(job, found, cluster)}")
    for what, value in buys:
        print(f"  {what}: {seconds(value)} a step")
    if (split := split_largest(job, cluster, args.prefetch)) is not None:
        name, n, spared = split
        print(
            f"  {name} in {n} parts, if it is a linear layer (fcdp.split): {human(spared)} less of each GPU at the peak"
        )
    rows = [[name, seconds(one["seconds"]), "" if one["fits"] else "does not fit"] for name, one in fixed.items()]
    print(table(["fixed setting", "step", ""], rows))
    return 0
