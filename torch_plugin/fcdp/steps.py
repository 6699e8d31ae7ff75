"""Which extents optimizers step, by the identity of the parameter, and how often.

Nothing is kept with a parameter, as it would be pickled with it; nor is there a weak reference to one, as it could
not be swapped then (torch.utils.swap_tensors). An extent holds the parameters that it is known by, so while its
entry is here the id is theirs.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch

from fcdp import _fcdp

n_made = 0  # by optimizers of this process so far

_extents: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()  # by id of a parameter


def know(group: Any, extent: Any, before: Iterable[torch.Tensor], params: Iterable[torch.Tensor]) -> None:
    """What optimizers may step of the group's extent, which holds it from here on, in place of `before`."""
    extent.group = weakref.ref(group)
    for param in before:
        if _extents.get(id(param)) is extent:
            del _extents[id(param)]
    _extents.update((id(param), extent) for param in params)


def stepped(params: Iterable[torch.Tensor]) -> None:
    """By an optimizer. Their groups are asked for again."""
    global n_made
    n_made += 1
    _fcdp.trace_step(n_made)
    found = [extent for param in params if (extent := _extents.get(id(param))) is not None]
    for extent in found:
        extent.steps += 1
    for group in {extent.group() for extent in found} - {None}:
        group.ask_again()
