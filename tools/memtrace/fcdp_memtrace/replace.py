"""Files that are written whole, or not at all."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator

from fcdp_memtrace import _trace


def _refuse_inputs(path: str, inputs: tuple[str, ...]) -> None:
    for one in inputs:
        if os.path.exists(path) and os.path.exists(one) and os.path.samefile(path, one):
            raise _trace.Error(f"{path} is the file that is read: name another one with -o")


@contextlib.contextmanager
def replacing(path: str, *inputs: str) -> Iterator[str]:
    """Yields the name of a file beside `path`, which takes its place when the block ends. If the block fails, `path`
    stays as it was. What is no file (a pipe, /dev/null) is written itself. None of `inputs` is replaced."""
    _refuse_inputs(path, inputs)
    target = os.path.realpath(path)
    if os.path.exists(target) and not os.path.isfile(target):
        yield path
        return
    folder, name = os.path.split(target)
    part = os.path.join(folder, f".{os.getpid()}.{name}")
    try:
        yield part
        if os.path.exists(target):
            shutil.copymode(target, part)
        os.replace(part, target)
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.unlink(part)
        if isinstance(error, OSError):
            raise _trace.Error(f"cannot write {path}: {error.strerror}") from None
        raise
