"""Blocks of `fcdp.changed()`: a part of a parameter, whole or as the difference from another version, in bytes.

A block: a header (_HEAD), the parameter's shape, the block's first indices and its shape (int64 each), the dtype's name,
and the payload: its bytes, or their differences (comm/codec.h). It has the fingerprints of before and after, so applying
it to other weights raises. Little endian, as the wire of the differences.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping

import torch

from fcdp import _fcdp

_MAGIC = b"FCDPchg1"
# magic; is it a difference; dimensions; bytes of the dtype's name; fingerprints before (of a difference) and after; bytes of payload
_HEAD = struct.Struct("<8sBBHQQQ")


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def fingerprint(tensor: torch.Tensor) -> int:
    """Of a contiguous tensor in host memory."""
    return _fcdp.fingerprint(tensor.data_ptr(), tensor.nbytes)


def _bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def pack(now: torch.Tensor, whole: tuple[int, ...], offset: tuple[int, ...], before: int, wire: bytes) -> bytes:
    """`wire`: the difference from what has the fingerprint `before`; empty: the bytes themselves."""
    name = _dtype_name(now.dtype).encode()
    payload = wire or _bytes_of(now)
    head = _HEAD.pack(_MAGIC, bool(wire), len(whole), len(name), before if wire else 0, fingerprint(now), len(payload))
    return head + struct.pack(f"<{3 * len(whole)}q", *whole, *offset, *now.shape) + name + payload


def _refuse(name: str, why: str) -> None:
    raise _fcdp.Error(f"{name}: {why}", _fcdp.ERR_INVALID)


def apply_block(name: str, tensor: torch.Tensor, block: bytes) -> None:
    if len(block) < _HEAD.size or not block.startswith(_MAGIC):
        _refuse(name, "these are no blocks of fcdp.changed(), or of another version of FCDP")
    _, is_difference, n_dims, name_bytes, before, after, payload_bytes = _HEAD.unpack_from(block)
    at = _HEAD.size + 3 * 8 * n_dims
    if len(block) != at + name_bytes + payload_bytes:
        _refuse(name, f"its blocks were cut: {len(block)} bytes, and not {at + name_bytes + payload_bytes}")
    places = struct.unpack_from(f"<{3 * n_dims}q", block, _HEAD.size)
    whole, offset, shape = places[:n_dims], places[n_dims : 2 * n_dims], places[2 * n_dims :]
    dtype, payload = block[at : at + name_bytes].decode(), block[at + name_bytes :]
    if tuple(tensor.shape) != whole or _dtype_name(tensor.dtype) != dtype:
        _refuse(
            name,
            f"the tensor is {list(tensor.shape)} of {_dtype_name(tensor.dtype)}, the parameter {list(whole)} of {dtype}",
        )
    part = tensor[tuple(slice(first, first + n) for first, n in zip(offset, shape))]
    if tuple(part.shape) != shape:
        _refuse(name, f"a part of {list(shape)} at {list(offset)} is not within {list(whole)}")
    now = torch.empty(shape, dtype=tensor.dtype)
    if is_difference:
        now.copy_(part)
        if fingerprint(now) != before:
            _refuse(
                name, "its part is not of the version from which the changes were made; apply every version, in order"
            )
        try:
            _fcdp.delta_decode(now.data_ptr(), now.nbytes, now.itemsize, payload)
        except _fcdp.Error:
            _refuse(name, "its blocks are damaged")
    elif len(payload) != now.nbytes:
        _refuse(name, "its blocks are damaged")
    elif payload:
        now.view(-1).view(torch.uint8).copy_(torch.frombuffer(bytearray(payload), dtype=torch.uint8))
    if fingerprint(now) != after:
        _refuse(name, "its blocks are damaged")
    part.copy_(now)


@torch.no_grad()
def apply(tensors: Mapping[str, torch.Tensor], changes: Iterable[tuple[str, bytes]]) -> None:
    for name, blocks in changes:
        if name not in tensors:
            _refuse(name, "there is no tensor of this name")
        apply_block(name, tensors[name], blocks)
