"""Failures of the core, as the exceptions that a training script sees."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fcdp import _fcdp, shard_groups


def call(function: Callable, *args: Any) -> Any:
    """A method of the core's objects."""
    try:
        return function(*args)
    except _fcdp.Error as error:
        if error.args[1] == _fcdp.ERR_NO_DEVICE_MEM:
            # As FSDP's own gathers, in the words that scripts look for when they try a smaller batch.
            raise torch.OutOfMemoryError(f"CUDA out of memory. fcdp: {error.args[0]}") from None
        raise RuntimeError(f"fcdp: {error.args[0]}{_missing(error)}") from None


def _missing(error: _fcdp.Error) -> str:
    """Which ranks did not come, for a failure of collectives that do not say so themselves; else ""."""
    if error.args[1] not in (_fcdp.ERR_TIMEOUT, _fcdp.ERR_PEER, _fcdp.ERR_TRANSPORT):
        return ""
    for shards in shard_groups.served():
        try:
            shards.comm.check()
        except _fcdp.Error:
            if who := shards.missing():
                return f"; {who}"
    return ""
