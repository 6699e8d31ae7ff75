"""Where FCDP enters FSDP2. The reductions of gradients are fsdp2_reduce.py's; no other file has FSDP2's private names.

FSDP2's own state machine is left as it is: it shards and unshards when it always did, so a user sees on the
modules what plain FSDP2 shows. Only what an unshard and a reshard *do* changes: the gather
(`foreach_all_gather`), the copy-out (nothing left to copy: the bytes are already in the parameters), and the
freeing of the unsharded storages (FCDP's pages are unmapped instead, or kept). Some parameters keep FSDP2's own
storages (`_is_copied`); FCDP copies what it gathered there.

Tried with torch 2.6 to 2.15; the signatures are checked when FSDP2 is imported, and on a mismatch plain FSDP2
runs. What is known to come, and what is to be done then: "The next torch" in docs/decisions.md.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from array import array
from collections.abc import Iterator
from types import ModuleType
from typing import Any, NamedTuple

import torch

from fcdp import _fcdp, adopt, bypassed, extension, fsdp2_reduce, plain, presence, seam, settings, steps, whole, words
from fcdp.extension import Input
from fcdp.group import Description, Group, number_of
from fcdp.released import Storages
from fcdp.seam import stream_of, wrap
from fcdp.side import Side, beside
from fcdp.tree import Tree, in_backward


class _Here(threading.local):
    """What FSDP2 is doing on this thread, which it does not pass to its gather function."""

    param_group: Any = None  # FSDPParamGroup being unsharded
    inputs: list[list[torch.Tensor]] | None = None  # what its parameters' extensions give to this gather


_here = _Here()


class _Extent:
    """One FSDPParam, as the core sees it. What it says of itself is read by torch_plugin/evidence.c."""

    in_c = True

    def __init__(self, fsdp_param: Any, index: int):
        self.fsdp_param = fsdp_param
        self.index = index
        self.is_copied = False  # into a storage of FSDP2's own
        self.steps = 0  # of optimizers that have this parameter
        # What holds the shard, and the number of these objects: an id() can be used again.
        self._objects: tuple[Any, Any, Any, int] = (None, None, None, 0)
        self._unsharded_version: int | None = None

    @property
    def name(self) -> str:
        return _param_name(self.fsdp_param)

    def gathered_dtype(self) -> torch.dtype:
        return self.fsdp_param.param_dtype or self.fsdp_param._sharded_param_data.dtype

    def settle(self) -> None:
        pass

    def shard(self) -> torch.Tensor:
        return self.fsdp_param._sharded_param_data

    def pieces(self) -> list[torch.Tensor]:
        return [self.fsdp_param._sharded_param_data]

    def signals(self, group: Group) -> tuple[int, ...]:
        """In the order of comm/validity.h's fcdp_signals."""
        return tuple(array("Q", _fcdp.evidence_signals(group, [self])))

    def renew(self, group: Group, param: torch.Tensor, local: torch.Tensor, data: torch.Tensor) -> tuple[Any, ...]:
        """Other objects hold the shard than before."""
        before, *_, serial = self._objects
        steps.know(group, self, (before,), (param,))
        self._objects = (param, local, data, serial + 1)
        return self._objects

    def holds(self, local: torch.Tensor) -> bool:
        """Is `local` what a gather takes as this rank's shard: the same elements of the same memory?"""
        data, own = self.fsdp_param._sharded_param_data, self.fsdp_param.sharded_param._local_tensor
        return (
            local.untyped_storage()._cdata == own.untyped_storage()._cdata == data.untyped_storage()._cdata
            and local.dtype == own.dtype == data.dtype == self.gathered_dtype()
            and local.shape == own.shape
            and local.is_contiguous()
            and local.storage_offset() == own.storage_offset() == data.storage_offset()
            and not (local.is_neg() or local.is_conj())
        )

    def written(self) -> bool:
        """Somebody wrote into the gathered parameter since it was last asked; plain FSDP2 drops such a write at
        reshard."""
        return _fcdp.evidence_written([self])


def _param_name(fsdp_param: Any) -> str:
    return fsdp_param._param_fqn or fsdp_param._module_info.param_name


def _shard_bytes(fsdp_param: Any) -> int:
    """What this rank puts into a gather of FSDP2's own: its shard, or its larger one of after forward."""
    smaller_mesh = fsdp_param.sharded_state.name == "SHARDED_POST_FORWARD"
    data = fsdp_param._sharded_post_forward_param_data if smaller_mesh else fsdp_param._sharded_param_data
    return data.numel() * (fsdp_param.param_dtype or data.dtype).itemsize


def _groups_of(state: Any) -> list[Any]:
    """The parameter groups of a state: one, or (newer torch) several."""
    many = getattr(state, "_fsdp_param_groups", None)
    if many is not None:
        return list(many)
    return [state._fsdp_param_group] if state._fsdp_param_group is not None else []


def _gathers_nothing(param_group: Any) -> str | None:
    """Why FSDP2 never calls its gather for this group (in newer torch), where the others are asked about."""
    from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo

    if not isinstance(param_group.mesh_info, FSDPMeshInfo):
        return "its parameters are replicated, not sharded"
    return (
        "its shard group has one rank: there is nothing to gather"
        if param_group.mesh_info.shard_mesh_size == 1
        else None
    )


@functools.cache
def _own_gathers() -> frozenset[Any]:
    """FSDP2's own types, which differ in the memory that they gather into (symmetric memory, the process group's)."""
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives

    names = ("DefaultAllGather", "ProcessGroupAllocAllGather", "SymmMemAllGather")
    return frozenset(getattr(collectives, name, None) for name in names)


def _custom_gather(param_group: Any) -> str | None:
    comm = getattr(param_group, "_all_gather_comm", None)
    if comm is None or type(comm) in _own_gathers():
        return None
    return f"it has a custom all-gather ({type(comm).__name__})"


def _has_extension(param_group: Any) -> bool:
    return any(hasattr(p.sharded_param._local_tensor, "fsdp_pre_all_gather") for p in param_group.fsdp_params)


def _extension_inputs(param_group: Any, side: Side | None) -> list[list[torch.Tensor]] | None:
    """What the group's parameters give to this gather, by FSDP2's own function, which is called once for each gather,
    where and on the stream on which plain FSDP2 calls it: extensions may count, draw random numbers, or talk to other
    ranks. None: the group has no extensions, or FSDP2 gathers."""
    is_bypassed = adopt.is_decided(param_group) and param_group._fcdp is None
    if is_bypassed or param_group.is_sharded_post_forward or not _has_extension(param_group):
        return None
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives

    with side.entered() if side is not None else contextlib.nullcontext():
        return collectives._get_param_all_gather_inputs(param_group.fsdp_params)


def _why_not(param_group: Any) -> str | None:
    """Why FCDP leaves this group to plain FSDP2; None: it serves."""
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives

    if reason := _gathers_nothing(param_group) or seam.why_not(param_group.device) or _custom_gather(param_group):
        return reason
    mine = (_here.inputs or ()) if param_group is _here.param_group else ()
    if any(type(tensor) is not torch.Tensor for tensors in mine for tensor in tensors):
        return "an fsdp_pre_all_gather extension gathers tensors of a subclass"
    output_fn = getattr(param_group, "_all_gather_output_fn", None)
    if output_fn is not None and output_fn is not collectives._default_all_gather_output_fn:
        return "it has a custom all-gather output function"
    for fsdp_param in param_group.fsdp_params:
        if getattr(fsdp_param, "keep_unsharded_storage", False):
            return "set_keep_unsharded_storage is on"
        if fsdp_param.all_gather_outputs or hasattr(fsdp_param, "_unsharded_param"):
            return "it was gathered before FCDP could take it over"
        if fsdp_param._sharded_param_data.numel() == 0 and fsdp_param._orig_size.numel() != 0:
            return "a parameter has an empty padded shard"
    return None


def _name(param_group: Any) -> str:
    """Its module's; the groups of a module that has several (parameters on meshes of their own) are numbered."""
    name, n_groups = param_group._module_fqn or "", getattr(param_group, "_num_param_groups", 1)
    return name if n_groups == 1 else f"{name} [{param_group._param_group_index + 1} of {n_groups}]".lstrip()


def _describe_extended(param_group: Any) -> Description:
    extents, specs = [], []
    for fsdp_param, tensors in zip(param_group.fsdp_params, _here.inputs):
        for i, tensor in enumerate(tensors):
            name = _param_name(fsdp_param) + (f" [{i + 1} of {len(tensors)}]" if len(tensors) > 1 else "")
            extents.append(Input(fsdp_param, name, tensor))
            trainable = int(fsdp_param.sharded_param.requires_grad)
            specs.append((tensor.numel() * tensor.itemsize, trainable, tensor.itemsize))
    return _name(param_group), extents, specs, lambda indices: {i: extents[i].tensor for i in indices}, False


def _describe(param_group: Any) -> Description:
    if _has_extension(param_group):
        return _describe_extended(param_group)
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives

    fsdp_params = param_group.fsdp_params
    extents = [_Extent(fsdp_param, i) for i, fsdp_param in enumerate(fsdp_params)]
    specs = [
        (
            extent.fsdp_param._sharded_param_data.numel() * extent.gathered_dtype().itemsize,
            int(extent.fsdp_param.sharded_param.requires_grad),
            extent.gathered_dtype().itemsize,
            number_of(extent.gathered_dtype()),
        )
        for extent in extents
    ]

    def collect(indices: list[int]) -> dict[int, torch.Tensor]:
        inputs = collectives._get_param_all_gather_inputs([fsdp_params[i] for i in indices])
        return {i: tensor.detach() for i, (tensor,) in zip(indices, inputs)}

    stays = not param_group._reshard_after_forward and not _is_copied(param_group, fsdp_params)
    return _name(param_group), extents, specs, collect, stays


def _is_copied(param_group: Any, fsdp_params: list[Any]) -> bool:
    """Do all of these parameters keep FSDP2's own storages? What a region holds is in the order of the ranks, which
    on another dimension than 0 is not the parameter's. And with reshard_after_forward=<int> FSDP2 gathers by
    itself in backward, among fewer ranks, from what it kept after forward. An extension makes the parameter of what
    was gathered."""
    return (
        param_group._use_post_forward_mesh
        or _has_extension(param_group)
        or all(p.fsdp_placement.dim != 0 for p in fsdp_params)
    )


def _take(param_group: Any, group: Group, device: torch.device) -> None:
    """Its parameters' final storages are the region's extents from here on, or are filled from them."""
    tensors = group.tensors([extent.gathered_dtype() for extent in group.extents], device)
    names = [extent.name for extent in group.extents]
    group.storages = Storages(tensors, names)
    group.handle.watch(names)
    group.is_held = not _is_copied(param_group, param_group.fsdp_params)
    group.is_sharded = lambda: param_group.is_sharded
    group.tree = Tree([param_group]) if _has_extension(param_group) else None
    for extent, tensor in zip(group.extents, tensors):
        fsdp_param = extent.fsdp_param
        extent.is_copied = _is_copied(param_group, [fsdp_param])
        if extent.is_copied:
            group.copies.setdefault(fsdp_param, []).append(tensor)
        else:
            fsdp_param.all_gather_outputs = [tensor]
            fsdp_param.free_unsharded_param = _free_nothing
    group.gathered = tensors
    for extent in group.extents if group.is_held and group.tree is None else ():
        param = extent.fsdp_param.sharded_param
        if not extent.is_copied and param.dtype == extent.gathered_dtype():  # else the copy is of other bytes
            whole.offer(group, extent.index, param.shape, param.dtype)


@functools.cache
def _nothing(device: torch.device) -> torch.Tensor:
    with torch.inference_mode(False):  # it is for all gathers that follow
        return torch.empty(0, device=device)


def _free_nothing() -> None:
    """In place of a parameter's `free_unsharded_param`: its storage is FCDP's, for life."""


def _copy_out(fsdp_param: Any, gathered: list[torch.Tensor], n_ranks: int) -> None:
    """FSDP2's copy-out, from the region. By .data: no version counter moves."""
    numels, dtypes = [tensor.numel() // n_ranks for tensor in gathered], [tensor.dtype for tensor in gathered]
    fsdp_param.init_all_gather_outputs(numels, dtypes, n_ranks, fsdp_param.device)
    fsdp_param.alloc_all_gather_outputs()
    dim, size = fsdp_param.fsdp_placement.dim, list(fsdp_param.padded_sharded_param_size)
    gathered_size = [n_ranks * length if i == dim else length for i, length in enumerate(size)]
    with torch.no_grad():
        for source, out in zip(gathered, fsdp_param.all_gather_outputs):
            if dim == 0:
                out.data.view(torch.uint8).copy_(source.view(torch.uint8))
            else:
                torch.cat(source.view(n_ranks, *size).unbind(), dim=dim, out=out.data.view(gathered_size))


def _end_use(group: Group, device: torch.device) -> None:
    group.storages.close()
    group.reshard(stream_of(device))


def _check_unchanged(param_group: Any, served: Group) -> None:
    reason = _custom_gather(param_group)
    if (served.tree is not None) != (_here.inputs is not None):
        reason = "whether it has an fsdp_pre_all_gather extension has changed"
    elif _here.inputs and not extension.fits(served.extents, _here.inputs):
        reason = "its fsdp_pre_all_gather extensions gather tensors of other sizes or dtypes than before"
    if reason:
        raise RuntimeError(
            f"fcdp: {_name(param_group) or 'the root group'}, which FCDP serves, has changed: {reason}. "
            "Set that up before the first forward, or set FCDP=0"
        )


def _finish(result: Any, device: torch.device) -> None:
    """The host waits for the end of a gather of FSDP2's own."""
    if hasattr(result.all_gather_work, "wait"):
        result.all_gather_work.wait()
    if device.type != "cpu":
        result.all_gather_event.synchronize()
        seam.current_stream(device).synchronize()


def _process_group(param_group: Any) -> Any:
    """What a group with extensions gathers is known in its own gather alone."""
    waits = _has_extension(param_group) and param_group is not _here.param_group
    return None if waits else param_group.mesh_info.shard_process_group


def _parameters(param_group: Any) -> Iterator[tuple[int, int, bool]]:
    for fsdp_param in param_group.fsdp_params:
        dtype = fsdp_param.param_dtype or fsdp_param.orig_dtype
        yield fsdp_param._orig_size.numel(), dtype.itemsize, fsdp_param.sharded_param.requires_grad


_FSDP2 = adopt.Framework(
    label="FSDP2",
    why_not=_why_not,
    process_group=_process_group,
    name=_name,
    describe=_describe,
    take=_take,
    parameters=_parameters,
    modules=lambda param_group: getattr(param_group, "modules", ()),
)


class Sharded(NamedTuple):
    """A parameter as FSDP2 shards it: its name in the model, its DTensor, whatever the module has in its place now, the
    dtype in which it is gathered, and where FCDP serves it, its group and which one of it that is."""

    name: str
    aliases: tuple[str, ...]  # of modules that share it
    parameter: Any
    dtype: torch.dtype
    group: Group | None
    index: int


def sharded_parameters(model: torch.nn.Module) -> Iterator[Sharded]:
    """Those of all FSDP2 modules in `model`, whether FCDP serves them or not. Each once. Raises ValueError
    where a group's modules are not all in `model`."""
    names = {id(module): name for name, module in model.named_modules()}

    def name_of(module: torch.nn.Module, parameter: str) -> str:
        if id(module) not in names:
            raise ValueError(
                f"a parameter group of {type(model).__name__}'s has modules outside of it; pass the root module instead"
            )
        return f"{names[id(module)]}.{parameter}" if names[id(module)] else parameter

    seen = set()
    for module in model.modules():
        get_state = getattr(module, "_get_fsdp_state", None)  # FSDPModule's
        for param_group in _groups_of(get_state()) if get_state is not None else ():
            if id(param_group) in seen:
                continue
            seen.add(id(param_group))
            group = param_group.__dict__.get("_fcdp")
            served = {} if group is None or group.tree is not None else {e.fsdp_param: e.index for e in group.extents}
            for fsdp_param in param_group.fsdp_params:
                info = fsdp_param._module_info
                name = name_of(info.module, info.param_name)
                aliases = tuple(map(name_of, info.shared_modules, info.shared_param_names))
                index, parameter = served.get(fsdp_param), fsdp_param.sharded_param
                if param_group.is_sharded:  # FSDP2 may not have seen yet that the program has put another there
                    parameter = getattr(info.module, info.param_name)
                casts = parameter.dtype.is_floating_point and not _has_extension(param_group)
                policy = getattr(fsdp_param if hasattr(fsdp_param, "mp_policy") else param_group, "mp_policy", None)
                dtype = getattr(policy, "param_dtype", None) if casts else None  # FSDP2 reads it at the first forward
                yield Sharded(
                    name, aliases, parameter, dtype or parameter.dtype, None if index is None else group, index or 0
                )


def _mismatches(
    collectives: ModuleType, group_module: ModuleType, param_module: ModuleType, state_module: ModuleType
) -> Iterator[str]:
    """What of FSDP2 is not as FCDP knows it."""
    if not seam.begins(getattr(collectives, "_get_param_all_gather_inputs", None), ("fsdp_params",)):
        yield "_get_param_all_gather_inputs(fsdp_params)"
    functions = {
        "foreach_all_gather": (
            "fsdp_params",
            "group",
            "async_op",
            "all_gather_copy_in_stream",
            "all_gather_stream",
            "device",
        ),
        "foreach_all_gather_copy_out": ("all_gather_result", "fsdp_params", "group"),
        "foreach_reduce": ("fsdp_params", "unsharded_grads", "reduce_scatter_group"),
    }
    for name, parameters in functions.items():
        if not seam.begins(getattr(group_module, name, None), parameters):
            yield f"{name}({', '.join(parameters)}, ...)"
    fields = getattr(getattr(group_module, "AllGatherResult", None), "_fields", ())
    if fields[:3] != ("all_gather_output", "all_gather_event", "all_gather_work") or len(fields) != 6:
        yield "AllGatherResult with six fields"
    wanted = {
        getattr(group_module, "FSDPParamGroup", None): (
            "unshard",
            "wait_for_unshard",
            "_to_sharded",
            "is_sharded",
            "is_sharded_post_forward",
            "post_backward",
            "finalize_backward",
        ),
        getattr(param_module, "FSDPParam", None): (
            "all_gather_inputs",
            "init_all_gather_outputs",
            "alloc_all_gather_outputs",
            "free_unsharded_param",
        ),
        getattr(state_module, "FSDPState", None): (
            "_lazy_init",
            "_pre_forward",
            "_root_pre_forward",
            "_register_root_post_backward_final_callback",
        ),
    }
    for owner, names in wanted.items():
        for name in names:
            if not hasattr(owner, name):
                yield f"{getattr(owner, '__name__', 'a class')}.{name}"


def install(state_module: ModuleType) -> None:
    """Patch FSDP2, just imported as `state_module` and those it imports. Raises OptionError for a malformed
    FCDP_* variable."""
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives
    from torch.distributed.fsdp._fully_shard import _fsdp_param as param_module
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group as group_module

    if getattr(group_module, "_fcdp_installed", False):
        return
    settings.load()
    missing = list(_mismatches(collectives, group_module, param_module, state_module))
    if missing:
        why = seam.unknown_torch("FSDP2", missing[0])
        bypassed.add("every group", why)
        words.say(f"plain FSDP2 for every group: {why}")
        return
    group_module._fcdp_installed = True
    seam.take_tensors()
    _patch_collectives(collectives, group_module, state_module.TrainingState)
    fsdp2_reduce.install(group_module, _param_name, _gathers_nothing)
    _patch_group(group_module.FSDPParamGroup)
    _patch_state(state_module.FSDPState, state_module.TrainingState)
    whole.install()
    seam.watch_optimizers()
    seam.watch_groups()
    presence.announce()


def _patch_collectives(collectives: ModuleType, group_module: ModuleType, training: Any) -> None:
    class Gathered(group_module.AllGatherResult):
        """What FSDP2 carries from its gather to its copy-out."""

        served: Group

    def serve(param_group, group, device, gather, side):
        """The Group that gathers it. None: FSDP2 does. `gather` is adopt.py's."""
        tree = adopt.tree_of(param_group)
        if not adopt.is_decided(param_group):
            adopt.adopt(_FSDP2, tree.param_groups, group, device, gather)
        served = param_group.__dict__.get("_fcdp")
        if served is None or param_group.is_sharded_post_forward:
            return None
        _check_unchanged(param_group, served)
        doing, backward = param_group._training_state, in_backward()
        by_hand = not backward and doing not in (training.FORWARD, training.PRE_BACKWARD)
        forward = doing == training.FORWARD and not backward
        with extension.given(served.extents, _here.inputs) if _here.inputs else contextlib.nullcontext():
            served.unshard(tree, forward, by_hand, stream_of(device), side)
        return served

    @wrap(group_module, "foreach_all_gather")
    def gather(original, fsdp_params, group, async_op, copy_in_stream, gather_stream, device, *rest, **kwargs):
        param_group = _here.param_group
        is_known = param_group is not None and param_group.fsdp_params is fsdp_params
        side = beside(copy_in_stream, device) if is_known else None
        _here.inputs = _extension_inputs(param_group, side) if is_known else None
        gathered = []

        def gather_plainly():
            if not gathered:
                served = param_group.__dict__.get("_fcdp") if is_known else None
                n_bytes = sum(map(_shard_bytes, fsdp_params)) * (group.size() - 1)
                plain.count("plain_gather", group, n_bytes, served.shards if served is not None else None)
                gathered.append(
                    original(fsdp_params, group, async_op, copy_in_stream, gather_stream, device, *rest, **kwargs)
                )
            return gathered[0]

        def meet():
            _finish(gather_plainly(), device)

        try:
            served = serve(param_group, group, device, meet, side) if is_known else None
            if served is not None:
                result = Gathered(_nothing(device), None, None, [], [], [])
                result.served = served
                return result
            return gather_plainly()
        finally:
            _here.inputs = None

    @wrap(collectives, "_get_param_all_gather_inputs")
    def inputs(original, fsdp_params):
        """Of the gather under way; what FCDP gathers ahead meanwhile is of other groups."""
        is_here = _here.inputs is not None and fsdp_params is _here.param_group.fsdp_params
        return _here.inputs if is_here else original(fsdp_params)

    @wrap(group_module, "foreach_all_gather_copy_out")
    def copy_out(original, result, *args, **kwargs):
        if isinstance(result, Gathered):
            served = result.served
            served.wait(stream_of(served.shards.device))  # the bytes are where they belong, but for these
            served.storages.open()
            for fsdp_param, gathered in served.copies.items():
                _copy_out(fsdp_param, gathered, len(served.shards.ranks))
            if not served.is_held:
                _end_use(served, served.shards.device)
        else:
            original(result, *args, **kwargs)


def _patch_group(cls: type) -> None:
    @wrap(cls, "unshard")
    def unshard(original, self, *args, **kwargs):
        if not adopt.is_decided(self) and (reason := _gathers_nothing(self)):
            adopt.bypass(_FSDP2, self, reason)
            adopt.report(_FSDP2, adopt.tree_of(self).param_groups)
        outer, _here.param_group = _here.param_group, self
        try:
            return original(self, *args, **kwargs)
        finally:
            _here.param_group = outer

    @wrap(cls, "wait_for_unshard")
    def wait_for_unshard(original, self):
        try:
            return original(self)
        except BaseException:  # FSDP2 would wait for this result at the next unshard, and ask for nothing
            served = getattr(self._all_gather_result, "served", None)
            if served is not None:
                self._all_gather_result = None
                served.give_up(stream_of(self.device))
                served.storages.close()
            raise

    @wrap(cls, "_to_sharded")
    def to_sharded(original, self):
        was_sharded = self.is_sharded
        original(self)
        if not was_sharded and self.__dict__.get("_fcdp") is not None and self._fcdp.is_held:
            _end_use(self._fcdp, self.device)

    @wrap(cls, "post_backward")
    def post_backward(original, self, *args):
        if self.__dict__.get("_fcdp") is not None and self.reduce_grads:
            self._fcdp.reduced()
        return original(self, *args)

    def forgets_prefetch(original, self):
        unused = getattr(self._all_gather_result, "served", None)
        original(self)
        if unused is not None:  # nobody used it, and FSDP2 takes no reshard for what it never held
            unused.cancel(stream_of(self.device))

    wrap(cls, "finalize_backward")(forgets_prefetch)
    if hasattr(cls, "_reset_iter_state"):  # not in torch 2.8
        wrap(cls, "_reset_iter_state")(forgets_prefetch)


def _patch_state(cls: type, training: Any) -> None:
    @wrap(cls, "_lazy_init")
    def lazy_init(original, self):
        is_new = self._is_root is None
        original(self)
        if is_new:
            param_groups = list(
                {id(group): group for state in self._state_ctx.all_states for group in _groups_of(state)}.values()
            )
            tree = self._state_ctx._fcdp_tree = Tree(param_groups)
            for group in param_groups:
                group._fcdp_tree = tree

    def is_inside(self):
        return self._state_ctx.iter_forward_root not in (None, self) and not self._is_root

    def begin_forward(self):
        # A forward inside of the tree's own backward recomputes what that backward needs. A backward that raised
        # has left its mark too, so it must be under way.
        tree, queued = self._state_ctx._fcdp_tree, self._state_ctx.post_backward_final_callback_queued
        if not (queued and in_backward()):
            tree.interrupted = queued
            seam.begin_forward(tree)

    @wrap(cls, "_pre_forward")
    def pre_forward(original, self, *args, **kwargs):
        # A pass that raised is still under way for FSDP2, which goes on in it: there is no `_root_pre_forward`.
        if self._training_state in (training.FORWARD, training.PRE_BACKWARD) and not is_inside(self):
            begin_forward(self)
        return original(self, *args, **kwargs)

    @wrap(cls, "_root_pre_forward")
    def root_pre_forward(original, self, *args, **kwargs):
        inside, event = is_inside(self), getattr(self._state_ctx, "post_optim_event", None)
        result = original(self, *args, **kwargs)
        if event is not None and self._device.type != "cpu":  # FSDP2 gathers behind it; FCDP, on the current stream
            seam.current_stream(self._device).wait_event(event)
        if not inside:
            begin_forward(self)
        return result

    @wrap(cls, "_register_root_post_backward_final_callback")
    def begin_backward(original, self):
        begins = self._state_ctx._fcdp_tree.begins_backward(self._state_ctx.post_backward_final_callback_queued)
        original(self)
        if begins:
            self._state_ctx._fcdp_tree.begin_backward()
