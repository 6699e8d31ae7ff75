"""Computes figures from the ranks' records: one dict per run, one per mode. README.md lists the fields."""

import re
import statistics

from fcdp_lab import failure

_LOSS = re.compile(r"\bloss\b\D{0,3}([-+]?(?:\d[\d.]*(?:e[-+]?\d+)?|nan|inf))", re.IGNORECASE)


def _steps(lines, optimizer=0):
    return [line for line in lines if line["kind"] == "step" and line["optimizer"] == optimizer]


def _first(lines, kind):
    return next((line for line in lines if line["kind"] == kind), None)


def _intervals(lines):
    """Seconds from one step of the first optimizer to the next, less what the probe took in between."""
    steps = _steps(lines)
    windows = [(line["t_in"], line["t_out"] - line["t_in"]) for line in lines if line["kind"] == "step"]
    return [
        b["t_in"] - a["t_in"] - sum(w for t, w in windows if a["t_in"] <= t < b["t_in"])
        for a, b in zip(steps, steps[1:])
    ]


def _counted(lines, warmup):
    """The steps whose differences count: the last warm-up step and all after it."""
    steps = _steps(lines)
    return steps[warmup - 1 :] if len(steps) > warmup else steps[-2:]


def _mean(values):
    values = [v for v in values if v is not None]
    return sum(values) / len(values) if values else None


def _largest(values):
    return max((v for v in values if v is not None), default=None)


def _per_step(lines, warmup, value):
    counted = _counted(lines, warmup)
    if len(counted) < 2:
        return None
    return (value(counted[-1]) - value(counted[0])) / (len(counted) - 1)


def _collectives(line):
    """The bytes that a rank sent, by collective: from fcdp.stats(), or from the probe; None if neither counted."""
    mine, stats = line.get("collectives"), line.get("fcdp")
    return mine if mine is not None else stats["collectives"] if stats else None


def _split(ranks, n_nodes, warmup):
    """Collective -> bytes sent per step and node; None if some rank did not count it."""
    totals = {}
    for lines in ranks.values():
        counted = _counted(lines, warmup)
        if len(counted) < 2 or _collectives(counted[-1]) is None:
            return None
        first = _collectives(counted[0]) or {}
        for kind, now in _collectives(counted[-1]).items():
            before = first.get(kind, {}).get("inter_bytes_sent", 0)
            sent = (now["inter_bytes_sent"] - before) / (len(counted) - 1)
            totals[kind] = totals.get(kind, 0) + sent / n_nodes
    return totals


MOVES = ("h2d_bytes", "d2h_bytes", "evictions", "memory_waits")


def _moves(ranks, warmup):
    """Of FCDP per step and rank; None without it."""

    def moved(step, kind):
        return step["fcdp"].get("moves", {}).get(kind, 0)

    if not all(step.get("fcdp") for lines in ranks.values() for step in _steps(lines)):
        return None
    means = {
        kind: _mean(_per_step(lines, warmup, lambda step: moved(step, kind)) for lines in ranks.values())
        for kind in MOVES
    }
    return None if None in means.values() else means


def _last_stats(lines):
    for line in reversed(lines):
        if line.get("fcdp"):
            return line["fcdp"]
    return None


def _losses(folder):
    log = failure.rank_log(f"{folder}/logs", 0, 0, "stdout")
    if not log:
        return []
    with open(log, errors="replace") as f:
        return _LOSS.findall(f.read())


def of_run(run, warmup):
    """The figures of one run."""
    ranks = failure.read_records(f"{run.folder}/probe")
    n_nodes = len(run.node_sent)
    nodes = {node: [] for node in sorted(run.node_sent)}
    for lines in ranks.values():
        nodes[_first(lines, "start")["node"]].append(lines)
    times = [_intervals(lines) for lines in ranks.values()]
    n_steps = min((len(t) for t in times), default=0)
    per_step = [sum(t[i] for t in times) / len(times) for i in range(n_steps)]
    sent = {
        node: _mean(_per_step(lines, warmup, lambda s: s["sent"]) for lines in members)
        for node, members in nodes.items()
    }
    model = [m for m in (_first(lines, "model") for lines in ranks.values()) if m]
    stats = [s for s in map(_last_stats, ranks.values()) if s]
    return {
        "steps": n_steps + 1 if times and min(len(_steps(lines)) for lines in ranks.values()) else 0,
        "wall_s": run.wall_s,
        "others_cpus": run.others_cpus,
        "step_s": statistics.median(per_step[warmup - 1 :] or per_step) if per_step else None,
        "step_s_each": per_step,
        "sent_bytes_per_step": _mean(sent.values()),
        "sent_bytes_per_step_by_node": list(sent.values()),
        "sent_bytes_per_step_by_collective": _split(ranks, n_nodes, warmup) if ranks else None,
        "sent_bytes_total_by_node": [run.node_sent[node] for node in nodes],
        "received_bytes_total_by_node": [run.node_received[node] for node in nodes],
        **_memory(ranks, model, stats),
        "moves_per_step": _moves(ranks, warmup) if stats and stats[0]["enabled"] else None,
        "W_bytes": _largest(m["gathered_bytes"] for m in model) or None,
        "parameter_bytes": _largest(m["parameter_bytes"] for m in model) or None,
        "losses": _losses(run.folder),
        "fcdp": _fcdp(stats, ranks),
    }


def _memory(ranks, model, stats):
    ends = [next((x for x in reversed(lines) if x.get("gathered")), None) for lines in ranks.values()]
    plain = _largest(e["gathered"]["peak"] for e in ends if e)
    tiered = _largest(s["device_bytes"]["peak"] for s in stats)
    return {
        "device_gathered_peak_bytes": tiered if stats and any(s["enabled"] for s in stats) else plain,
        "device_taken_bytes": _largest(line.get("device") for lines in ranks.values() for line in _steps(lines)),
        "device_state_bytes": _largest(m["shard_bytes"] + m["gradient_bytes"] + m["optimizer_bytes"] for m in model),
        "host_peak_bytes": _largest(s["host_bytes"]["peak"] for s in stats) or 0,
    }


def _fcdp(stats, ranks):
    if not stats:
        return None
    first = stats[0]
    keep = ("driver", "topology", "gathers", "bypassed")
    # While the job trained: at its end its models may be gone.
    groups = [step["fcdp"]["groups"] for lines in ranks.values() for step in _steps(lines) if step.get("fcdp")]
    return {
        "enabled": all(s["enabled"] for s in stats),
        "groups_served": max(groups, default=0),
        **{k: first.get(k) for k in keep},
    }


def _compare(lines, reference):
    """(comparable, first step that differs or None) of one rank's digests."""
    mine, theirs = ([s for s in x if s["kind"] == "step"] for x in (lines, reference))
    if [s["layout"] for s in mine[:1]] != [s["layout"] for s in theirs[:1]]:
        return False, None
    for a, b in zip(mine, theirs):
        if a["digest"] != b["digest"]:
            return True, a["step"]
    return True, None if len(mine) == len(theirs) else min(len(mine), len(theirs)) + 1


def compare(run, reference):
    """Whether training was bitwise the same. shards: null where the shards are cut differently or nothing stepped."""
    mine, theirs = (failure.read_records(f"{r.folder}/probe") for r in (run, reference))
    losses, expected = _losses(run.folder), _losses(reference.folder)
    result = {"shards": None, "losses": losses == expected if losses and expected else None, "first_difference": None}
    stepped = all(any(x["kind"] == "step" for x in lines) for lines in [*mine.values(), *theirs.values()])
    if not mine or mine.keys() != theirs.keys() or not stepped:
        return result
    verdicts = [_compare(mine[rank], theirs[rank]) for rank in mine]
    if all(comparable for comparable, _ in verdicts):
        differing = [step for _, step in verdicts if step is not None]
        result["shards"] = not differing
        result["first_difference"] = min(differing, default=None)
    return result


_MEDIANS = (
    "step_s",
    "sent_bytes_per_step",
    "device_gathered_peak_bytes",
    "device_taken_bytes",
    "device_state_bytes",
    "host_peak_bytes",
    "wall_s",
    "others_cpus",
)


def of_mode(mode, runs, reference_runs, warmup):
    """Medians over the runs of a mode, each run kept; equal to the reference only if every run is."""
    figures = [of_run(run, warmup) for run in runs]
    verdicts = [compare(run, reference_runs[0]) for run in runs]
    result = {"name": mode.name, "env": mode.env, "args": list(mode.args)}
    for key in _MEDIANS:
        values = [f[key] for f in figures if f[key] is not None]
        result[key] = statistics.median(values) if values else None
    result["sent_bytes_per_step_by_collective"] = figures[0]["sent_bytes_per_step_by_collective"]
    result["moves_per_step"] = figures[0]["moves_per_step"]
    result["W_bytes"] = figures[0]["W_bytes"]
    w, sent = result["W_bytes"], result["sent_bytes_per_step"]
    result["sent_W_per_step"] = sent / w if w and sent is not None else None
    result["equal"] = _worst(verdicts)
    result["runs"] = figures
    return result


def _worst(verdicts):
    merged = {}
    for key in ("shards", "losses"):
        values = [v[key] for v in verdicts]
        merged[key] = False if False in values else None if None in values else True
    merged["first_difference"] = min((v["first_difference"] for v in verdicts if v["first_difference"]), default=None)
    return merged
