"""Where FCDP enters FSDP2's reductions of gradients: `foreach_reduce`, which it counts, explains where it fails, and makes
in two steps with FCDP_REDUCE=hierarchical (reduce.py); and the end of a group's backward, whose gradients may stay
within the node until a later micro-batch."""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from fcdp import reduce, seam
from fcdp.seam import wrap


class _Here(threading.local):
    """What FSDP2 is doing on this thread, which it does not pass to its reduce-scatter."""

    reduced: Any = None  # FSDPParamGroup whose gradients are reduced
    keeps = False  # within the node, until a later micro-batch
    used: set[Any] = set()  # of its parameters, those with gradients, where it keeps


_here = _Here()

# What FSDP2's reduce-scatter takes.
_REDUCE_SCATTER = ("self", "output_tensor", "input_tensor", "group", "op", "async_op")
# What `_get_gradient_divide_factors` takes.
_DIVIDES_BY = tuple(
    "reduce_scatter_group all_reduce_group reduce_dtype device_type factor force_sum_reduction_for_comms".split()
)


class _Kept:
    """The node's sums of gradients that have not crossed (reduce.py): rows of the parameters' shards, one for each node,
    divided by `divisor`. In FSDP2 without FCDP they are where nobody reads them either, as gradients of the unsharded
    parameters.

    `fsdp_params` are the same on all ranks of a node. `used`: those that had gradients on this one, which FSDP2 would
    reduce."""

    def __init__(self, fsdp_params: list[Any], used: set[Any], rows: torch.Tensor, divisor: float):
        self.fsdp_params, self.used, self.rows, self.divisor = fsdp_params, used, rows, divisor

    def of(self, fsdp_params: list[Any], dtype: torch.dtype, divisor: float) -> torch.Tensor:
        """For these parameters, divided by `divisor`; zeros where nothing is kept. On the current stream."""
        mine = self._divided_by(divisor)
        if fsdp_params == self.fsdp_params:
            return mine.to(dtype)
        rows = mine.new_zeros(len(mine), sum(_sizes(fsdp_params)), dtype=dtype)
        places = dict(zip(fsdp_params, rows.split(_sizes(fsdp_params), dim=1)))
        for fsdp_param, part in zip(self.fsdp_params, mine.split(_sizes(self.fsdp_params), dim=1)):
            if fsdp_param in places:  # else no rank had a gradient of it
                places[fsdp_param].copy_(part)
        return rows

    def _divided_by(self, divisor: float) -> torch.Tensor:
        """FSDP2 divides what it has accumulated as the last micro-batch says. Exact for powers of two; else rounded once,
        in float32 at least."""
        if divisor == self.divisor:
            return self.rows
        return self.rows.to(torch.promote_types(self.rows.dtype, torch.float32)) * (self.divisor / divisor)


def _sizes(fsdp_params: list[Any]) -> list[int]:
    return [p.padded_sharded_param_size.numel() for p in fsdp_params]


@functools.cache
def _knows_divisor() -> bool:
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives

    return seam.begins(getattr(collectives, "_get_gradient_divide_factors", None), _DIVIDES_BY)


def _divisor(bound: dict[str, Any], n_within: int) -> float:
    """What foreach_reduce, called with these arguments, divides gradients by before they cross. `n_within`: a node's
    ranks."""
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives

    factor = bound["gradient_divide_factor"]
    before, _, op, _ = collectives._get_gradient_divide_factors(
        bound["reduce_scatter_group"],
        bound["all_reduce_group"],
        bound["reduce_dtype"],
        bound["device"].type,
        factor,
        bound.get("force_sum_reduction_for_comms", False),
    )
    if op == dist.ReduceOp.SUM:
        return before or 1.0
    return n_within if op == dist.ReduceOp.AVG else factor


class _InSteps:
    """FSDP2's reduce-scatter in two steps (reduce.py), in memory from `own`, FSDP2's own, which runs for operations that
    the reducer does not serve. `kept_rows`: of a dtype, what is added between the steps."""

    def __init__(self, own: Any, reducer: reduce.Reducer, kept_rows: Callable[[torch.dtype], torch.Tensor | None]):
        self.own, self.reducer, self.kept_rows = own, reducer, kept_rows

    def allocate(self, size, *, dtype, device):
        return self.own.allocate(size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
        if not self.reducer.serves(op):
            return self.own(
                output_tensor=output_tensor, input_tensor=input_tensor, group=group, op=op, async_op=async_op
            )
        kept = self.kept_rows(input_tensor.dtype)
        self.reducer.reduce_scatter(output_tensor, input_tensor, op, may_overwrite=True, kept=kept)


class _WithinNode(_InSteps):
    """Its first step alone, for the parameters that `name` names. FSDP2 allocates the input and then the output, which has a
    row for each node here. Nothing of it refers to itself: what it kept would live on until Python collects garbage."""

    def __init__(self, *args: Any, name: str):
        super().__init__(*args)
        self.name, self.has_input = name, False

    def allocate(self, size, *, dtype, device):
        n_rows = self.reducer.n_nodes if self.has_input else 1
        self.has_input = True
        return super().allocate((size[0] * n_rows,), dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
        self.reducer.keep(output_tensor, input_tensor, op, self.kept_rows(input_tensor.dtype), self.name)


class _OfOne:
    """As a group of replicas: FSDP2 does not all-reduce yet what it has reduced, and returns it."""

    @staticmethod
    def size() -> int:
        return 1


def _is_trained(fsdp_param: Any) -> bool:
    param = getattr(fsdp_param, "_unsharded_param", None)
    return param is not None and param.requires_grad


def _with_gradient(param_group: Any) -> set[Any]:
    return {p for p in param_group.fsdp_params if _is_trained(p) and p.unsharded_param.grad is not None}


def _keeps(param_group: Any, gathers_nothing: Callable[[Any], str | None]) -> bool:
    """Does this micro-batch's backward end with the node's sums? It is one without gradient synchronisation, whose
    unsharded gradients FSDP2 would keep; not where parameters stay unsharded, as a program may read those then. The same
    answer on all ranks, also where they use different parameters: none of it is about gradients that are there."""
    from torch.distributed.fsdp._fully_shard._fsdp_common import DDPMeshInfo

    if param_group.reduce_grads or not reduce.is_on() or not param_group.reshard_after_backward:
        return False
    can = hasattr(param_group, "_get_unsharded_grad_to_reduce") and hasattr(param_group, "_post_backward_pending")
    can = can and _knows_divisor()
    if not can or isinstance(param_group.mesh_info, DDPMeshInfo) or gathers_nothing(param_group):
        return False
    trained = [fsdp_param for fsdp_param in param_group.fsdp_params if _is_trained(fsdp_param)]
    if not trained or not param_group.is_unsharded:
        return False  # its modules did not run
    if any(fsdp_param.unsharded_grad_dtype is None for fsdp_param in trained):
        return False  # gradients are of any dtype, which a rank without them does not know
    reducer = _reducer(param_group, param_group._reduce_scatter_process_group, param_group._reduce_scatter_comm)
    return reducer is not None and reducer.within.size > 1


def _gathers_in(param_group: Any, group: Any) -> Any:
    """Where `param_group` is gathered, if that has the ranks of `group`, in which it is reduced; else `group`. FSDP2 may
    reduce in a process group of its own (set_separate_reduce_scatter_group)."""
    gathers = getattr(param_group, "_all_gather_process_group", group)
    if gathers is group or dist.get_process_group_ranks(gathers) != dist.get_process_group_ranks(group):
        return group
    return gathers


def _reducer(param_group: Any, group: Any, comm: Any) -> reduce.Reducer | None:
    """What reduces in the place of `comm`, FSDP2's reduce-scatter over `group`, with FCDP_REDUCE=hierarchical. None:
    FSDP2 does. `param_group`: None where it is not known."""
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives

    if not reduce.is_on():
        return None
    own = [getattr(collectives, name, None) for name in ("DefaultReduceScatter", "ProcessGroupAllocReduceScatter")]
    if comm is None:
        reduce.leave("FSDP2's reduce-scatter can be replaced from torch 2.9 on")
    elif type(comm) not in own:
        reduce.leave(f"it has a reduce-scatter of another kind ({type(comm).__name__})")
    elif tuple(inspect.signature(type(comm).__call__).parameters) != _REDUCE_SCATTER:
        reduce.leave(seam.unknown_torch("FSDP2", f"{type(comm).__name__}.__call__"))
    else:
        return reduce.reducer_of(_gathers_in(param_group, group))
    return None


def install(
    group_module: ModuleType, param_name: Callable[[Any], str], gathers_nothing: Callable[[Any], str | None]
) -> None:
    """Patch FSDP2's `_fsdp_param_group`. `param_name` is an FSDPParam's; `gathers_nothing` says why a group's parameters are
    never gathered, or None."""
    signature = inspect.signature(group_module.foreach_reduce)
    cls = group_module.FSDPParamGroup

    @wrap(group_module, "foreach_reduce")
    def foreach_reduce(original, *args, **kwargs):
        call = signature.bind(*args, **kwargs)
        bound = call.arguments
        fsdp_params, grads, group = bound["fsdp_params"], bound["unsharded_grads"], bound["reduce_scatter_group"]
        if group is None or not grads:
            return original(*args, **kwargs)
        dtype = bound.get("reduce_dtype") or grads[0].dtype
        bytes_ = sum(p.padded_sharded_param_size.numel() for p in fsdp_params) * dtype.itemsize

        def names() -> str:
            return ", ".join(sorted({param_name(p) for p in fsdp_params})[:3]) + ", ..."

        comm = bound.get("reduce_scatter_comm")
        of, kept, keeps = _here.reduced, None, _here.keeps
        reducer = _reducer(of, group, comm) if group.size() > 1 else None
        if of is not None:
            kept, of._fcdp_kept = of.__dict__.get("_fcdp_kept"), None
        if reducer is None and kept is not None:
            raise RuntimeError(
                f"fcdp: of {names()} FCDP_REDUCE=hierarchical has kept gradients of earlier micro-batches, and FSDP2's own "
                "reduce-scatter is to run now. End them with a synchronised backward before that changes, or set FCDP_REDUCE=flat"
            )
        if reducer is not None:
            divisor = _divisor(bound, reducer.within.size) if keeps or kept is not None else 1.0

            def kept_rows(dtype: torch.dtype) -> torch.Tensor | None:
                return None if kept is None else kept.of(fsdp_params, dtype, divisor)

            if keeps:
                bound["reduce_scatter_comm"] = _WithinNode(comm, reducer, kept_rows, name=names())
                bound |= {"all_reduce_group": _OfOne, "all_reduce_grads": False, "partial_reduce_output": None}
            else:
                bound["reduce_scatter_comm"] = _InSteps(comm, reducer, kept_rows)
            args, kwargs = call.args, call.kwargs
        with seam.reduction(group, fsdp_params[0].device, bytes_, names, reducer):
            result = original(*args, **kwargs)
        if keeps:
            *result, rows = result
            if rows is None or rows.nbytes != bytes_ * reducer.n_nodes:
                raise RuntimeError(f"fcdp: {seam.unknown_torch('FSDP2', 'foreach_reduce')}, or set FCDP_REDUCE=flat")
            used = _here.used if kept is None else kept.used | _here.used
            rows = rows.view(reducer.n_nodes, rows.numel() // reducer.n_nodes)
            of._fcdp_kept = _Kept(fsdp_params, used, rows, divisor)
            return (*result, None)
        return result

    @wrap(cls, "post_backward")
    def post_backward(original, self, *args):
        keeps = _keeps(self, gathers_nothing)
        outer = _here.reduced, _here.keeps, _here.used
        _here.reduced, _here.keeps, _here.used = self, keeps, _with_gradient(self) if keeps else set()
        try:
            if not keeps:
                original(self, *args)
                if self.reduce_grads:  # what is left is of parameters that this rank has never used
                    self._fcdp_kept = None
                return
            self.reduce_grads = True
            try:
                original(self, *args)
            finally:
                self.reduce_grads, self._post_backward_pending = False, True
        finally:
            _here.reduced, _here.keeps, _here.used = outer

    if hasattr(cls, "_get_unsharded_grad_to_reduce"):  # in torch 2.15

        @wrap(cls, "_get_unsharded_grad_to_reduce")
        def gradient_to_reduce(original, self, fsdp_param):
            """A parameter that this micro-batch did not use may have gradients of earlier ones. What is kept has all of them,
            as other ranks of the node may have used others."""
            kept = self.__dict__.get("_fcdp_kept")
            if _here.keeps and not _is_trained(fsdp_param) and (kept is None or fsdp_param not in kept.fsdp_params):
                return None
            found = original(self, fsdp_param)
            if found is None and (_here.keeps or (kept is not None and fsdp_param in kept.used)):
                return fsdp_param.unsharded_zero_grad_data
            return found

    if hasattr(cls, "_reset_iter_state"):  # not in torch 2.8

        @wrap(cls, "_reset_iter_state")
        def forgets_iteration(original, self):
            self._fcdp_kept = None
            original(self)
