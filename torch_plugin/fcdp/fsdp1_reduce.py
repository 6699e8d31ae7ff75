"""Where FCDP enters FSDP1's reductions of gradients, with FSDP1's private names: `_reduce_grad`, which it counts, explains
where it fails, and makes in two steps with FCDP_REDUCE=hierarchical (reduce.py); and a backward in no_sync(), whose
gradients FSDP1 keeps unsharded in `flat_param.grad`.

With FCDP_REDUCE=hierarchical such a gradient is reduced within the node at once (_keep). What is kept is 1/g of it, on each
of a node's g ranks. Between two backwards a stand-in of its shape, without its memory, is in `flat_param.grad`: a read of
it raises, by name; and where the program has dropped it, as zero_grad() does, what is kept goes too. During a backward
it is taken away, since autograd adds to what it finds there. A backward that fails places none, and what is kept without
one goes when the next forward begins (_drop_failed).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from fcdp import reduce, released, seam
from fcdp.seam import wrap
from fcdp.tree import in_backward

# Without these, gradients stay unsharded in no_sync().
_FUNCTIONS = {
    "_post_backward_hook": ("state", "handle", "flat_param"),
    "_post_backward_final_callback": ("state", "module"),
    "_catch_all_reshard": ("state",),
    "_get_reduce_scatter_tensors": ("state", "unsharded_grad"),
}
# Of each state.
_STATE = (
    "_comm_hook _comm_hook_state _gradient_predivide_factor _gradient_postdivide_factor _sync_gradients "
    "_post_backward_stream _device_handle"
).split()


class _Kept:
    """The node's sums of one flat parameter's gradients that have not crossed: (nodes * shard,), divided as FSDP1 divides
    before it adds."""

    def __init__(self, rows: torch.Tensor):
        self.rows = rows
        self.stand_in: torch.UntypedStorage | None = None  # None: a backward has taken or made this, and has not ended
        self.name = ""

    def place(self, handle: Any, name: str) -> None:
        """Behind a backward: a stand-in for what FSDP1 would have in `flat_param.grad`, and in its parameters'."""
        flat_param = handle.flat_param
        one = self.rows.new_empty(1)
        self.stand_in = one.untyped_storage()
        flat_param.grad = torch.empty_like(flat_param)
        # By .data, as FSDP1 does, past autograd's check of sizes.
        flat_param.grad.data = one.expand(flat_param._unpadded_unsharded_size)
        if handle._use_orig_params:
            handle._use_unsharded_grad_views()
        self.name = name
        released.close(self.stand_in, _text(name))

    def remove(self, handle: Any) -> None:
        """So that autograd finds no gradient."""
        if self.stand_in is None:
            return
        flat_param = handle.flat_param
        for param in (flat_param, *(flat_param._params or ())):
            if param.grad is not None and self._is_of(param.grad):
                param.grad = None
        self.stand_in = None

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """While FSDP1 compares addresses of storages."""
        if self.stand_in is None:
            yield
            return
        released.open(self.stand_in)
        try:
            yield
        finally:
            released.close(self.stand_in, _text(self.name))

    def is_dropped(self, handle: Any) -> bool:
        """The program has put something else, or nothing, in the stand-in's place."""
        gradient = handle.flat_param.grad
        return self.stand_in is not None and (gradient is None or not self._is_of(gradient))

    def _is_of(self, gradient: torch.Tensor) -> bool:
        return gradient.untyped_storage()._cdata == self.stand_in._cdata


def _text(name: str) -> str:
    return (
        f"fcdp: the gradient of {name} was used before it was reduced: it comes from a backward in no_sync(), and with "
        "FCDP_REDUCE=hierarchical only sums of it are kept, until the next backward outside of no_sync(). Use it behind that, drop it "
        "by zero_grad(set_to_none=True), or set FCDP_REDUCE=flat"
    )


def _reducer(state: Any, handle: Any) -> reduce.Reducer | None:
    """What reduces in the place of FSDP1's reduce-scatter, with FCDP_REDUCE=hierarchical. None: FSDP1 does."""
    if not reduce.is_on() or handle.process_group.size() == 1:
        return None
    reason = None
    missing = [name for name in _STATE if not hasattr(state, name)]
    if missing:
        reason = seam.unknown_torch("FSDP1", f"{type(state).__name__}.{missing[0]}")
    elif state._comm_hook is not None:
        reason = "it has a communication hook"
    elif handle._sharding_strategy.name.startswith(("HYBRID", "_HYBRID")):
        reason = "FSDP1's hybrid strategies take no communication hook"
    elif getattr(handle, "_use_fake_reduce", False):
        reason = "FSDP_USE_FAKE_REDUCE is set"
    if reason:
        reduce.leave(reason)
        return None
    return reduce.reducer_of(handle.process_group)


def _divide(gradient: torch.Tensor, factor: float) -> None:
    if factor > 1:
        gradient.div_(factor)


@contextlib.contextmanager
def _in_steps(state: Any, reducer: reduce.Reducer, kept: _Kept | None) -> Iterator[None]:
    """FSDP1's communication hook for the time of one reduction. Where there is a hook, FSDP1 leaves the divisions to it,
    which keep float16 from overflowing."""

    def hook(_: object, gradient: torch.Tensor, output: torch.Tensor) -> None:
        _divide(gradient, state._gradient_predivide_factor)
        rows = None if kept is None else kept.rows.to(gradient.dtype)
        reducer.reduce_scatter(output, gradient, dist.ReduceOp.SUM, may_overwrite=False, kept=rows)
        _divide(output, state._gradient_postdivide_factor)

    state._comm_hook = hook
    try:
        yield
    finally:
        state._comm_hook = None


def _keeps(state: Any, handle: Any) -> reduce.Reducer | None:
    """What reduces this backward's gradient within the node; None: FSDP1 keeps it unsharded, or reduces it. Not where the
    parameters stay unsharded in no_sync() (SHARD_GRAD_OP): a program may read those, and their gradients."""
    if not reduce.is_on() or state._sync_gradients or not released.SUPPORTED:
        return None
    if handle._sharding_strategy.name != "FULL_SHARD" or handle._offload_params:
        return None
    reducer = _reducer(state, handle)
    return reducer if reducer is not None and reducer.within.size > 1 else None


def _keep(state: Any, handle: Any, reducer: reduce.Reducer, to_reduce: Callable[..., Any], name: str) -> None:
    """In the place of FSDP1's reduction, on its stream: `flat_param.grad`, unsharded, becomes the node's sums."""
    gradient, handle.flat_param.grad = handle.flat_param.grad.data, None
    gradient, _ = to_reduce(state, gradient)
    _divide(gradient, state._gradient_predivide_factor)
    kept = handle.__dict__.get("_fcdp_kept")
    rows = gradient.new_empty(gradient.numel() // reducer.within.size)
    reducer.keep(rows, gradient, dist.ReduceOp.SUM, None if kept is None else kept.rows.to(rows.dtype), name)
    handle._fcdp_kept = _Kept(rows)


def _take(handle: Any) -> None:
    """Before autograd adds to the gradient: in one backward again for each segment that is computed anew (reentrant
    checkpointing)."""
    kept = handle.__dict__.get("_fcdp_kept")
    if kept is None:
        return
    if kept.is_dropped(handle):
        handle._fcdp_kept = None
    else:
        kept.remove(handle)


def _drop_failed(handle: Any) -> None:
    """Outside of a backward. One that has failed leaves what it had taken or made, and its own gradients are of no use."""
    kept = handle.__dict__.get("_fcdp_kept")
    if kept is not None and kept.stand_in is None:
        handle._fcdp_kept = None


def _reduce_unused(module: ModuleType, state: Any, handle: Any) -> None:
    """A backward outside of no_sync() has ended without this flat parameter. FSDP1 raises then: it asserts that each has a
    reduced gradient. Here what is kept crosses."""
    kept, flat_param = handle._fcdp_kept, handle.flat_param
    if kept.is_dropped(handle):
        handle._fcdp_kept = None
        return
    kept.remove(handle)
    module._catch_all_reshard(state)  # an output may have had a gradient, where the parameters had none
    # As in FSDP1's own hook, until the callback that this is in front of.
    state.training_state = module.TrainingState.FORWARD_BACKWARD
    handle._training_state = module.HandleTrainingState.BACKWARD_POST
    with state._device_handle.stream(state._post_backward_stream):
        flat_param.grad = torch.empty_like(flat_param)
        flat_param.grad.data = kept.rows.new_zeros(flat_param._unpadded_unsharded_size)
        module._reduce_grad(state, handle)
    flat_param._post_backward_called = True  # so FSDP1 gives what is reduced to the optimizer


def install(module: ModuleType, cls: type, name: Callable[[Any], str]) -> None:
    """Patch FSDP1's `_runtime_utils`, and FlatParamHandle. `name` is a handle's; the root's is empty."""

    def called(handle: Any) -> str:
        return name(handle) or "the root"

    @wrap(module, "_reduce_grad")
    def reduce_grad(original, state, handle):
        bytes_ = handle.flat_param._sharded_size.numel() * handle.flat_param.grad.itemsize
        if handle.__dict__.get("_fcdp") is not None:
            handle._fcdp.reduced()
        keeping = handle.__dict__.get("_fcdp_keeping")
        reducer = keeping or _reducer(state, handle)
        kept = None if keeping else handle.__dict__.pop("_fcdp_kept", None)
        if kept is not None and reducer is None:
            raise RuntimeError(f"{_text(called(handle))} (it is to be reduced by FSDP1 now)")
        steps = contextlib.nullcontext() if keeping or reducer is None else _in_steps(state, reducer, kept)
        with (
            seam.reduction(handle.process_group, handle.device, bytes_, lambda: called(handle), reducer),
            steps,
        ):
            if keeping:
                return _keep(state, handle, keeping, module._get_reduce_scatter_tensors, called(handle))
            return original(state, handle)

    if not all(seam.begins(getattr(module, one, None), names) for one, names in _FUNCTIONS.items()):
        return

    @wrap(module, "_post_backward_hook")
    def post_backward(original, state, handle, *args):
        reducer = _keeps(state, handle)
        if reducer is None:
            return original(state, handle, *args)
        state._sync_gradients, handle._fcdp_keeping = True, reducer
        try:
            return original(state, handle, *args)
        finally:
            state._sync_gradients, handle._fcdp_keeping = False, None

    @wrap(module, "_root_cast_forward_input")
    def begin_forward(original, state, *args):
        if state._is_root and not in_backward():  # (one within a backward computes inputs again)
            for handle in state._all_handles:
                _drop_failed(handle)
        return original(state, *args)

    @wrap(cls, "prepare_gradient_for_backward")
    def prepare(original, self):
        _take(self)
        return original(self)

    @wrap(cls, "_writeback_orig_params")
    def write_back(original, self):
        kept = self.__dict__.get("_fcdp_kept")
        with contextlib.nullcontext() if kept is None else kept.opened():
            return original(self)

    @wrap(module, "_post_backward_final_callback")
    def end_of_backward(original, state, root_module):
        if not reduce.is_on():
            return original(state, root_module)
        states = [one for one in module.traversal_utils._get_fsdp_states(root_module) if one._handle]

        def with_kept():
            handles = ((one, one._handle) for one in states)
            return [(one, handle) for one, handle in handles if handle.__dict__.get("_fcdp_kept") is not None]

        for one, handle in with_kept():
            if one._sync_gradients:
                _reduce_unused(module, one, handle)
        original(state, root_module)
        for _, handle in with_kept():
            if handle._fcdp_kept.stand_in is None:
                handle._fcdp_kept.place(handle, called(handle))
