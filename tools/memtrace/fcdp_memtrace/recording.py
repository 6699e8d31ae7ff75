"""fcdp.trace(): a process writes its own trace to a file."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from fcdp_memtrace import _trace


def expand(path: str) -> str:
    """%r is the rank, %p the process's id: ranks with one script write a file each."""
    return path.replace("%r", os.environ.get("RANK", "0")).replace("%p", str(os.getpid()))


@contextlib.contextmanager
def trace(path: str | os.PathLike[str]) -> Iterator[str]:
    """See fcdp.trace."""
    path = expand(os.fspath(path))
    recording = _trace.recording_start(_trace.recorder_create(path, [], [os.getpid()], True))
    try:
        yield path
    finally:
        _trace.recording_stop(recording)
