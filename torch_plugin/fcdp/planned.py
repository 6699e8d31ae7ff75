"""The plan that FCDP_PLAN names: where each parameter group lives between its uses. Read with the options, and compared
with each model that FCDP serves; what a tier means is the core's (tiering/tiers.h)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from fcdp import OptionError, _fcdp, words

if TYPE_CHECKING:
    from fcdp.c10d import Shards

POLICY, FILE, GATHER = "policy", "file", "gather"
TIERS = (POLICY, "device", "host", "host-whole", FILE, GATHER)
GATHERED = "its plan (FCDP_PLAN) has it gathered for each use"

state: dict[str, Any] | None = None  # for fcdp.stats()["plan"]

_plan: dict[str, Any] | None = None


def read(path: str) -> int:
    """Read the plan; "": there is none. Returns a digest of what it decides, which the ranks compare, since the tiers
    decide which collectives they make; 0: no plan. Raises OptionError for a file that is none."""
    global _plan, state
    _plan, state = None, None
    if not path:
        return 0
    from fcdp_plan import plan_file  # in the wheel; of use here alone
    from fcdp_plan.failure import Error

    try:
        _plan = plan_file.read(path)
    except Error as error:
        raise OptionError(f"FCDP_PLAN: {error}; fcdp-plan search PROFILE -o FILE writes a plan") from None
    state = {"path": path, "followed": False, "difference": None}
    decides = json.dumps(_plan["regions"], sort_keys=True).encode()
    return int.from_bytes(hashlib.blake2b(decides, digest_size=7).digest(), "little") | 1


def tiers(
    n_groups: int,
    counted: Callable[[], list[tuple[str, int, int]] | None],
    prefetch: int,
    split: Callable[[], dict[str, int]] = dict,
) -> list[str]:
    """The tier of each group of a model. `counted`: their names, trainable and frozen parameters, all under one root;
    None where this torch does not tell. `split`: in how many parts its split layers are, by their names. POLICY for all
    of them where there is no plan, or it is of another model, or layers are split otherwise than it says."""
    if _plan is None or state is None:
        return [POLICY] * n_groups
    regions, groups = _plan["regions"], counted()
    if groups is None:
        difference = "this torch does not tell how many parameters the model's groups have"
        return _unplanned(n_groups, f"is not followed: {difference}", difference)
    try:
        region_of = _fcdp.match_plan([(r["name"], r["trainable"], r["frozen"]) for r in regions], groups)
    except (_fcdp.Error, ValueError) as error:  # match_plan's ValueError: a name with a zero byte
        difference = _split_otherwise(_plan.get("splits", []), split())
        if difference:
            return _unplanned(n_groups, f"is not followed: {difference}", difference)
        return _unplanned(n_groups, f"is of another model: {error.args[0]}", str(error.args[0]))
    if _plan.get("prefetch", prefetch) != prefetch:
        say(f"was made for FCDP_PREFETCH={_plan['prefetch']}, which is {prefetch} here; it is followed all the same")
    return [regions[r]["tier"] for r in region_of]


def _split_otherwise(planned: list[dict[str, Any]], found: dict[str, int]) -> str | None:
    """The first layer that is in other parts than planned. A plan that was made of a model's shape has names of its own:
    it may mean any layer in as many parts."""
    left, missing = dict(found), []
    for one in planned:
        if left.get(one["layer"]) == one["parts"]:
            del left[one["layer"]]
        else:
            missing.append(one)
    for one in missing:
        same = next((name for name, n in left.items() if n == one["parts"]), None)
        if same is not None:
            del left[same]
            continue
        from fcdp_plan import splits

        has = "it whole"
        if left:
            name = one["layer"] if one["layer"] in left else min(left)
            has = f"{'it' if name == one['layer'] else name} in {left[name]}"
        do = " ".join(" ".join(splits.lines([one])).split())
        return f"it has the layer {one['layer']} in {one['parts']} parts, and the model has {has}: {do}"
    return next((f"the model has the layer {name} in {n} parts, and it has not" for name, n in left.items()), None)


def agreed(shards: Shards, tiers: list[str]) -> list[str]:
    """`tiers`, if all ranks of the shard group have found the same ones, else POLICY: the plans are alike, and a model
    may still differ between its ranks. Collective where there is a plan."""
    if state is None:
        return tiers
    mine = bytes(map(TIERS.index, tiers))
    most = shards.agree(mine + bytes(255 - n for n in mine))
    if all(a + b == 255 for a, b in zip(most, most[len(mine) :])):
        state["followed"] |= {*tiers} != {POLICY}
        return tiers
    difference = "the model differs between the ranks"
    return _unplanned(len(tiers), f"is not followed: {difference}", difference)


def _unplanned(n_groups: int, text: str, difference: str) -> list[str]:
    assert state is not None
    state["difference"] = state["difference"] or difference
    say(f"{text}; so policy decides where its groups live")
    return [POLICY] * n_groups


def say(text: str) -> None:
    """One line of the plan, once."""
    words.once(f"FCDP_PLAN={state['path'] if state else ''} {text}")
