"""Collectives over torch.distributed run Python on the device's streams (transport.c). So a call of PyTorch's that waits
for the device and keeps the GIL would wait for ever: it waits here before, without the GIL."""

from __future__ import annotations

import functools
from typing import Any

import torch


def wait_without(device: torch.device) -> None:
    """Around the copy of a storage, by which torch.save reads what is on the device. Once is enough."""
    original = torch.UntypedStorage.copy_
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def copy_(self: torch.UntypedStorage, source: Any, *args: Any, **kwargs: Any) -> Any:
        if device.type in (self.device.type, source.device.type):
            torch.get_device_module(device).current_stream(device).synchronize()
        return original(self, source, *args, **kwargs)

    torch.UntypedStorage.copy_ = copy_
