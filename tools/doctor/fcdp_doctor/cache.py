"""The frozen parameters that FCDP keeps on this node's disk (FCDP_CACHE_DIR): lists them, removes them."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import struct
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from fcdp import _fcdp
from fcdp_doctor import Failed

_HEADER = struct.Struct("<8sQ16sII256s")  # fcdp_cache_header in tiering/cache.h
_HEADER_PAGE = 4096
_MAGIC = b"FCDPFRZ1"
_ENTRY = re.compile(r"[0-9a-f]{32}\.frozen")


@dataclass
class Slice:
    name: str  # of the parameter group
    slice: int
    n_slices: int
    bytes: int
    used: str  # last, as ISO 8601
    file: str


def _read(path: Path) -> Slice | None:
    """None: its header says nothing, or it has gone."""
    try:
        with path.open("rb") as file:
            fields = _HEADER.unpack(file.read(_HEADER.size))
            state = os.fstat(file.fileno())
    except (OSError, struct.error):
        return None
    magic, n_bytes, _, index, n_slices, name = fields
    if magic != _MAGIC or state.st_size != n_bytes + _HEADER_PAGE:
        return None
    used = datetime.fromtimestamp(state.st_mtime).isoformat(sep=" ", timespec="minutes")
    return Slice(name.rstrip(b"\0").decode(errors="replace"), index, n_slices, state.st_size, used, path.name)


def _directory(given: str) -> Path:
    chosen = given or os.environ.get("FCDP_CACHE_DIR", "")
    if not chosen:
        raise Failed("which directory? Set FCDP_CACHE_DIR as for the job, or give it: fcdp-doctor --cache=DIR")
    directory = Path(chosen)
    if not directory.is_dir():
        raise Failed(f"{directory} is no directory: no job has kept anything there")
    return directory


def _limit(directory: Path, taken: int) -> tuple[int, str]:
    """The most that a job may keep there, and what sets it."""
    text = os.environ.get("FCDP_CACHE_SIZE") or "0"
    try:
        asked = _fcdp.size_parse(text)
    except _fcdp.Error as error:
        raise Failed(f"FCDP_CACHE_SIZE={text}: {error.args[0]}") from error
    if asked:
        return asked, "FCDP_CACHE_SIZE"
    disk = os.statvfs(directory)
    return (disk.f_bavail * disk.f_frsize + taken) // 2, "half of what the disk has free; FCDP_CACHE_SIZE sets it"


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """As jobs lock it while they count and make files: else one that is made now might not be locked yet."""
    try:
        lock = (directory / ".lock").open("ab")
    except OSError as error:
        raise Failed(
            f"{error.filename}: {error.strerror}. Nothing was removed: --clear needs to write there"
        ) from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError as error:
            raise Failed(f"{lock.name} cannot be locked: {error.strerror}. Nothing was removed") from error
        yield


def _clear(directory: Path, files: list[Path]) -> str:
    """What a job is writing stays. The directory is locked."""
    taken = 0
    for path in [*files, *directory.glob(".writing-*")]:
        try:
            with path.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                size = os.fstat(file.fileno()).st_size
                path.unlink()
                taken += size
        except BlockingIOError:
            continue
        except FileNotFoundError:
            continue
        except OSError as error:
            raise Failed(f"{path}: {error.strerror}. {_fcdp.size_text(taken)} were removed before it") from error
    return f"{directory}: {_fcdp.size_text(taken)} removed"


def _table(slices: list[Slice]) -> list[str]:
    """A line for each group, the one used last first."""
    groups: dict[tuple[str, int], list[Slice]] = {}
    for one in slices:
        groups.setdefault((one.name, one.n_slices), []).append(one)
    lines = [f"  {'size':>9}  {'last used':<16}  {'files':>5}  group"]
    for (name, _), its in sorted(groups.items(), key=lambda item: max(one.used for one in item[1]), reverse=True):
        size, used = _fcdp.size_text(sum(one.bytes for one in its)), max(one.used for one in its)
        lines.append(f"  {size:>9}  {used:<16}  {len(its):>5}  {name}")
    return lines


def show(given: str, clears: bool, as_json: bool) -> int:
    directory = _directory(given)
    try:
        files = sorted(path for path in directory.iterdir() if _ENTRY.fullmatch(path.name))
    except OSError as error:
        raise Failed(f"{directory}: {error.strerror}") from error
    if clears:
        with _locked(directory):
            print(_clear(directory, files))
        return 0
    slices = [one for one in map(_read, files) if one]
    taken = sum(one.bytes for one in slices)
    limit, why = _limit(directory, taken)
    if as_json:
        document: dict[str, Any] = {"directory": str(directory), "bytes": taken, "limit_bytes": limit}
        print(json.dumps(document | {"files": [asdict(one) for one in slices]}, indent=2))
        return 0
    print(f"{directory}: {_fcdp.size_text(taken)} in {len(slices)} files, at most {_fcdp.size_text(limit)} ({why})")
    if slices:
        print("\n".join(_table(slices)))
    return 0
