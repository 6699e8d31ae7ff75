"""What fsdp1.py and fsdp2.py need to enter an FSDP, of which this file knows nothing: replaced functions, the
current stream, and what concerns every optimizer."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from fcdp import OptionError, _fcdp
from fcdp.runtime import runtime


def stream_of(device: torch.device) -> int:
    """The current one, as the core takes it."""
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


def version_of(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def captures(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def wrap(owner: Any, name: str) -> Callable[[Callable], Callable]:
    """Replace owner.name by a function that gets the original as its first argument.

    Of FSDP2 only what it calls from within its hooks, which dynamo leaves alone.
    """

    def decorate(function: Callable) -> Callable:
        original = getattr(owner, name)

        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return function(original, *args, **kwargs)

        setattr(owner, name, wrapper)
        return function

    return decorate


def begins(function: Any, names: tuple[str, ...]) -> bool:
    """Does it take parameters of these names, first and in this order?"""
    try:
        return tuple(inspect.signature(function).parameters)[: len(names)] == names
    except (TypeError, ValueError):
        return False


def add_note(error: Exception, text: str) -> None:
    """An error that plain FSDP raises too keeps its type and its own words, first; Python 3.10 has no notes."""
    if hasattr(error, "add_note"):
        error.add_note(text)
    elif error.args and isinstance(error.args[0], str):
        error.args = (f"{error.args[0]}\n{text}", *error.args[1:])


def load_options() -> None:
    """Raises OptionError for a malformed FCDP_* variable."""
    try:
        runtime.load_options()
    except _fcdp.Error as error:
        raise OptionError(error.args[0]) from None


_after: list[Callable[[torch.optim.Optimizer], None]] = []


def watch_optimizers(after_step: Callable[[torch.optim.Optimizer], None]) -> None:
    """`after_step` is called behind each step of each optimizer."""
    if not _after:
        register_optimizer_step_pre_hook(_before_step)
        register_optimizer_step_post_hook(_after_step)
    _after.append(after_step)


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """What has failed on the streams must not become a step, nor may a step write what a gather begun ahead
    still reads."""
    if runtime.engine is not None:
        runtime.order_writes(stream_of(runtime.device))


def _after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    runtime.steps += 1
    _fcdp.trace_step(runtime.steps)
    for function in _after:
        function(optimizer)
