"""Decides for each parameter group under one root who gathers it, FCDP or FSDP itself, and says so once.

What a parameter group is differs between FSDP1 and FSDP2: a `Framework` has what is asked of one. Decided is
an attribute of the group's: `_fcdp`, its group.Group, or None where FSDP gathers it, with the reason in
`_fcdp_bypass`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from fcdp import OptionError, bypassed, planned, settings, shard_groups
from fcdp.c10d import Shards, Unsupported
from fcdp.group import Description, Group, attach
from fcdp.tree import Tree


@dataclass(frozen=True)
class Framework:
    """Each function takes a parameter group."""

    label: str
    why_not: Callable[[Any], str | None]  # None: FCDP serves it
    process_group: Callable[[Any], dist.ProcessGroup]  # over which it is sharded
    name: Callable[[Any], str]
    describe: Callable[[Any], Description]
    take: Callable[[Any, Group, torch.device], None]  # it is served from here on
    parameters: Callable[[Any], Iterable[tuple[int, int, bool]]]  # elements, gathered bytes of each, requires_grad
    modules: Callable[[Any], Iterable[torch.nn.Module]]  # whose parameters are its own


def tree_of(param_group: Any) -> Tree:
    """What lies under the group's root; the group alone where it is unsharded by hand before any forward."""
    tree = param_group.__dict__.get("_fcdp_tree")
    if tree is None:
        tree = param_group._fcdp_tree = Tree([param_group])
    return tree


def is_decided(param_group: Any) -> bool:
    return "_fcdp" in param_group.__dict__


def adopt(
    fsdp: Framework,
    param_groups: list[Any],
    process_group: dist.ProcessGroup,
    device: torch.device,
    gather: Callable[[], None],
) -> None:
    """Decide for every group of `param_groups` that is sharded over `process_group`. Collective. `gather` carries
    out the gather that FSDP is at, to its end: it is called where the ranks must meet in it first (presence.py)."""
    settings.settle()
    serve = []
    for param_group in param_groups:
        if is_decided(param_group):
            continue
        reason = fsdp.why_not(param_group)
        if reason is None and fsdp.process_group(param_group) is not process_group:
            continue  # its own turn will come
        if reason is None:
            param_group._fcdp = None
            serve.append(param_group)
        else:
            bypass(fsdp, param_group, reason)
    if serve:
        served = (param_group.__dict__.get("_fcdp") for param_group in param_groups)
        beside = next((group.shards for group in served if group is not None), None)
        _serve(fsdp, serve, param_groups, process_group, device, gather, beside)
    report(fsdp, param_groups)


def bypass(fsdp: Framework, param_group: Any, reason: str) -> None:
    param_group._fcdp, param_group._fcdp_bypass = None, reason
    bypassed.add(fsdp.name(param_group), reason, _size(fsdp, param_group))


def _size(fsdp: Framework, param_group: Any) -> tuple[int, int] | None:
    """Its bytes, and the trainable ones of them; None where this torch does not tell: a figure stops no job."""
    try:
        parameters = list(fsdp.parameters(param_group))
    except Exception:
        return None
    return sum(n * size for n, size, _ in parameters), sum(n * size for n, size, trainable in parameters if trainable)


def _counted(fsdp: Framework, param_groups: list[Any]) -> list[tuple[str, int, int]] | None:
    """Of each its name, trainable and frozen parameters; None as in _size."""
    out = []
    for param_group in param_groups:
        try:
            parameters = list(fsdp.parameters(param_group))
        except Exception:
            return None
        trainable = sum(n for n, _, is_trainable in parameters if is_trainable)
        out.append((fsdp.name(param_group), trainable, sum(n for n, *_ in parameters) - trainable))
    return out


def _split_layers(fsdp: Framework, param_groups: list[Any]) -> dict[str, int]:
    """Names of layers that fcdp.split() has split, and how many of their parts are parameter groups."""
    module = sys.modules.get("fcdp.splitting")
    out: dict[str, int] = {}
    for param_group in param_groups if module else ():
        if any(isinstance(one, module.SplitPart) for one in fsdp.modules(param_group)):
            layer = fsdp.name(param_group).rpartition(".parts.")[0]
            out[layer] = out.get(layer, 0) + 1
    return out


def report(fsdp: Framework, param_groups: list[Any]) -> None:
    """`param_groups`: all of one tree."""
    left = [(fsdp.name(group), group._fcdp_bypass) for group in param_groups if "_fcdp_bypass" in group.__dict__]
    bypassed.say(left, len(param_groups), all(map(is_decided, param_groups)), fsdp.label)


def _serve(
    fsdp: Framework,
    serve: list[Any],
    param_groups: list[Any],
    process_group: dist.ProcessGroup,
    device: torch.device,
    gather: Callable[[], None],
    beside: Shards | None,
) -> None:
    """All of `serve`, those for which host memory has room, or none. Collective. `param_groups`: all of the tree.
    `beside`: of groups of the same tree."""
    try:
        shards = shard_groups.connect(process_group, device, gather, beside)
        prefetch = settings.options["prefetch"]
        found = planned.tiers(
            len(param_groups),
            lambda: _counted(fsdp, param_groups),
            prefetch,
            lambda: _split_layers(fsdp, param_groups),
        )
        tier_of = dict(zip(map(id, param_groups), found))
        tiers = planned.agreed(shards, [tier_of[id(param_group)] for param_group in serve])
        groups, no_room = attach(shards, [fsdp.describe(param_group) for param_group in serve], tiers)
    except OptionError:  # the job stops; whoever catches it and goes on meets it again
        for param_group in serve:
            del param_group._fcdp
        raise
    except Unsupported as error:
        for param_group in serve:
            bypass(fsdp, param_group, str(error))
        return
    for param_group, group, tier in zip(serve, groups, tiers):
        if group is None:
            bypass(fsdp, param_group, planned.GATHERED if tier == planned.GATHER else no_room)
            continue
        param_group._fcdp = group
        fsdp.take(param_group, group, device)
    for param_group in serve:
        tree_of(param_group).enter()
