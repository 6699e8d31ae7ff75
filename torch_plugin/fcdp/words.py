"""FCDP's lines on stderr. A job goes on without them if its stderr takes nothing (a full disk, a closed descriptor)."""

import contextlib
import os
import sys

level = 1  # FCDP_LOG, once it is read (settings.py); 0: quiet
_said_once: set[str] = set()


def write(text: str) -> None:
    """One line, at once."""
    if sys.stderr is None:  # print() would use stdout instead
        return
    with contextlib.suppress(OSError, ValueError):  # ValueError: it is closed
        print(f"fcdp: {text}", file=sys.stderr, flush=True)


def say(text: str, speaker: int = 0) -> None:
    """One line to the user, from one rank alone, unless FCDP_LOG=quiet."""
    dist = sys.modules.get("torch.distributed")
    has_rank = dist is not None and dist.is_available() and dist.is_initialized()
    rank = dist.get_rank() if has_rank else int(os.environ.get("RANK", "0"))
    if rank == speaker and level > 0:
        write(text)


def once(text: str, speaker: int = 0) -> None:
    """As say(), but what has been said is not said again: each model of a job may meet the same."""
    if text not in _said_once:
        _said_once.add(text)
        say(text, speaker)
