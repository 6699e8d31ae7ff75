"""FCDP's statistics: `fcdp.stats()`, the line after the first step, the two at exit. The core counts its own gathers
and collectives; this file adds those that FSDP made itself, and agreements."""

from __future__ import annotations

import sys
from typing import Any

from fcdp import unserved, words

_KINDS = ("calls", "inter_bytes_sent", "intra_bytes_sent")
_MOVES = "h2d_bytes d2h_bytes stores slice_loads whole_loads evictions maps memory_waits plans surprises drops".split()


def _counts(values: Any) -> dict[str, int]:
    return dict(zip(_KINDS, values))


def _nothing_yet() -> dict[str, Any]:
    return {
        "enabled": False,
        "driver": None,
        "policy": None,
        "plan": None,
        "topology": None,
        "transport": None,
        "collectives": {},
        "moves": dict.fromkeys(_MOVES, 0),
        "gathers": {"made": 0, "avoided": 0, "forward": 0, "backward": 0, "late": 0, "plain": 0},
        "wholes": {"cached": 0, "gathered": 0, "plain": 0},
        "groups": [],
        "device_bytes": {"current": 0, "peak": 0, "budget": 0},
        "host_bytes": {"current": 0, "peak": 0},
        "host": {},
        "cache": {"read_bytes": 0, "written_bytes": 0, "failures": 0},
        "reductions": {"hierarchical": 0, "flat": 0, "kept": 0, "reasons": [], "rounding_error": None},
        "spill": {"bytes": 0, "written_bytes": 0, "read_bytes": 0, "failures": 0, "waits": 0, "wait_seconds": 0.0},
        "deltas": {"gathers": 0, "whole": 0, "by_device": 0, "rounding_error": None},
        "asleep": False,
        "asleep_bytes": 0,
        "bypassed": [],
        "saved": {"plain_bytes": 0, "gather_bytes": 0, "beside_bytes": 0},
        "waits": {"gathers": 0, "seconds": 0.0, "pages": 0, "page_seconds": 0.0, "agreements": 0},
        "python_calls": 0,
    }


def stats() -> dict[str, Any]:
    out = _nothing_yet() | {"bypassed": unserved.entries()}
    sleeping = sys.modules.get("fcdp.sleeping")
    if sleeping is not None:
        out["asleep_bytes"] = sleeping.asleep_bytes()
    settings = sys.modules.get("fcdp.settings")
    if settings is None or not settings.options:
        return out
    from fcdp import _fcdp, bypassed, group, plain, planned, reduce, shard_groups, whole
    from fcdp.runtime import runtime

    out |= {
        "reductions": reduce.counts(),
        "enabled": True,
        "plan": dict(planned.state) if planned.state else None,
        "collectives": {kind: _counts(values) for kind, values in plain.counts.items()},
        "gathers": out["gathers"] | {"plain": plain.counts["plain_gather"][0]},
        "wholes": {
            "cached": whole.counts[_fcdp.WHOLE_HOST] + whole.counts[_fcdp.WHOLE_FRESH],
            "gathered": whole.counts[_fcdp.WHOLE_STALE],
            "plain": whole.counts[_fcdp.WHOLE_PLAIN],
        },
        "saved": out["saved"] | {"beside_bytes": plain.beside_bytes},
        "bypassed": out["bypassed"] + [dict(entry) for entry in bypassed.groups],
    }
    if runtime.engine is None:
        return out
    core = runtime.engine.stats()
    served = shard_groups.served()
    if served:
        by_gloo = _fcdp.LANE_NODE in served[0].lanes
        out["topology"], out["transport"] = dict(served[0].topology), "gloo" if by_gloo else "nccl"
    out["driver"], out["policy"] = core["driver"], core["policy"]
    out["asleep"] = runtime.engine.is_asleep()
    out["collectives"]["gather"], out["collectives"]["restore"] = _counts(core["gather"]), _counts(core["restore"])
    out["collectives"]["agree"] = _counts(shard_groups.agreed())
    for key in ("gathers", "saved"):
        out[key] |= core[key]
    out["waits"], out["python_calls"] = core["waits"], _fcdp.python_calls()
    out["waits"]["agreements"] = out["collectives"]["agree"]["calls"]
    for key in ("moves", "device_bytes", "host_bytes", "host", "cache", "spill", "deltas"):
        out[key] = core[key]
    lost, rounded = out["deltas"].pop("lost"), out["deltas"].pop("rounded")
    out["deltas"]["rounding_error"] = (lost / rounded) ** 0.5 if rounded else None
    groups = (
        {**one.handle.stats(), "id": id_, "ranks_per_node": one.shards.node_size}
        for id_, one in list(group.by_id.items())
    )
    out["groups"] = sorted(groups, key=lambda entry: entry["name"])  # those of one name in the order of their making
    return out


def reset_peaks() -> None:
    from fcdp.runtime import runtime

    if runtime.engine is not None:
        runtime.engine.reset_peaks()


def _human(bytes_: float) -> str:
    for unit in ("B", "KB", "MB", "GB"):
        if bytes_ < 1000:
            return f"{bytes_:.3g} {unit}"
        bytes_ /= 1000
    return f"{bytes_:.3g} TB"


_has_said = False  # that it serves


def say_once() -> None:
    """One line from rank 0 when the first step is over, since a killed job never reaches its exit."""
    global _has_said
    from fcdp import bypassed, group, mapped, planned, steps
    from fcdp.runtime import runtime
    from fcdp.settings import options
    from fcdp.tree import in_backward

    if _has_said or runtime.engine is None or not steps.n_made or in_backward():
        return
    saved = stats()["saved"]
    plain, sent = saved["plain_bytes"], saved["gather_bytes"]
    if not plain:  # nothing has been gathered yet
        return
    _has_said = True
    mapped.say_unmatched()
    if not options["summary"]:
        return
    n, share = len(group.by_id), 100 * (1 - sent / plain)
    served = [one.handle.stats() for one in list(group.by_id.values())]
    cached, in_file = sum(one["bytes"] for one in served), [one["bytes"] for one in served if one["in_file"]]
    again = sum(entry.get("bytes", 0) for entry in bypassed.groups)
    parts = (
        f", {_human(cached)} of parameters; plain FSDP gathers the other {_human(again)} at each use" if again else ""
    )
    files = f", {len(in_file)} of them ({_human(sum(in_file))}) in FCDP_SPILL_DIR" if in_file else ""
    alone = [one["bytes"] for one in served if one["tier"] == "mapped"]
    on_host = f", {len(alone)} of them ({_human(sum(alone))}) in host memory alone (FCDP_HOST_MAP)" if alone else ""
    plan = ", as its plan says" if planned.state and planned.state["followed"] else ""
    words.say(
        f"serving {n} of {n + len(bypassed.groups)} groups{files}{on_host}{parts}{plan}; "
        f"gathers sent {abs(share):.0f} % {'less' if share >= 0 else 'more'} between nodes so far"
    )


def summary() -> None:
    """Two lines from rank 0: what was saved, what it cost."""
    from fcdp.settings import options

    if not options.get("summary"):
        return
    now = stats()
    gathers = now["gathers"]
    if not gathers["made"] + gathers["avoided"]:
        return
    plain, sent = now["saved"]["plain_bytes"], now["saved"]["gather_bytes"]
    beside = (
        f"; beside that, plain FSDP gathered {_human(now['saved']['beside_bytes'])} in {gathers['plain']} gathers"
        if gathers["plain"]
        else ""
    )
    share = f"{100 * (1 - sent / plain):.1f} % fewer" if plain else "nothing gathered"
    words.say(
        f"saved {_human(plain - sent)} between nodes per node: gathers sent {_human(sent)} instead of {_human(plain)} ({share}); "
        f"{gathers['avoided']} of {gathers['made'] + gathers['avoided']} gathers did not leave the node{beside}"
    )
    words.say(
        f"cost {_human(now['host_bytes']['peak'])} of host memory per node, {_human(now['device_bytes']['peak'])} of device memory at most; "
        f"moved {_human(now['moves']['h2d_bytes'])} to the device and {_human(now['moves']['d2h_bytes'])} to the host"
        f"{_disk(now['spill'])}{_cache(now['cache'])}"
    )

    error = now["deltas"]["rounding_error"]
    if error is not None:
        words.say(
            f"parameters were rounded for their gathers (FCDP_CODEC=int8): by {100 * error:.2g} %, root mean square"
        )
    error = now["reductions"]["rounding_error"]
    if error is not None:
        words.say(f"gradients were rounded between nodes (FCDP_REDUCE_DTYPE): by {100 * error:.2g} %, root mean square")


def _cache(cache: dict[str, Any]) -> str:
    if not any(cache.values()):
        return ""
    lost = (
        f"; {cache['failures']} of them could not be written, or were damaged, and are gathered"
        if cache["failures"]
        else ""
    )
    return (
        f"; of this rank's slices of frozen parameters {_human(cache['read_bytes'])} came from FCDP_CACHE_DIR "
        f"and {_human(cache['written_bytes'])} were written there{lost}"
    )


def _disk(spill: dict[str, Any]) -> str:
    if not spill["bytes"] and not spill["written_bytes"]:
        return ""
    lost = (
        f"; its disk failed {spill['failures']} times, and what was lost was gathered again"
        if spill["failures"]
        else ""
    )
    return (
        f"; of this rank's slices {_human(spill['written_bytes'])} were written to FCDP_SPILL_DIR and {_human(spill['read_bytes'])} read, "
        f"for which the host waited {spill['wait_seconds']:.2f} s{lost}"
    )
