"""A gathered parameter's storage raises while its region is released, as plain FSDP2's does once it is freed.

FSDP2 frees the storages of a resharded parameter, and torch raises on most uses of tensors that still point
there: those that autograd saved (`set_unshard_in_backward(False)`), views that outlive the reshard. FCDP's
storages keep their address and size for life. Their pages may be gone, so that a use faults, or kept
(FCDP_TAU, FCDP_POLICY), so that a use would read them without an error. So FCDP makes torch raise, with the parameter's name.

Torch cannot see uses that bypass the storage: a numpy array, a DLPack export, an address. These fault if the
pages are gone (tiering/segv.h names the parameter), and read a kept region. On a torch without these functions
(before 2.15), every use does so.
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


def close(storage: torch.UntypedStorage, text: str) -> None:
    """From now on an access raises RuntimeError(text). Where SUPPORTED."""
    _close(storage._cdata, text)


def open(storage: torch.UntypedStorage) -> None:
    """An access is as ever. Where SUPPORTED."""
    _open(storage._cdata)


class Storages:
    """The storages of one group, closed from the start: an access raises RuntimeError until `open`, and again after
    `close`. A pair costs 0.4 to 0.6 us a storage. An unshard opens them once the bytes are in place, and a reshard
    closes them before the bytes may go."""

    def __init__(self, tensors: Iterable[torch.Tensor], names: Iterable[str]):
        # An empty parameter has no bytes to read. They are held, since `_cdata` is an address.
        closable = [(t.untyped_storage(), _text(name)) for t, name in zip(tensors, names) if t.numel() and SUPPORTED]
        self._storages = [storage for storage, _ in closable]
        self._closable = [(storage._cdata, text) for storage, text in closable]
        self.close()

    def open(self) -> None:
        for address, _ in self._closable:
            _open(address)

    def close(self) -> None:
        for address, text in self._closable:
            _close(address, text)
