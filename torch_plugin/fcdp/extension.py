"""The inputs that all-gather extensions (float8 and others) give to a gather, as the core sees them.

An extension makes these tensors anew for each gather, from whatever it looks at: the shard, a scale that was
computed over all ranks, a module's state. So no signal of the parameter tells whether they are what they were.
Their bytes do: they are fingerprinted at each unshard, and the ranks agree on each group by itself. Where no
fingerprints are taken, nothing is fresh. What extensions hand on beside that, their metadata, is not gathered:
each rank has its own, of this very unshard, as ever.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from itertools import chain
from typing import Any

import torch

Inputs = list[list[torch.Tensor]]  # by parameter


class Input:
    """One of these tensors: an extent (group.Extent)."""

    in_c = False
    steps = 0
    is_copied = True

    def __init__(self, fsdp_param: Any, name: str, tensor: torch.Tensor):
        self.fsdp_param, self.name = fsdp_param, name
        self.kind = tensor.dtype, tensor.numel()
        self.tensor: torch.Tensor | None = None  # while it is asked for and read
        self._serial = 0

    def give(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self._serial += 1

    def gathered_dtype(self) -> torch.dtype:
        return self.kind[0]

    def settle(self) -> None:
        pass

    def shard(self) -> torch.Tensor:
        return self.tensor

    def pieces(self) -> list[torch.Tensor]:
        return [self.tensor]

    def signals(self, group: Any) -> tuple[int, ...]:
        """In the order of comm/validity.h's fcdp_signals: another object each time."""
        return (self._serial, 0, 0, 0, 0, 0, 0, 0)

    def written(self) -> bool:
        return False


def fits(extents: list[Input], inputs: Inputs) -> bool:
    """Do the tensors have the same dtypes and sizes as before?"""
    return [extent.kind for extent in extents] == [(t.dtype, t.numel()) for t in chain.from_iterable(inputs)]


@contextlib.contextmanager
def given(extents: list[Any], inputs: Inputs | None) -> Iterator[None]:
    """Give the extents what the extensions returned for this gather. None: the group has no extensions."""
    mine = list(zip(extents, chain.from_iterable(inputs or ())))
    for extent, tensor in mine:
        extent.give(tensor)
    try:
        yield
    finally:
        for extent, _ in mine:
            extent.tensor = None
