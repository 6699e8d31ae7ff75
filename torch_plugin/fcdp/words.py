"""What FCDP writes to stderr. A job whose stderr takes nothing (a full disk, a closed descriptor) goes on without."""

import contextlib
import sys


def write(text: str) -> None:
    """One line, at once."""
    if sys.stderr is None:  # print() would take stdout for it
        return
    with contextlib.suppress(OSError, ValueError):  # ValueError: it is closed
        print(f"fcdp: {text}", file=sys.stderr, flush=True)
