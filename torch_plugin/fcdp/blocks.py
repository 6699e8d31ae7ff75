"""Blocks of `fcdp.changed()`: a part of a parameter, whole or as the difference from another version, in bytes.

A block: a header (_HEAD), the parameter's shape, the block's first indices and its shape (int64 each), the parameter's and
the dtype's name, the payload (its bytes, or their differences: comm/codec.h), and a fingerprint of all that. The header has
the fingerprints of the part before and after, so applying it to other weights raises. Little endian throughout.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterable, Mapping
from typing import NoReturn

import torch

from fcdp import _fcdp

_MAGIC = b"FCDPchg1"
# Magic; is it a difference; dimensions; bytes of the two names; fingerprints before (0: of no version) and after.
_HEAD = struct.Struct("<8sBBHHQQ")
_END = struct.Struct("<Q")


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def fingerprint(tensor: torch.Tensor) -> int:
    """Of a contiguous tensor in host memory."""
    assert tensor.device.type == "cpu" and tensor.is_contiguous()
    return _fcdp.fingerprint(tensor.data_ptr(), tensor.nbytes)


def _bytes_of(tensor: torch.Tensor) -> ctypes.Array[ctypes.c_char]:
    """The memory of one such. (ctypes.string_at() takes its size as a C int.)"""
    return (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())


def _fingerprint_of_bytes(data: bytes) -> int:
    return fingerprint(torch.frombuffer(bytearray(data), dtype=torch.uint8))


def pack(
    name: str, now: torch.Tensor, whole: tuple[int, ...], offset: tuple[int, ...], before: int, after: int, wire: bytes
) -> bytes:
    """`before` and `after`: the part's fingerprints, in the version before (0: there is none) and now. `wire`: the
    difference between them; empty: the bytes themselves."""
    names = name.encode(), _dtype_name(now.dtype).encode()
    payload = wire or _bytes_of(now)
    sizes = len(names[0]), len(names[1])
    head = _HEAD.pack(_MAGIC, bool(wire), len(whole), *sizes, before, after)
    places = struct.pack(f"<{3 * len(whole)}q", *whole, *offset, *now.shape)
    block = bytearray().join((head, places, *names, payload))
    block += _END.pack(fingerprint(torch.frombuffer(block, dtype=torch.uint8)))
    return bytes(block)


def _refuse(name: str, why: str) -> NoReturn:
    raise _fcdp.Error(f"{name}: {why}", _fcdp.ERR_INVALID)


def apply_block(name: str, tensor: torch.Tensor, block: bytes) -> None:
    if len(block) < _HEAD.size + _END.size or not block.startswith(_MAGIC):
        _refuse(name, "these are no blocks of fcdp.changed(), or of another version of FCDP")
    (check,) = _END.unpack_from(block, len(block) - _END.size)
    if _fingerprint_of_bytes(block[: -_END.size]) != check:
        _refuse(name, "its blocks are damaged, or were cut")
    _, is_difference, n_dims, name_bytes, dtype_bytes, before, after = _HEAD.unpack_from(block)
    places = struct.unpack_from(f"<{3 * n_dims}q", block, _HEAD.size)
    whole, offset, shape = places[:n_dims], places[n_dims : 2 * n_dims], places[2 * n_dims :]
    at = _HEAD.size + 3 * 8 * n_dims
    parameter = block[at : at + name_bytes].decode()
    dtype = block[at + name_bytes : at + name_bytes + dtype_bytes].decode()
    payload = block[at + name_bytes + dtype_bytes : -_END.size]
    if parameter != name:
        _refuse(name, f"its blocks are {parameter}'s")
    if tuple(tensor.shape) != whole or _dtype_name(tensor.dtype) != dtype:
        _refuse(
            name,
            f"the tensor is {list(tensor.shape)} of {_dtype_name(tensor.dtype)}, the parameter {list(whole)} of {dtype}",
        )
    n_bytes = torch.Size(shape).numel() * tensor.itemsize
    is_within = all(0 <= first and 0 < n <= size - first for first, n, size in zip(offset, shape, whole))
    if not is_within or not payload or not (is_difference or len(payload) == n_bytes):
        _refuse(name, f"a part of {list(shape)} at {list(offset)} in {len(payload)} bytes makes no sense")
    part = tensor[tuple(slice(first, first + n) for first, n in zip(offset, shape))]
    now = torch.empty(shape, dtype=tensor.dtype, device="cpu")
    now.copy_(part)
    found = fingerprint(now)
    if found == after:  # it has come already: from another rank, or at a first try
        return
    if before and found != before:
        _refuse(name, "it is not of the version from which the changes were made; apply every version, in order")
    if is_difference:
        try:
            _fcdp.delta_decode(now.data_ptr(), now.nbytes, now.itemsize, payload)
        except _fcdp.Error:
            _refuse(name, "its differences are malformed")
    else:
        now.view(-1).view(torch.uint8).copy_(torch.frombuffer(bytearray(payload), dtype=torch.uint8))
    if fingerprint(now) != after:
        _refuse(name, "its blocks do not give what they were made of")
    part.copy_(now)


@torch.no_grad()
def apply(tensors: Mapping[str, torch.Tensor], changes: Iterable[tuple[str, bytes]]) -> None:
    for name, blocks in changes:
        if name not in tensors:
            _refuse(name, "there is no tensor of this name")
        apply_block(name, tensors[name], blocks)
