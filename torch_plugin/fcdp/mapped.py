"""The groups that FCDP_HOST_MAP names: the device reads them in host memory, and they take none of its own. Which groups
they are is decided here; what that means is the core's (tiering/mapped.h)."""

from __future__ import annotations

import hashlib
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from fcdp import _fcdp, words

if TYPE_CHECKING:
    from fcdp.c10d import Shards

_MAPPED, _REFUSED, _OTHER = range(3)
_patterns: list[str] = []  # of FCDP_HOST_MAP
_names: list[str] = []  # of the groups that this rank has met


def digest(names: str) -> int:
    """Of the option's value, which the ranks compare; 0: it is not set."""
    return int.from_bytes(hashlib.blake2b(names.encode(), digest_size=7).digest(), "little") | 1 if names else 0


def is_named(name: str, pattern: str) -> bool:
    """Is it a group's name, or the end of it behind a dot? The root's is (root), as in a plan."""
    name = name or "(root)"
    return name == pattern or fnmatchcase(name, pattern) or fnmatchcase(name, f"*.{pattern}")


def map_groups(shards: Shards, groups: list[tuple[str, _fcdp.Group | None]], names: str) -> None:
    """Map those of `groups` that `names` (FCDP_HOST_MAP) names: each on all ranks of the shard group, or on none, with
    one line that says why. They are attached; None: plain FSDP gathers it. Collective where `names` is not empty; the
    same on every rank."""
    global _patterns
    _patterns = [pattern.strip() for pattern in names.split(",") if pattern.strip()]
    if not _patterns:
        return
    _names.extend(name for name, _ in groups)
    here, text = bytearray([_OTHER] * len(groups)), ""
    for i, (name, handle) in enumerate(groups):
        if not any(is_named(name, pattern) for pattern in _patterns):
            continue
        try:
            here[i], why = _REFUSED, "FCDP does not serve it"
            if handle is not None:
                handle.map_host()
                here[i], why = _MAPPED, ""
        except _fcdp.Error as error:
            why = str(error.args[0])
        text = text or why
    agreed = shards.agree(bytes(here))
    problem = None
    try:
        for (_, handle), mine, worst in zip(groups, here, agreed):
            if mine == _MAPPED != worst:
                handle.unmap_host()
    except _fcdp.Error as error:
        problem = error.with_traceback(None)
    shards.raise_together(problem)
    refused = [name for (name, _), worst in zip(groups, agreed) if worst == _REFUSED]
    if refused:
        why = shards.first_problem(text)
        are = "are" if len(refused) > 1 else "is"
        _say(f"{_listed(refused)} {are} not mapped, and served as without it ({why})", shards.ranks[0])


def say_unmatched() -> None:
    """After a step, when the groups are known: one line for each pattern that names none of this rank's."""
    for pattern in _patterns:
        if not any(is_named(name, pattern) for name in _names):
            _say(f"rank 0 has no group that is called '{pattern}'; it has {_listed(_names)}", 0)


def _listed(names: list[str]) -> str:
    """At most eight of them."""
    quoted = [f"'{name or '(root)'}'" for name in names[:8]]
    return ", ".join(quoted) + (", ..." if len(names) > 8 else "")


def _say(text: str, speaker: int) -> None:
    words.once(f"FCDP_HOST_MAP: {text}", speaker)
