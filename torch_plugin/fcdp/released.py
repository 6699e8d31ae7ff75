"""A gathered parameter's storage raises while its region is released, as plain FSDP2's does once it is freed.

FSDP2 frees the storages of a resharded parameter, and torch raises on most uses of what still points there:
tensors that autograd saved (`set_unshard_in_backward(False)`), views that outlive the reshard. FCDP's
storages keep their address and size for life. Their pages may be gone, which faults, or kept (FCDP_TAU),
which would be read without an error. So torch is told to raise, with the parameter's name.

It cannot see what goes around the storage: a numpy array, a DLPack export, an address. Those fault where the
pages are gone (tiering/segv.h says what that was), and read a kept region. So does everything on a torch
without these functions (before 2.15).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

_close = getattr(torch._C, "_set_storage_data_ptr_access_error_msg", None)
_open = getattr(torch._C, "_clear_storage_data_ptr_access_error_msg", None)
SUPPORTED = _close is not None and _open is not None


def _text(name: str) -> str:
    return (
        f"fcdp: the gathered parameter {name} was used while it is sharded, and its memory is released. A tensor or view of it outlived its "
        "reshard, or set_unshard_in_backward(False) left it sharded: call unshard() on its module first, or clone() what must outlive the reshard"
    )


class Storages:
    """Those of one group, closed from the start: an access raises RuntimeError until `open`, and again after
    `close`. A pair costs 0.4 to 0.6 us a storage. Whoever unshards opens once the bytes are in place, whoever
    reshards closes before they may go."""

    def __init__(self, tensors: Iterable[torch.Tensor], names: Iterable[str]):
        # An empty parameter has nothing to be read. The storages are held: `_cdata` is an address.
        self._closable = [
            (t.untyped_storage(), _text(name)) for t, name in zip(tensors, names) if t.numel() and SUPPORTED
        ]
        self.close()

    def open(self) -> None:
        for storage, _ in self._closable:
            _open(storage._cdata)

    def close(self) -> None:
        for storage, text in self._closable:
            _close(storage._cdata, text)
