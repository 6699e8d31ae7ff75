"""A job's profile from its trace: what FCDP's engine saw of it."""

from __future__ import annotations

from fcdp_memtrace import _trace
from fcdp_memtrace.trace_file import TraceFile
from fcdp_plan import measure
from fcdp_plan.failure import Error

Event = tuple[int, int, str, str, int, int, int]  # as _trace.file_events has them


def profile_of(path: str, parameter_bytes: int, dtype: str, batch: float) -> dict:
    """Without its schema's name. A trace has bytes of regions, in the dtype of the gathers, and no numbers of parameters;
    nothing of activations, nor of what the optimizer keeps."""
    try:
        file = TraceFile(path)
        processes = {p["rank"]: i for i, p in enumerate(file.processes) if p["rank"] >= 0}
        found = {rank: _of_process(file, i) for rank, i in sorted(processes.items())}
    except _trace.Error as error:
        raise Error(str(error)) from None
    found = {rank: one for rank, one in found.items() if one[1]}
    if not found:
        raise Error(f"{path} has no unshard: was the job run with FCDP=1, and did FCDP serve a group of it?")
    regions, marks, gathers = next(iter(found.values()))
    ranks = [measure.steps_of(marks) for _, marks, _ in found.values()]
    n = min(len(steps) for steps in ranks)
    if n <= measure.WARM_UP:
        raise Error(f"{path} has {n} whole steps: 3 or more are needed, of which 2 do not count")
    notes = [
        f"{path} has no activations, and no state of the optimizer: they are 0, or as of AdamW",
        f"parameters are bytes over {parameter_bytes} ({dtype}, --dtype), the padding of a group included",
    ]
    seconds, uses = measure.seconds_of(ranks), ranks[0][-1].uses
    order = [g for kind, g, *_ in marks if kind == "forward"]
    order = [g for g in dict.fromkeys(order) if ("forward", g) in uses]
    micro_batches = max(1, uses[("forward", order[0])])
    world = max(p["world_size"] for p in file.processes)
    return {
        "batch": batch,
        "micro_batches": micro_batches,
        "dtype": dtype,
        "costs": {
            "parameter_bytes": parameter_bytes,
            "gradient_bytes": parameter_bytes,
            "state_bytes": 8 if parameter_bytes == 4 else 12,
            "shard_bytes": parameter_bytes,
            "other_bytes": 0,
            "live_parameters": 0,
            "optimizer_seconds": seconds.get(("optimizer",), 0.0) * world,
            "step_seconds": seconds.get(("other",), 0.0),
        },
        "regions": [
            {
                "name": regions[g]["name"] or measure.ROOT,
                "trainable": regions[g]["trainable_bytes"] / parameter_bytes,
                "frozen": (regions[g]["bytes"] - regions[g]["trainable_bytes"]) / parameter_bytes,
                "forward_flops": 0,
                "backward_flops": 0,
                "activation_bytes": 0,
                "stays": g not in gathers,
                "forward_seconds": seconds.get(("compute", "forward", g), 0.0) / micro_batches,
                "backward_seconds": seconds.get(("compute", "backward", g), 0.0) / micro_batches,
            }
            for g in order
        ],
        "notes": notes,
    }


def _of_process(file: TraceFile, process: int) -> tuple[dict[int, dict], list[measure.Mark], set[int]]:
    """Its regions by number; marks as watch.py makes them; the regions that were unsharded in a backward.

    A use is told by the wait for it: the first use of a region in a step by its first wait there, and so on, since the host
    may be far ahead. Where the model computes on a device, waits alone have its times. Of a step the last backward's computing,
    the optimizer and what comes before the first forward are one piece then."""
    regions = {r["number"]: r for r in _trace.file_regions(file.handle, process) if r["bytes"]}
    events: list[Event] = sorted(_trace.file_events(file.handle, process))
    on_device = any(kind == "stall" for _, _, kind, *_ in events)
    uses: dict[tuple[int, int], list[int]] = {}  # of each region and step: whether it is a backward's
    for _, _, kind, _, region, backward, step in events:
        if kind == "use":
            uses.setdefault((region, step), []).append(backward)
    unsharded = {region for (region, _), which in uses.items() if any(which)}
    marks: list[measure.Mark] = []
    last_step = None
    for time_ns, duration_ns, kind, cause, region, _, step in events:
        begin, end = time_ns / 1e9, (time_ns + duration_ns) / 1e9
        if kind == ("stall" if on_device else "host_wait") and cause in ("", "host_computes"):
            left = uses.get((region, step), [])
            if not left or region not in regions:
                continue
            if on_device and last_step not in (None, step):
                marks.append(("optimizer", -1, begin, begin, 0.0))
            last_step = step
            marks.append(("backward" if left.pop(0) else "forward", region, begin, end, end - begin))
        elif on_device or not marks:
            continue
        elif kind in ("reduce_scatter", "host_wait"):  # of the group before; for an agreement
            marks.append(("reduce" if kind == "reduce_scatter" else "wait", marks[-1][1], begin, end, end - begin))
        elif kind == "step":
            marks.append(("optimizer", -1, max(mark[3] for mark in marks[-2:]), begin, 0.0))
    return regions, marks, unsharded
