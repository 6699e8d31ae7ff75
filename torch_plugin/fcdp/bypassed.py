"""The parameter groups that FCDP leaves to FSDP, and what it says of them."""

from __future__ import annotations

from collections import Counter
from typing import Any

from fcdp import _fcdp, words

groups: list[dict[str, Any]] = []  # for fcdp.stats()["bypassed"]

_said: set[frozenset[str]] = set()  # sets of reasons
_waiting: tuple[list[tuple[str, str]], int, str] | None = None


def add(name: str, reason: str, size: tuple[int, int] | None = None) -> None:
    """The group is FSDP's own from here on. `size`: its bytes, and the trainable ones of them."""
    figures = dict(zip(("bytes", "trainable_bytes"), size)) if size else {}
    groups.append({"group": name, "reason": reason, **figures})
    _fcdp.trace_bypass(name, reason, *(size or (0, 0)))


def say(bypassed: list[tuple[str, str]], n_groups: int, complete: bool, fsdp: str) -> None:
    """One line about the (name, reason) left to `fsdp` ("FSDP2") of a model's `n_groups`, once for each set of
    reasons. Not `complete`: others are decided later, and what is said waits for them, or for the exit."""
    global _waiting
    _waiting = None
    reasons = Counter(reason for _, reason in bypassed)
    if not bypassed or frozenset(reasons) in _said:
        return
    if not complete:
        _waiting = bypassed, n_groups, fsdp
        return
    _said.add(frozenset(reasons))
    why = "; ".join(reason if len(reasons) == 1 else f"{reason} ({count})" for reason, count in reasons.items())
    names = ", ".join(name or "the root group" for name, _ in bypassed[:3]) + (", ..." if len(bypassed) > 3 else "")
    served = n_groups - len(bypassed)
    words.say(f"served {served} of {n_groups} groups: {why}; plain {fsdp} runs" + (f" for {names}" if served else ""))


def say_rest() -> None:
    """At the exit: no more groups will be decided on."""
    if _waiting is not None:
        bypassed, n_groups, fsdp = _waiting
        say(bypassed, n_groups, True, fsdp)
