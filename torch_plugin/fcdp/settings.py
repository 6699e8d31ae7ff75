"""Reads the options: when FSDP is imported, since a wrong one must stop the job early; and again at the first gather,
since a script may set them itself until then. A warning names an option that is set too late."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from types import TracebackType
from typing import Any

from fcdp import OptionError, _fcdp, mapped, planned, tensors, words

options: dict[str, Any] = {}  # as last read; empty: FSDP has not been imported

_read: dict[str, str] = {}  # the variables that they are from
_settled = False


def _variables() -> dict[str, str]:
    """The options of FCDP that are set now, without those of the simulated device and of tools."""
    names = [name for name, _, fallback, *_ in _fcdp.options_table() if fallback]
    return {name: os.environ[name] for name in names if os.environ.get(name)}


def load() -> None:
    """Raises OptionError for a malformed FCDP_* variable, or plan."""
    global _read
    if _settled:
        return
    try:
        found: dict[str, Any] = {**_fcdp.options_load()}
        digests = {"plan_digest": planned.read(found["plan"]), "host_map_digest": mapped.digest(found["host_map"])}
        options.update(found | digests)
    except (_fcdp.Error, OptionError) as error:
        _print_refusals_in_a_line()
        raise OptionError(error.args[0]) from None
    words.level = options["log"]
    _read = _variables()


def _print_refusals_in_a_line() -> None:
    """Leave out the traceback: where an import or a forward met a wrong option does not help, and takes twenty lines."""
    earlier = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, OptionError):
            print(f"{kind.__module__}.{kind.__name__}: {error}", file=sys.stderr, flush=True)
        else:
            earlier(kind, error, trace)

    sys.excepthook = hook


def settle() -> None:
    """At the first gather: take the options as they are set now, except those that were used before."""
    global _settled
    if _settled:
        return
    before, used = _read, ["FCDP_ALLOC"]
    if os.environ.get("FCDP") == "0":
        used.append("FCDP")
    if _fcdp.trace_is_open():
        used += ["FCDP_TRACE", "FCDP_TRACE_BUFFER"]
    if tensors.is_current():  # their device may be there already
        used += ["FCDP_DEVICE_BUDGET", "FCDP_HEADROOM"]
    load()
    _settled = True
    if options["reduce"] == _fcdp.REDUCE_FLAT and options["reduce_dtype"] != _fcdp.REDUCE_DTYPE_SAME:
        words.say("FCDP_REDUCE_DTYPE has no effect without FCDP_REDUCE=hierarchical")
    _say_late(before, used, "FSDP was imported", "before that import")


def say_unread() -> None:
    """At the end: name the options that were set after settle()."""
    if _settled:
        _say_late(_read, sorted(_variables().keys() - {"FCDP"}), "the first forward", "before that")


def _say_late(before: dict[str, str], names: Iterable[str], when: str, earlier: str) -> None:
    """A removed option does not count: a script removes it from the environment of what it starts."""
    now = _variables()
    late = [f"{name}={now[name]}" for name in names if name in now and now[name] != before.get(name)]
    if late:
        words.say(
            f"{', '.join(late)} came after {when}, and has no effect; set it {earlier}, or in the job's environment"
        )
