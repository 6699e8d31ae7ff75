"""FCDP_REDUCE_DTYPE: in which form the nodes' sums of gradients cross (reduce.py).

    bf16    each value, rounded to bfloat16
    int8    for each 256 values a float32 scale, their largest magnitude / 127, and a byte for each value, which is off
            by at most half a scale; as ZeRO++'s quantised gradients (qgZ, arXiv:2306.10209, section 4.3). No scale is
            less than float32's least normal number

What comes is added in float32 at least. What is not finite stays so, of int8 the whole block: gradient scalers look for
it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from fcdp import _fcdp
from fcdp.settings import options

_BLOCK = 256  # values
_SCALE_BYTES = 4
_MOST = 127
_LEAST_SCALE = torch.finfo(torch.float32).tiny  # 127 times a subnormal scale may be below the largest magnitude


class Wire:
    """The form of a row: `pack` makes (k, n) values (k, m) bytes, `unpack` makes m bytes n values of float32."""

    def pack(self, rows: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def unpack(self, row: torch.Tensor, n: int) -> torch.Tensor:
        raise NotImplementedError


class _BFloat16(Wire):
    def pack(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.to(torch.bfloat16).view(torch.uint8)

    def unpack(self, row: torch.Tensor, n: int) -> torch.Tensor:
        return row.view(torch.bfloat16).float()


class _Int8(Wire):
    """A row's scales, and then its bytes; the last block is filled up with zeros."""

    def pack(self, rows: torch.Tensor) -> torch.Tensor:
        k, n = rows.shape
        blocks = F.pad(rows.float(), (0, -n % _BLOCK)).view(k, -1, _BLOCK)
        scales = (blocks.abs().amax(dim=-1) / _MOST).clamp_min(_LEAST_SCALE)
        values = (blocks / scales.unsqueeze(-1)).round_()
        return torch.cat([scales.view(torch.uint8), values.to(torch.int8).view(torch.uint8).view(k, -1)], dim=1)

    def unpack(self, row: torch.Tensor, n: int) -> torch.Tensor:
        n_blocks = row.numel() // (_SCALE_BYTES + _BLOCK)
        scales, values = row.split([n_blocks * _SCALE_BYTES, n_blocks * _BLOCK])
        values = values.view(torch.int8).view(n_blocks, _BLOCK).float()
        return values.mul_(scales.view(torch.float32).unsqueeze(-1)).view(-1)[:n]


_WIRES = {_fcdp.REDUCE_DTYPE_BF16: _BFloat16(), _fcdp.REDUCE_DTYPE_INT8: _Int8()}


def wire_for(dtype: torch.dtype) -> Wire | None:
    """None: sums of this dtype cross as they are, as they would be no smaller."""
    wire = _WIRES.get(options.get("reduce_dtype", _fcdp.REDUCE_DTYPE_SAME))
    return None if isinstance(wire, _BFloat16) and dtype.itemsize <= 2 else wire


class Rounding:
    """What was lost by rounding, relative to what was sent: root of the ratio of their squares. Kept on the gradients'
    device, and read by the host when it is asked for."""

    EVERY = 16  # reductions: the others are not measured

    def __init__(self) -> None:
        self.lost: torch.Tensor | None = None
        self.sent: torch.Tensor | None = None

    def note(self, wire: Wire, row: torch.Tensor, packed: torch.Tensor) -> None:
        difference = wire.unpack(packed, row.numel()).sub_(row)
        lost, sent = (part.square().nan_to_num(0, 0, 0).sum(dtype=torch.float64) for part in (difference, row.float()))
        self.lost = lost if self.lost is None else self.lost + lost
        self.sent = sent if self.sent is None else self.sent + sent

    def share(self) -> float | None:
        if self.lost is None or self.sent is None:
            return None
        sent = self.sent.item()
        return (self.lost.item() / sent) ** 0.5 if sent else 0.0
