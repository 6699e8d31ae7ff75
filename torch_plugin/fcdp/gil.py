"""Collectives over torch.distributed run Python on the device's streams (transport.c). So a call of PyTorch's that waits
for the device and keeps the GIL would wait for ever. Those that read a storage, by which torch.save and pickle read
what is on a device, do so here by tensors instead, whose copies wait without the GIL."""

from __future__ import annotations

import functools
from typing import Any

import torch


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def wait_without(device: torch.device) -> None:
    """Around the copy of a storage and its writing to a file. Once is enough."""
    copies, writes = torch.UntypedStorage.copy_, getattr(torch.UntypedStorage, "_write_file", None)
    if hasattr(copies, "__wrapped__"):
        return

    @functools.wraps(copies)
    def copy_(self: torch.UntypedStorage, source: Any, non_blocking: Any = None, *args: Any) -> Any:
        kinds = {self.device.type, source.device.type}
        if kinds != {"cpu", device.type} or self.nbytes() != source.nbytes() or args:
            return copies(self, source, non_blocking, *args)
        with torch.no_grad():
            _bytes_of(self).copy_(_bytes_of(getattr(source, "_untyped_storage", source)), bool(non_blocking))
        return self

    torch.UntypedStorage.copy_ = copy_
    if writes is None:
        return

    @functools.wraps(writes)
    def write_file(self: torch.UntypedStorage, *args: Any) -> Any:
        if self.device.type != device.type:
            return writes(self, *args)
        with torch.no_grad():
            return writes(_bytes_of(self).cpu().untyped_storage(), *args)

    torch.UntypedStorage._write_file = write_file
