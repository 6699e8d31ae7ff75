"""What fsdp1.py and fsdp2.py share, and what knows neither: how a function is replaced, the current stream,
FSDP's reductions, PyTorch's allocator, every optimizer."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from fcdp import _fcdp, group, plain, reduce, report, shard_groups, steps, tensors, words
from fcdp.c10d import Shards
from fcdp.failures import call
from fcdp.runtime import runtime
from fcdp.settings import options
from fcdp.tree import Tree

_streams: dict[torch.device, Callable[[], int]] = {}  # how the current one of a device is asked for


def stream_of(device: torch.device) -> int:
    """The current one, as the core takes it."""
    ask = _streams.get(device)
    if ask is None:
        ask = _streams[device] = _stream_function(device)
    return ask()


def _stream_function(device: torch.device) -> Callable[[], int]:
    """Without PyTorch's own object for the stream where it is known by less: each unshard asks several times."""
    if device.type == "cpu":
        return int
    if device.type == "cuda" and device.index is not None:
        return functools.partial(torch._C._cuda_getCurrentRawStream, device.index)
    if device.type == "sim" and device.index is not None:
        return lambda: torch._C._accelerator_getStream(device.index).stream_id
    return lambda: handle_of(current_stream(device))


def handle_of(stream: Any) -> int:
    """As the core takes it. The id of a stream of "sim" is its handle."""
    return stream.cuda_stream if stream.device.type == "cuda" else stream.stream_id


def current_stream(device: torch.device) -> Any:
    """PyTorch's own object for it; not of a CPU."""
    return torch.get_device_module(device).current_stream(device)


def begin_forward(tree: Tree) -> None:
    """Its root's."""
    tree.begin_forward()
    if runtime.engine is not None:
        runtime.engine.begin_pass()
        report.say_once()  # of optimizers that step inside of backward


def version_of(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def captures(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def why_not(device: torch.device) -> str | None:
    """Why FCDP can serve no parameters that are gathered on this device now; None: it can."""
    if device.type not in group.DEVICES:
        return f"device type {device.type} is not supported"
    if captures(device):  # what serving takes cannot be made now
        return "its first gather is part of a CUDA graph's capture"
    return None


def unknown_torch(fsdp: str, what: str) -> str:
    return f"torch {torch.__version__} does not have {fsdp} as FCDP knows it ({what}); use torch 2.6 to 2.15"


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


@contextlib.contextmanager
def reduction(
    over: dist.ProcessGroup,
    device: torch.device,
    shard_bytes: int,
    names: Callable[[], str],
    reducer: reduce.Reducer | None = None,
) -> Iterator[None]:
    """Around a reduce-scatter that leaves `shard_bytes` with each rank: counts it, and where it fails, says whose
    gradients these were. The program waits for one of CPU tensors, which has a duration then; one on a stream is
    counted when it is put there. One that `reducer` has made is counted there."""
    on_host = device.type == "cpu"
    rounds = 1 if device.type == "cuda" else 2  # gloo reduces everywhere and keeps a part: twice around the ring
    bytes_ = rounds * shard_bytes * (over.size() - 1)

    n_made = reducer.n_made if reducer is not None else 0
    start_ns = _fcdp.trace_start() if on_host else 0
    if not on_host and reducer is None:
        plain.count("reduce_scatter", over, bytes_)
    try:
        yield
    except RuntimeError as error:
        if group.by_id:
            add_note(error, f"fcdp: the gradients of {names()} were not reduced over {over.size()} ranks")
        raise
    finally:
        if reducer is None and on_host or reducer is not None and reducer.n_made == n_made:
            plain.count("reduce_scatter", over, bytes_, start_ns=start_ns)
        if reducer is None or reducer.n_made == n_made:
            reduce.count_flat()


def take_tensors() -> None:
    """On a machine with CUDA: tensors from FCDP's allocator too, unless FCDP_ALLOC=native. Calls no CUDA: this
    process may fork yet."""
    if options["alloc"] == _fcdp.ALLOC_NATIVE or not torch.backends.cuda.is_built() or torch.version.hip:
        return
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:  # a machine without a GPU
        return
    if tensors.is_current():
        return
    try:
        if torch.cuda.is_initialized() or torch._C._cuda_getAllocatorBackend() != "native":
            raise RuntimeError(
                "its allocator is in use already, or is not the default one; import torch.distributed.fsdp before CUDA is used"
            )
        if torch.backends.cudnn.benchmark:
            raise RuntimeError("torch.backends.cudnn.benchmark needs it")
        torch.cuda.memory.change_current_allocator(tensors.fcdp_alloc)
    except (RuntimeError, _fcdp.Error) as error:
        words.say(f"PyTorch's own allocator serves tensors: {error.args[0]} (FCDP_ALLOC=native silences this)")


def watch_groups() -> None:
    """torch 2.15 can change a process group's ranks in place. What FCDP holds for a group is of the ranks that it had."""
    original = getattr(dist.ProcessGroup, "reconfigure", None)
    if original is None or hasattr(original, "__wrapped__"):
        return

    @wrap(dist.ProcessGroup, "reconfigure")
    def reconfigure(original: Callable, over: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
        if isinstance(shard_groups.known(over), Shards):
            raise RuntimeError(
                f"fcdp: FCDP serves the parameters that this process group of {over.size()} ranks shards, so its ranks cannot change; make "
                "it with enable_reconfigure=True, and plain FSDP runs"
            )
        return original(over, *args, **kwargs)


_watches_optimizers = False


def watch_optimizers() -> None:
    global _watches_optimizers
    if not _watches_optimizers:
        register_optimizer_step_pre_hook(_before_step)
        register_optimizer_step_post_hook(_after_step)
    _watches_optimizers = True


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """What has failed on the streams must not become a step, nor may a step write what a gather begun ahead
    still reads."""
    if runtime.engine is not None:
        call(runtime.engine.order_writes, stream_of(runtime.device))


def _after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    steps.stepped(param for param_group in optimizer.param_groups for param in param_group["params"])
    report.say_once()
