"""FCDP's lines on stderr. A job goes on without them if its stderr takes nothing (a full disk, a closed descriptor)."""

import contextlib
import sys


def write(text: str) -> None:
    """One line, at once."""
    if sys.stderr is None:  # print() would use stdout instead
        return
    with contextlib.suppress(OSError, ValueError):  # ValueError: it is closed
        print(f"fcdp: {text}", file=sys.stderr, flush=True)
