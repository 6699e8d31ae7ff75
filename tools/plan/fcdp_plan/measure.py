"""Runs a job on this machine's emulated nodes, and says what of it a profile has."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

import fcdp_plan
from fcdp_lab import failure, lab, network, results
from fcdp_lab.modes import Mode
from fcdp_lab.report import Screen
from fcdp_plan import calibration, splits
from fcdp_plan.failure import Error

WARM_UP = (
    2  # whole steps that do not count, behind the first, which begins anywhere: they allocate, and save activations
)
ROOT = "(root)"
WIRE_RATES = ("200mbit", "600mbit")  # of the links on which collectives are measured: slower than what the cores need
KNOWN = {"bfloat16", "float16", "float32"}
GRACE_S = 15.0
# A mode's step varies more from run to run than within one: what is calibrated is run so often, the modes by turns.
TURNS = 3

Mark = tuple[str, int, float, float, float]  # as watch.py has them


# ---- the runs ----


@contextlib.contextmanager
def _folder() -> Iterator[str]:
    """Kept where a run failed, since the error names it."""
    folder = tempfile.mkdtemp(prefix="fcdp-plan-")
    try:
        yield folder
    except lab.RunFailed as error:
        raise Error(f"{error}\noutput of every rank: {folder}") from None
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    shutil.rmtree(folder, ignore_errors=True)


def _run(
    job: list[str],
    nodes: int,
    ranks: int,
    timeout_s: float,
    env: dict[str, str],
    folder: str,
    label: str,
    rate_bits: float | None = None,
) -> Any:
    setup = lab.Setup(tuple(job), nodes, ranks, rate_bits, 0.0, env, "direct", sys.executable, timeout_s, GRACE_S)
    with Screen().run(label, ended="measured") as progress:
        return lab.run_mode(setup, Mode("profile", {}), folder, progress)


Calibrated = dict[str, tuple[str, ...]]  # modes, and what the script takes for them


def run(
    job: list[str], nodes: int, ranks: int, steps: int, timeout_s: float, modes: Calibrated
) -> tuple[list[dict], dict | None, dict | None]:
    """What each rank reported, with the time of the lab's own probe in "away"; where the job computes on CPUs, the seconds
    of the machine's links; and where modes are to be calibrated, their calibration."""
    missing = network.missing_tools()
    if missing:
        raise Error(f"cannot find {' and '.join(missing)}: install iproute2 (apt-get install iproute2)")
    lab.stop_on_signals()
    with _folder() as folder:
        try:
            _run(
                job, nodes, ranks, timeout_s, {"PLAN_FOLDER": folder, "PLAN_STEPS": str(steps)}, f"{folder}/job", "job"
            )
            reports = _reports(folder, nodes * ranks)
            links, found = None, None
            if reports[0]["device"] == "cpu":
                size = _typical_bytes(reports[0])
                links = _links(size, nodes, ranks, timeout_s, folder)
                if modes:
                    turns = []
                    for turn in range(TURNS):
                        os.mkdir(own := f"{folder}/turn{turn}")
                        turns.append(_turn(job, nodes, ranks, steps, timeout_s, modes, size, own))
                    found = {"nodes": nodes} | medians_of(turns)
        except lab.Stopped as stopped:
            raise Error(f"ended by {stopped}") from None
    return reports, links, found


def _turn(
    job: list[str], nodes: int, ranks: int, steps: int, timeout_s: float, modes: Calibrated, size: int, folder: str
) -> dict[str, dict[str, dict[str, float]]]:
    """Each run that calibrates, once."""
    wire = {
        rate: wire_of(_links(size, nodes, ranks, timeout_s, folder, rate), nodes, ranks, rate) for rate in WIRE_RATES
    }
    steps_of_modes = {
        mode: _calibrate([*job, *words], nodes, ranks, steps, timeout_s, mode, folder) for mode, words in modes.items()
    }
    return {"wire": wire, "modes": steps_of_modes}


def medians_of(turns: list[dict[str, dict[str, dict[str, float]]]]) -> dict[str, dict[str, dict[str, float]]]:
    return {
        part: {
            name: {key: statistics.median(turn[part][name][key] for turn in turns) for key in values}
            for name, values in named.items()
        }
        for part, named in turns[0].items()
    }


def _links(size: int, nodes: int, ranks: int, timeout_s: float, folder: str, rate: str = "unlimited") -> dict:
    """What links.py measured; on links of a rate, each collective behind a pause in which their token buckets fill."""
    rate_bits = network.parse_rate(rate)
    name = f"links of {rate}" if rate_bits else "links"
    words = [os.path.join(os.path.dirname(fcdp_plan.__file__), "links.py"), f"{folder}/{name}.json", str(size)]
    if rate_bits:
        words.append(str(2 * 8 * network.burst_bytes(rate_bits) / rate_bits))
    _run(words, nodes, ranks, timeout_s, {}, f"{folder}/{name}", name, rate_bits)
    with open(f"{folder}/{name}.json") as file:
        return json.load(file)


def wire_of(links: dict, nodes: int, ranks: int, shaped: str) -> dict[str, float]:
    """How long a collective over gloo holds a shaped link, in what its bytes take there: behind a queue that TCP has filled,
    what lets the next step of a ring begin comes late."""
    size, world, rate_bits = links["size"], nodes * ranks, network.parse_rate(shaped)
    rate, burst = rate_bits / 8 * network.PAYLOAD, network.burst_bytes(rate_bits) * network.PAYLOAD
    ring, lane = size * (world - 1) / world, size * (nodes - 1) / nodes
    sent = {"gather": ring, "scatter": 2 * ring, "lane_gather": lane, "lane_reduce": 2 * lane}
    keys = {"gather": "gather_times", "scatter": "reduce_times"}
    return {
        keys.get(name, f"{name}_times"): max(1.0, (links["seconds"][name][1] * rate + burst) / n)
        for name, n in sent.items()
    }


def _calibrate(
    job: list[str], nodes: int, ranks: int, steps: int, timeout_s: float, mode: str, folder: str
) -> dict[str, float]:
    """A mode's step, as fcdp-lab measures it, and what of it FSDP2's collectives take."""
    own = f"{folder}/{mode}"
    os.mkdir(own)
    env = {"PLAN_FOLDER": own, "PLAN_STEPS": str(steps), "PLAN_MARKS": "0"} | calibration.environment(mode)
    step_s = results.of_run(_run(job, nodes, ranks, timeout_s, env, f"{own}/job", mode), WARM_UP)["step_s"]
    if not step_s:
        raise Error(f"{mode}: the script made less than 2 optimizer steps")
    return {"step_seconds": step_s} | collectives_of([report["marks"] for report in _reports(own, nodes * ranks)])


def collectives_of(ranks: list[list[Mark]], warm_up: int = WARM_UP) -> dict[str, float]:
    """Seconds of a step, the median of the steps behind the warm-up. Of each call the rank counts that waits least: the
    others wait for it to come, and it computes meanwhile."""
    steps: list[dict[str, float]] = [{"gather_seconds": 0.0, "reduce_seconds": 0.0}]
    for calls in zip(*ranks):
        name = calls[0][0]
        if name == "optimizer":
            steps.append(dict.fromkeys(steps[0], 0.0))
        else:
            _add(steps[-1], "gather_seconds" if "gather" in name else "reduce_seconds", min(c[3] - c[2] for c in calls))
    counted = steps[warm_up + 1 : -1] or steps
    return {key: statistics.median(step[key] for step in counted) for key in steps[0]}


def _reports(folder: str, n: int) -> list[dict]:
    probes = failure.read_records(f"{folder}/job/probe")
    reports = []
    for rank in range(n):
        try:
            with open(f"{folder}/rank{rank}.json") as file:
                report = json.load(file)
        except FileNotFoundError:
            raise Error(f"rank {rank} did not report: was the script run with -I or -E?") from None
        report["away"] = [(line["t_in"], line["t_out"]) for line in probes.get(rank, []) if line["kind"] == "step"]
        reports.append(report)
    return reports


def _typical_bytes(report: dict) -> int:
    """A group's bytes, of which the links are measured: a multiple of what any number of ranks divides well."""
    sizes = sorted(group["gathered_bytes"] for group in report["groups"])
    return max(1 << 16, int(sizes[len(sizes) // 2]) >> 12 << 12) if sizes else 1 << 20


# ---- from marks to seconds ----


class Step:
    """Of one optimizer step and one rank: seconds, by (phase, group) or by group."""

    def __init__(self) -> None:
        self.compute: dict[tuple[str, int], float] = {}
        self.unshard: dict[int, float] = {}
        self.reduce: dict[int, float] = {}
        self.uses: dict[tuple[str, int], int] = {}
        self.optimizer = self.other = 0.0

    def values(self) -> dict[tuple, float]:
        """All of them, by a name."""
        out: dict[tuple, float] = {("optimizer",): self.optimizer, ("other",): self.other}
        out |= {("compute", *key): value for key, value in self.compute.items()}
        out |= {("unshard", key): value for key, value in self.unshard.items()}
        out |= {("reduce", key): value for key, value in self.reduce.items()}
        return out


def _add(to: dict, key: Any, value: float) -> None:
    to[key] = to.get(key, 0) + value


def _without(away: Sequence[tuple[float, float]], begin: float, end: float) -> float:
    """Seconds from begin to end, those in `away` left out."""
    return max(0.0, end - begin - sum(max(0.0, min(out, end) - max(into, begin)) for into, out in away))


def steps_of(marks: list[Mark], away: Sequence[tuple[float, float]] = ()) -> list[Step]:
    """The whole steps: from one optimizer's end to the next one's. What lies between two marks computes with the group of
    the last unshard; behind the last reduction, and before the first unshard, with none."""
    steps: list[Step] = []
    step, now, last = Step(), None, 0.0
    current: tuple[str, int] | None = None
    for kind, group, begin, end, collectives in marks:
        gap = _without(away, last, begin)
        if kind == "optimizer" or current is None:
            step.other += gap
        else:
            _add(step.compute, current, gap)
        if kind in ("forward", "backward"):
            current = (kind, group)
            _add(step.unshard, group, end - begin - collectives)
            _add(step.uses, current, 1)
        elif kind == "end" and current is not None:
            _add(step.compute, current, end - begin)
        elif kind == "reduce":
            _add(step.reduce, group, end - begin - collectives)
        elif kind == "optimizer":
            step.optimizer += _without(away, begin, end)
            current = None
            if now is not None:
                steps.append(step)
            step, now = Step(), end
        last = max(last, end)
    return steps


def seconds_of(ranks: list[list[Step]], warm_up: int = WARM_UP) -> dict[tuple, float]:
    """By the names of Step.values: of each step the slowest rank's, as collectives wait for it; of these the median."""
    counted = range(warm_up, min(len(steps) for steps in ranks))
    found: dict[tuple, list[float]] = {}
    for i in counted:
        most: dict[tuple, float] = {}
        for steps in ranks:
            for key, value in steps[i].values().items():
                most[key] = max(most.get(key, 0.0), value)
        for key, value in most.items():
            found.setdefault(key, []).append(value)
    return {key: max(0.0, statistics.median(values)) for key, values in found.items()}


# ---- the profile ----


def profile_of(reports: list[dict], links: dict | None, ranks_per_node: int, batch: float) -> dict:
    """Without its schema's name."""
    first = reports[0]
    if not first["groups"]:
        raise Error(
            "the script used no group of FSDP2 (fully_shard): nothing was measured. For FSDP1, --trace takes a trace"
        )
    ranks = [steps_of(report["marks"], report["away"]) for report in reports]
    n = min(len(steps) for steps in ranks)
    if n <= WARM_UP:
        raise Error(f"the script made {first['steps']} optimizer steps: 4 or more are needed, of which 3 do not count")
    if any(report["groups"] != first["groups"] for report in reports):
        raise Error("the ranks have different groups, as in a pipeline: fcdp-plan describes jobs whose ranks are alike")
    notes: list[str] = []
    seconds, uses = seconds_of(ranks), ranks[0][-1].uses
    order = sorted(range(len(first["groups"])), key=lambda g: _first_forward(first["marks"], g))
    micro_batches = max(1, uses.get(("forward", order[0]), 1))
    regions = [_region(first, g, seconds, uses, micro_batches, notes) for g in order if _is_used(first, g, uses, notes)]
    if len(regions) > 1 and all(region["stays"] for region in regions):
        notes.append("no group is gathered in backward (reshard_after_forward=False): FSDP2 is predicted so, too")
    dtypes = sorted({dtype for group in first["groups"] for dtype in group["dtypes"]})
    if len(dtypes) > 1:
        notes.append(f"groups are gathered in {', '.join(dtypes)}: bytes of a parameter are their mean")
    world = len(reports)
    profile = {
        "batch": batch,
        "micro_batches": micro_batches,
        "dtype": min(dtypes, key=["bfloat16", "float16", "float32"].index) if {*dtypes} <= KNOWN else "float32",
        "costs": _costs(first, seconds, world, links),
        "regions": regions,
        "notes": notes,
    }
    if links:
        profile["machine"] = machine_of(links, world // ranks_per_node, ranks_per_node)
    return profile


def _first_forward(marks: list[Mark], group: int) -> float:
    return next((mark[2] for mark in marks if mark[0] == "forward" and mark[1] == group), float("inf"))


def _is_used(report: dict, g: int, uses: dict, notes: list[str]) -> bool:
    if ("forward", g) in uses:
        return True
    notes.append(f"{report['groups'][g]['name'] or ROOT} is not used in a step's forward, and is left out")
    return False


def _region(report: dict, g: int, seconds: dict, uses: dict, micro_batches: int, notes: list[str]) -> dict:
    group, name = report["groups"][g], report["groups"][g]["name"] or ROOT
    times = uses[("forward", g)] / micro_batches
    if times > 1:
        notes.append(f"{name} is used {times:g} times in a forward: the model gathers it once, and adds up its seconds")
    if ("backward", g) not in uses:
        notes.append(f"{name} is used in forward alone: the model keeps it gathered until the step's end")

    def of(*key: Any) -> float:
        return seconds.get(key, 0.0) / micro_batches

    linears = splits.measured(group, report["linears"][g])
    n_unshards = uses[("forward", g)] / micro_batches + (1 if report["gathers"][g]["backward"] else 0)
    return {
        "name": name,
        "trainable": group["trainable"],
        "frozen": group["frozen"],
        "forward_flops": 0,
        "backward_flops": 0,
        "activation_bytes": report["saved"][g],
        "stays": not report["gathers"][g]["backward"],
        "forward_seconds": of("compute", "forward", g),
        "backward_seconds": of("compute", "backward", g),
        "unshard_seconds": of("unshard", g) / n_unshards if report["device"] == "cpu" else 0.0,
        "reduce_seconds": seconds.get(("reduce", g), 0.0) / micro_batches if report["device"] == "cpu" else 0.0,
        **({"linears": linears} if linears else {}),
    }


def _costs(report: dict, seconds: dict, world: int, links: dict | None) -> dict:
    """Of the optimizer's time, what its state takes to be read and written goes with the shards; on CPUs the rest, which is
    spent on each parameter, does not."""
    groups, state = report["groups"], report["state"]
    trainable = sum(group["trainable"] for group in groups)
    everything = trainable + sum(group["frozen"] for group in groups)

    def mean(key: str, of: float) -> float:
        return sum(group[key] for group in groups) / of if of else 0.0

    costs = {
        "parameter_bytes": mean("gathered_bytes", everything),
        "gradient_bytes": mean("reduced_bytes", trainable),
        "state_bytes": state["bytes"] / state["numbers"] if state and state["numbers"] else 0.0,
        "shard_bytes": mean("shard_bytes", everything),
        "other_bytes": 0,
        "live_parameters": 0,
    }
    optimizer = by_shards = seconds.get(("optimizer",), 0.0)
    if links:
        copied = trainable / world * (costs["state_bytes"] + costs["shard_bytes"] + costs["gradient_bytes"])
        by_shards = min(optimizer, copied / _per_second(links, "copy", links["size"]))
    costs["optimizer_seconds"] = by_shards * world
    costs["step_seconds"] = seconds.get(("other",), 0.0) + optimizer - by_shards
    return costs


def _per_second(links: dict, name: str, sent: float) -> float:
    """Bytes: of a piece as large as a group, what a small piece takes being latency. On a busy machine the small piece may
    have taken as long; then the whole time counts."""
    least, most = links["seconds"][name]
    if least >= most:
        return max(1.0, sent / most)
    return max(1.0, sent * (1 - links["small"] / links["size"]) / (most - least))


def machine_of(links: dict, nodes: int, ranks: int) -> dict:
    """A cluster's description."""
    size, world = links["size"], nodes * ranks

    def rate(name: str, sent: float) -> str:
        return f"{_per_second(links, name, sent) / 1e6:.1f}mbyte" if sent else "0gbyte"

    def latency(name: str, hops: int) -> str:
        return f"{links['seconds'][name][0] / hops * 1e6:.1f}us" if hops else "0us"

    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "gpus_per_node": ranks,
        "gpu_memory": f"{memory // world}",
        "host_memory": f"{memory // nodes}",
        "pcie": rate("copy", size),
        "node_link": rate("gather", size * (world - 1) / world),
        "reduce_link": rate("scatter", 2 * size * (world - 1) / world),
        "node_latency": latency("node_gather", ranks - 1),
        "latency": latency("gather", world - 1),
        "links": {"unlimited": rate("lane_gather", size * (nodes - 1) / nodes)} if nodes > 1 else {},
    }
