"""Where FCDP enters FSDP1 (FullyShardedDataParallel). The reductions of gradients are fsdp1_reduce.py's; no other file has
FSDP1's private names.

One function of FSDP1's is replaced: the all-gather of a flat parameter into a buffer of FSDP1's. FCDP gathers
or restores the flat parameter in a region of its own, copies it into that buffer and releases the region at
once. FSDP1's buffers, views and states are as ever, and nobody but FCDP has the region's bytes.

The other functions that are wrapped say when a pass begins, and what a shard was before it was moved to the
device.

Tried with torch 2.15; what is named here is the same in 2.6 and 2.9, by their sources. The signatures are
checked when FSDP1 is imported, the attributes when a flat parameter is gathered first, and on a mismatch plain
FSDP1 runs.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch

from fcdp import _fcdp, adopt, fsdp1_reduce, plain, presence, seam, settings, steps, words
from fcdp.flat import Cut, cut, pieces
from fcdp.group import Description, Group, address_of
from fcdp.seam import stream_of, version_of, wrap
from fcdp.tree import Tree, in_backward

unknown: str | None = None  # why this torch's FSDP1 is not served

# Of each FlatParamHandle and of each of its flat parameters, once FSDP1 has initialised them.
_HANDLE = "world_size rank process_group device _training_state _offload_params _skip_writeback_check".split()
_FLAT_PARAM = (
    "_local_shard _sharded_size _unpadded_unsharded_size _full_param_padded _params _param_infos "
    "_shard_param_infos _numels_with_padding _is_padding_mask"
).split()


def _address(tensor: torch.Tensor) -> int:
    """Of its storage, also of a DTensor's."""
    return getattr(tensor, "_local_tensor", tensor).untyped_storage().data_ptr()


class _Flat:
    """One flat parameter: what FSDP1 would gather of it, and where FCDP's gather goes."""

    def __init__(self, handle: Any):
        self.handle = handle
        self.dtype = handle._fwd_bwd_param_dtype if handle._uses_param_mixed_precision else handle.flat_param.dtype
        self.shard = handle.flat_param._sharded_size.numel()
        self.cuts = cut(self._parts(), self.shard, handle.world_size)
        self.gathers = False  # FSDP1 waits for this very gather
        self.sources: list[torch.Tensor] = []  # pieces of the region, in the order of FSDP1's buffer

    def _parts(self) -> Iterator[tuple[int, bool | None]]:
        """(elements, requires_grad) of the parameters and the paddings between them."""
        flat_param = self.handle.flat_param
        if flat_param._params is None:
            yield flat_param._unpadded_unsharded_size.numel(), flat_param.requires_grad
            return
        params = iter(flat_param._params)
        for length, is_padding in zip(flat_param._numels_with_padding, flat_param._is_padding_mask):
            yield length, None if is_padding else next(params).requires_grad

    def source(self) -> torch.Tensor:
        """This rank's shard that FSDP1 would gather next, before it is cast and moved. Not always _local_shard: a
        user may have set the flat parameter's .data, which holds until the next reshard."""
        handle, flat_param = self.handle, self.handle.flat_param
        if handle._uses_param_mixed_precision or not self._is_sharded():
            return flat_param._local_shard
        if handle._offload_params and flat_param.device.type != "cpu":
            moved = handle.__dict__.get("_fcdp_moved")
            return flat_param._local_shard if moved is None else moved
        return flat_param.data

    def _is_sharded(self) -> bool:
        """By its storage too: a flat parameter of one element is as large as its shard."""
        flat_param = self.handle.flat_param
        full = flat_param._full_param_padded.untyped_storage()
        return flat_param.numel() == self.shard and flat_param.untyped_storage()._cdata != full._cdata

    def write_back(self) -> None:
        """FSDP1 writes a parameter whose storage was replaced (use_orig_params) into the flat parameter when it
        unshards that, and views it again at the reshard. The ranks agree before, for all flat parameters at once,
        on what will be gathered: so both are done before."""
        handle, flat_param = self.handle, self.handle.flat_param
        if flat_param._params is None or handle._skip_writeback_check or handle._skipped_use_sharded_views:
            return
        # else FSDP1 has done it, or will once it is sharded and idle
        if self.gathers or handle._training_state.name != "IDLE" or not self._is_sharded():
            return
        if not address_of(flat_param):  # nothing can be written there
            return
        address = _address(flat_param)
        for param, info, (name, module, _) in zip(
            flat_param._params, flat_param._shard_param_infos, flat_param._param_infos
        ):
            now = getattr(module, name, None) if info.in_shard else None
            if now is not None and (now is not param or _address(now) != address):
                handle._writeback_orig_params()
                handle._use_sharded_views()
                if handle.device.type != "cpu":  # FSDP1 casts and moves the shard on another stream
                    handle._fcdp_written = seam.current_stream(handle.device).record_event()
                return

    def collect(self, indices: list[int]) -> dict[int, torch.Tensor]:
        """This rank's shards of these extents in the gathered dtype, on the device. A copy from the CPU is waited
        for: an optimizer there may write next."""
        shard = self.handle.flat_param.data if self.gathers else self.source().to(self.handle.device, self.dtype)
        if len(self.cuts) == 1:
            return {0: shard}
        rank, packed = self.handle.rank, {}
        for i in indices:
            packed[i], at = shard.new_zeros(self.cuts[i].length), 0
            for begin, end in self.cuts[i].runs[rank]:
                packed[i][at : at + end - begin].copy_(shard[begin:end])
                at += end - begin
        return packed

    def map(self, tensors: list[torch.Tensor]) -> None:
        """`tensors`: the extents in the region, n_ranks * length elements each."""
        for rank in range(self.handle.world_size):
            for i, offset, length in pieces(self.cuts, rank):
                self.sources.append(tensors[i].narrow(0, rank * self.cuts[i].length + offset, length))
        if len(self.cuts) == 1:
            self.sources = tensors

    def copy_to(self, buffer: torch.Tensor) -> None:
        """What was gathered, into FSDP1's buffer. By .data: no version counter moves."""
        with torch.no_grad():
            torch._foreach_copy_(list(buffer.data.split([source.numel() for source in self.sources])), self.sources)


class _Extent:
    """One cut of a flat parameter, as the core sees it."""

    in_c = False

    def __init__(self, of: _Flat, mine: Cut, name: str):
        self.flat, self.cut = of, mine
        part = "" if len(of.cuts) == 1 else f"the {'trainable' if mine.trainable else 'frozen'} part of "
        self.name = f"{part}the flat parameter of {name or 'the root'}"
        self.steps = 0  # of optimizers that have one of its parameters
        flat_param = of.handle.flat_param
        self._indices = [
            i for i, p in enumerate(flat_param._params or ()) if len(of.cuts) == 1 or p.requires_grad == mine.trainable
        ]
        self._objects: tuple[Any, ...] = ()
        self._stepped: list[torch.Tensor] = []  # of those, what an optimizer has: none is in two cuts
        self._needs_grad: tuple[bool, ...] = ()
        self._serial = 0  # of what holds the shard: an id() can be used again

    def params(self) -> list[torch.Tensor]:
        """The flat parameter, then (use_orig_params) those of the cut: what a user and an optimizer may have."""
        flat_param = self.flat.handle.flat_param
        return [flat_param, *(flat_param._params[i] for i in self._indices)]

    def settle(self) -> None:
        self.flat.write_back()

    def shard(self) -> torch.Tensor:
        return self.flat.source()

    def pieces(self) -> list[torch.Tensor]:
        source = self.flat.source()
        if len(self.flat.cuts) == 1:
            return [source]
        return [source[begin:end] for begin, end in self.cut.runs[self.flat.handle.rank]]

    def signals(self, group: Group) -> tuple[int, ...]:
        """In the order of comm/validity.h's fcdp_signals."""
        flat_param, source, params = self.flat.handle.flat_param, self.flat.source(), self.params()
        # with use_orig_params the flat parameter's own flag follows the others', but later
        needs_grad = tuple(param.requires_grad for param in params[1:] or params)
        objects = (*params, flat_param._local_shard)
        if needs_grad != self._needs_grad or any(a is not b for a, b in zip(objects, self._objects)):
            steps.know(group, self, self._stepped, params[1:] or params)
            self._stepped = params[1:] or params
            self._objects, self._needs_grad = objects, needs_grad
            self._serial += 1
        # Without a fingerprint any optimizer may have written any trainable parameter by the time of an observation.
        anonymous = group.steps if any(needs_grad) and not group.is_read(source) else 0
        return (
            self._serial,
            _address(source),
            version_of(flat_param),
            sum(map(version_of, params[1:])),
            version_of(flat_param._local_shard),
            self.steps + anonymous,
            _fcdp.dtype_codes(source.dtype, self.flat.dtype),
            int(any(needs_grad)),
        )

    def written(self) -> bool:
        """Nobody but FCDP has the region's bytes."""
        return False


def _gathers_nothing(handle: Any) -> str | None:
    return None if handle.uses_sharded_strategy else "its strategy is NO_SHARD: there is nothing to gather"


def _why_not(handle: Any) -> str | None:
    """Why FCDP leaves this flat parameter to plain FSDP1; None: it serves."""
    if reason := _gathers_nothing(handle) or seam.why_not(handle.device):
        return reason
    if getattr(handle, "_use_fake_all_gather", False):
        return "FSDP_USE_FAKE_ALL_GATHER is set"
    for owner, names in ((handle, _HANDLE), (handle.flat_param, _FLAT_PARAM)):
        for name in names:
            if not hasattr(owner, name):
                return seam.unknown_torch("FSDP1", f"{type(owner).__name__}.{name}")
    return None


def _name(handle: Any) -> str:
    """Its module's."""
    return handle.__dict__.get("_fcdp_name", "")


@functools.cache
def _say_exact() -> None:
    words.say("FCDP_CODEC=int8: FSDP1's parameters are not rounded, as it may write gathered parameters back")


def _describe(handle: Any) -> Description:
    of = _Flat(handle)
    if settings.options["codec"] == _fcdp.CODEC_INT8:
        _say_exact()
    extents = [_Extent(of, one, _name(handle)) for one in of.cuts]
    specs = [(one.length * of.dtype.itemsize, int(one.trainable), of.dtype.itemsize) for one in of.cuts]
    return _name(handle), extents, specs, of.collect, False


def _take(handle: Any, group: Group, device: torch.device) -> None:
    of = group.extents[0].flat
    of.map(group.tensors([of.dtype] * group.n, device))


def _parameters(handle: Any) -> Iterator[tuple[int, int, bool]]:
    of = _Flat(handle)
    return ((length, of.dtype.itemsize, bool(is_trainable)) for length, is_trainable in of._parts())


_FSDP1 = adopt.Framework(
    label="FSDP1",
    why_not=_why_not,
    process_group=lambda handle: handle.process_group,
    name=_name,
    describe=_describe,
    take=_take,
    parameters=_parameters,
    modules=lambda handle: (),  # its parts are refused (splitting.py), so which they are is not asked
)


def _mismatches(flat_module: ModuleType, runtime_module: ModuleType) -> Iterator[str]:
    """What of FSDP1 is not as FCDP knows it."""
    cls = getattr(flat_module, "FlatParamHandle", None)
    functions = {
        "_all_gather_flat_param": (cls, ("self", "padded_unsharded_flat_param")),
        "pre_unshard": (cls, ("self",)),
        "_writeback_orig_params": (cls, ("self",)),
        "_use_sharded_views": (cls, ("self",)),
        "_share_state_and_init_handle_attrs": (runtime_module, ("root_state", "root_module")),
        "_root_cast_forward_input": (runtime_module, ("state", "module", "args", "kwargs")),
        "_register_post_backward_final_callback": (runtime_module, ("state", "module")),
        "_reduce_grad": (runtime_module, ("state", "handle")),
    }
    for name, (owner, parameters) in functions.items():
        if not seam.begins(getattr(owner, name, None), parameters):
            yield f"{name}({', '.join(parameters)})"
    for name in ("uses_sharded_strategy", "_uses_param_mixed_precision", "_skipped_use_sharded_views"):
        if not isinstance(getattr(cls, name, None), property):
            yield f"FlatParamHandle.{name}"
    if not hasattr(getattr(runtime_module, "traversal_utils", None), "_get_fsdp_states_with_modules"):
        yield "_get_fsdp_states_with_modules"


def install(module: ModuleType) -> None:
    """Patch FSDP1, whose `module` fully_sharded_data_parallel was just imported. Raises OptionError for a
    malformed FCDP_* variable."""
    global unknown
    from torch.distributed.fsdp import _flat_param as flat_module
    from torch.distributed.fsdp import _runtime_utils as runtime_module

    if getattr(runtime_module, "_fcdp_installed", False):
        return
    settings.load()
    missing = list(_mismatches(flat_module, runtime_module))
    if missing:
        unknown = seam.unknown_torch("FSDP1", missing[0])
        return
    runtime_module._fcdp_installed = True
    _patch_handle(flat_module.FlatParamHandle)
    _patch_runtime(runtime_module, flat_module.FlatParamHandle)
    seam.watch_optimizers()
    seam.watch_groups()
    presence.announce()


def _served(handle: Any, buffer: torch.Tensor, gather: Callable[[], None]) -> Group | None:
    """Who gathers the flat parameter into `buffer` now; None: FSDP1, as for one in full precision where its
    gathers are of another dtype (summon_full_params). `gather` is adopt.py's."""
    tree = adopt.tree_of(handle)
    if not adopt.is_decided(handle):
        if not isinstance(tree, _Tree):
            adopt.bypass(_FSDP1, handle, "it was initialised before FCDP could take it over")
        adopt.adopt(_FSDP1, tree.param_groups, handle.process_group, handle.device, gather)
    group = handle.__dict__.get("_fcdp")
    return group if group is not None and group.extents[0].flat.dtype == buffer.dtype else None


def _patch_handle(cls: type) -> None:
    @wrap(cls, "_all_gather_flat_param")
    def all_gather(original, self, padded_unsharded_flat_param):
        buffer, gathered = padded_unsharded_flat_param, []

        def gather_plainly():
            if not gathered:
                n = self.world_size
                plain.count("plain_gather", self.process_group, buffer.numel() // n * buffer.itemsize * (n - 1))
                gathered.append(original(self, buffer))
            return gathered[0]

        def meet():
            gather_plainly()
            if self.device.type != "cpu":
                seam.current_stream(self.device).synchronize()

        group = _served(self, buffer, meet)
        if group is None:
            return gather_plainly()
        tree, of, stream = adopt.tree_of(self), group.extents[0].flat, stream_of(self.device)
        doing, backward = self._training_state.name, in_backward()
        by_hand = doing not in ("FORWARD", "BACKWARD_PRE") or not (backward or tree.in_forward())
        of.gathers = True
        try:
            group.unshard(tree, doing == "FORWARD" and not backward, by_hand, stream)
            try:
                group.wait(stream)
                # its memory is another stream's, and soon free there
                if self._offload_params and self.device.type != "cpu":
                    self.flat_param.data.record_stream(seam.current_stream(self.device))
                of.copy_to(buffer)
            except BaseException:
                group.give_up(stream)
                raise
        finally:
            of.gathers = False
        group.reshard(stream)
        self._fcdp_moved = None
        return buffer

    @wrap(cls, "pre_unshard")
    def pre_unshard(original, self):
        if (written := self.__dict__.pop("_fcdp_written", None)) is not None:
            seam.current_stream(self.device).wait_event(written)
        if not self._offload_params:
            return original(self)
        before = self.flat_param.data
        result = original(self)
        if self.flat_param.device != before.device:
            self._fcdp_moved = before
        return result


class _Tree(Tree):
    def __init__(self, root_state: Any):
        super().__init__(list(root_state._all_handles))
        self.root = weakref.ref(root_state)

    def in_forward(self) -> bool:
        """Is its root? Else somebody calls a module within it by itself, at any time."""
        root = self.root()
        return root is not None and root.training_state.name == "FORWARD_BACKWARD"


def _patch_runtime(module: ModuleType, cls: type) -> None:
    from torch.distributed.fsdp._common_utils import clean_tensor_name

    @wrap(module, "_share_state_and_init_handle_attrs")
    def initialize(original, root_state, root_module):
        original(root_state, root_module)
        tree = root_state._fcdp_tree = _Tree(root_state)
        names = {id(part): name for name, part in root_module.named_modules()}
        states, parts = module.traversal_utils._get_fsdp_states_with_modules(root_module)
        for state, part in zip(states, parts):
            if handle := state._handle:
                handle._fcdp_tree, handle._fcdp_name = tree, clean_tensor_name(names.get(id(part), ""))
        for handle in tree.param_groups:
            if not adopt.is_decided(handle) and (reason := _gathers_nothing(handle)):
                adopt.bypass(_FSDP1, handle, reason)
        adopt.report(_FSDP1, tree.param_groups)

    @wrap(module, "_root_cast_forward_input")
    def begin_forward(original, state, *args):
        # A forward inside of the tree's own backward recomputes what that backward needs. A backward that raised
        # has left its mark too, so it must be under way.
        tree = state.__dict__.get("_fcdp_tree")
        queued = bool(state.__dict__.get("_post_backward_callback_queued"))
        if state._is_root and tree is not None and not (queued and in_backward()):
            tree.interrupted = queued
            seam.begin_forward(tree)
        return original(state, *args)

    @wrap(module, "_register_post_backward_final_callback")
    def begin_backward(original, state, root_module):
        tree = state.__dict__.get("_fcdp_tree")
        begins = tree is not None and tree.begins_backward(bool(state.__dict__.get("_post_backward_callback_queued")))
        original(state, root_module)
        if begins:
            tree.begin_backward()

    fsdp1_reduce.install(module, cls, _name)
