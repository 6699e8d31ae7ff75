"""`fcdp.sleep()`, `fcdp.wake()`, `fcdp.tag()`: device memory that another program uses for a while."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator

from fcdp import _fcdp

_one_at_a_time = threading.Lock()
_tags: dict[str, int] = {}  # name -> what the core calls it; 0 is that of tensors without one


def _engine() -> _fcdp.Engine | None:
    module = sys.modules.get("fcdp.runtime")
    return module.runtime.engine if module is not None else None


def _stream() -> int:
    """The current one, of the engine's device."""
    from fcdp import seam

    return seam.stream_of(seam.runtime.device)


def _number(name: str | None) -> int | None:
    if name is not None and name not in _tags:
        raise ValueError(f"no tensor was allocated under fcdp.tag({name!r})")
    return None if name is None else _tags[name]


@contextlib.contextmanager
def tag(name: str) -> Iterator[None]:
    with _one_at_a_time:
        number = _tags.setdefault(name, len(_tags) + 1)
    before = _fcdp.tensors_tag(number)
    try:
        yield
    finally:
        _fcdp.tensors_tag(before)


def sleep(name: str | None) -> dict[str, int]:
    number, engine = _number(name), _engine()
    with _one_at_a_time:
        _fcdp.tensors_check_capture()  # of any stream; the engine looks at the current one
        before = asleep_bytes()
        slept = number is None and engine is not None and engine.sleep(_stream())
        try:
            return _fcdp.tensors_sleep(number)
        except _fcdp.Error:
            # tensors that could not be woken have no bytes yet: their modules must not be gathered from them
            if slept and engine is not None and asleep_bytes() <= before:
                engine.wake()
            raise


def wake(name: str | None, keep: bool) -> dict[str, int]:
    number, engine = _number(name), _engine()
    with _one_at_a_time:
        woken = _fcdp.tensors_wake(number, keep)
        if number is None and engine is not None:
            engine.wake()
    return woken


def asleep_bytes() -> int:
    """Of tensors on all devices, those whose pages are away."""
    devices = [_fcdp.tensors_stats(device) for device in range(_fcdp.TENSORS_MAX_DEVICES)]
    pools = [one[pool] for one in devices if one for pool in ("large_pool", "small_pool")]
    return sum(pool["asleep_bytes"] for pool in pools)
