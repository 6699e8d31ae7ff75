"""A parameter group that FCDP serves: what FSDP asks of it, and what the core asks of its parameters.

The protocol of an unshard is comm/unshard.h's. It asks a Group for what only Python knows: where the shards lie, what
their signals are, the shards in the gathered dtype, the other ranks' votes. When the ranks agree is decided from
events that are passed on: a root forward or a backward begins, a group is unsharded, its gradients are reduced, an
optimizer has stepped its parameters. All of them happen on every rank of the shard group in the same order. What
concerns no group that is served (another optimizer, another model) is not passed on.
"""

from __future__ import annotations

import contextlib
import weakref
from array import array
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch

from fcdp import _fcdp, mapped, planned, steps, words
from fcdp.c10d import Shards, Unsupported
from fcdp.failures import call
from fcdp.released import Storages
from fcdp.settings import options
from fcdp.tree import Tree, in_backward

# The devices that are served, with DLPack's number of each: kDLCPU, kDLCUDA, and kDLExtDev for torch.device("sim")
# (sim/torch), which is to FCDP a device like CUDA on the simulated driver.
DEVICES = {"cpu": 1, "cuda": 2, "sim": 12}

# DLPack's (code, bits) of the dtypes that parameters have; others are taken as bytes and viewed.
_DLPACK = {
    torch.float32: (2, 32),
    torch.float64: (2, 64),
    torch.float16: (2, 16),
    torch.bfloat16: (4, 16),
    torch.int8: (0, 8),
    torch.int16: (0, 16),
    torch.int32: (0, 32),
    torch.int64: (0, 64),
    torch.uint8: (1, 8),
}


class Extent(Protocol):
    """One parameter (fsdp2.py), or what of a flat parameter is gathered together (fsdp1.py)."""

    name: str
    steps: int  # of optimizers that have one of its parameters
    in_c: bool  # what the rest would say is read by torch_plugin/evidence.c

    def settle(self) -> None: ...  # what the shard is to be is written into it, before it is looked at
    def signals(self, group: Group) -> Iterable[int]: ...
    def shard(self) -> torch.Tensor: ...  # this rank's, or what that is a part of
    def pieces(self) -> list[torch.Tensor]: ...  # of shard(): this rank's, whose bytes are compared
    def written(self) -> bool: ...


def address_of(piece: torch.Tensor) -> int:
    """Of a shard's bytes, not 0; 0: they are not there. A program may free a storage that it does not use now."""
    there = piece.untyped_storage().nbytes() >= piece.storage_offset() * piece.itemsize + piece.nbytes
    return piece.data_ptr() or 1 if there or not piece.nbytes else 0


# Of a parameter group: name, extents, (shard_bytes, span, bytes of an element[, NUMBER_*: it may be rounded]) per
# extent, collect (Group.collect), does it stay gathered after forward.
Description = tuple[str, list[Any], list[tuple[int, ...]], Callable, bool]

_NUMBERS = {torch.bfloat16: _fcdp.NUMBER_BF16, torch.float16: _fcdp.NUMBER_F16, torch.float32: _fcdp.NUMBER_F32}


def number_of(dtype: torch.dtype) -> int:
    return _NUMBERS.get(dtype, _fcdp.NUMBER_OTHER)


by_id: weakref.WeakValueDictionary[int, Group] = weakref.WeakValueDictionary()  # of all that live


class Group:
    """A parameter group that FCDP serves."""

    def __init__(
        self,
        name: str,
        extents: list[Any],
        shards: Shards,
        handle: _fcdp.Group,
        shard_bytes: list[int],
        collect: Callable,
    ):
        self.name, self.extents, self.shards, self.handle = name, extents, shards, handle
        self.shard_bytes = shard_bytes
        self.storages: Storages | None = None  # of its tensors; set by who made them
        self.is_held = True  # by FSDP from its unshard to its reshard, else until it has been copied
        self.copies: dict[Any, list[torch.Tensor]] = {}  # FSDP's parameter: where its bytes come from
        self.is_sharded: Callable[[], bool] = lambda: True  # to FSDP, which may use it next: it may begin ahead
        self.tree: Tree | None = None  # of its own: it is asked for alone, at each unshard
        self.gathered: list[torch.Tensor] = []  # its tensors, where others may read them (whole.py)
        self.number = shards.n_groups  # among its shard group's, on every rank
        shards.n_groups += 1
        self.collect = collect  # (stale indices) -> {index: 1-D shard in the gathered dtype}
        self.n = len(extents)
        self.in_c = all(extent.in_c for extent in extents)
        self.steps = 0  # steps.n_made at the last observation
        self.reductions = 0
        self.by_device = False  # the device fingerprints its shards
        self.inputs: tuple | None = None  # of the use under way, which must outlive their readers
        handle.set_owner(self, [extent.name for extent in extents])

    def tensors(self, dtypes: list[torch.dtype], device: torch.device) -> list[torch.Tensor]:
        """The extents' final storages, one tensor each, for life."""
        kind, index = DEVICES[device.type], device.index or 0
        out = []
        with torch.inference_mode(False):
            for i, dtype in enumerate(dtypes):
                bytes_ = self.shard_bytes[i] * len(self.shards.ranks)
                if bytes_ == 0:
                    out.append(torch.empty(0, dtype=dtype, device=device))
                    continue
                code, bits = _DLPACK.get(dtype, (1, 8))
                flat = torch.from_dlpack(self.handle.dlpack(i, bytes_ * 8 // bits, code, bits, kind, index))
                out.append(flat if dtype in _DLPACK else flat.view(dtype))
        return out

    @property
    def by_host(self) -> bool:
        """The host compares the bytes of the shards that it has."""
        return not self.by_device and options["fingerprint"] == _fcdp.FINGERPRINT_AUTO

    def is_host_read(self, shard: torch.Tensor) -> bool:
        """Does the host compare its bytes? Also those of a GPU job's parameters that are offloaded to the CPU."""
        return self.by_host and shard.device.type == "cpu"

    def is_read(self, shard: torch.Tensor) -> bool:
        """Are its bytes compared, by the device or by the host?"""
        return self.by_device or self.is_host_read(shard)

    # What the core asks (torch_plugin/program.c), on the thread that unshards.

    def settle(self) -> None:
        for extent in self.extents:
            extent.settle()

    def look(self, what: int) -> tuple[Any, ...]:
        """As the mask says: where the host or (by_device) the device can read the shards' bytes, the signals, the scene
        of a vote. Who reads them is decided when the ranks agree, and holds until they agree again."""
        if what == _fcdp.LOOK_PLACES:
            self.by_device = self._device_reads()
        places = self._places() if what & _fcdp.LOOK_PLACES else None
        scene = self._scene() if what & _fcdp.LOOK_SCENE else None
        signals = self._signals() if what & _fcdp.LOOK_SIGNALS else None
        return places, signals, scene

    def _device_reads(self) -> bool:
        """Is the device to fingerprint the group's shards? All of them, or none."""
        asked, device = options["fingerprint"], self.shards.device
        wanted = asked == _fcdp.FINGERPRINT_DEVICE or asked == _fcdp.FINGERPRINT_AUTO and device.type != "cpu"
        return wanted and all(extent.shard().device == device for extent in self.extents)

    def _places(self) -> tuple[Any, ...]:
        """Of the pieces of the shards, one extent's after another: addresses (0: cannot be read), sizes (0 of what cannot
        be read, unless its bytes are not there); of the extents: how many pieces, optimizers' steps."""
        steps = array("Q", [extent.steps for extent in self.extents]).tobytes()
        if self.in_c:
            ones = array("Q", [1]) * self.n
            return *_fcdp.evidence_places(self, self.extents), ones.tobytes(), steps, self.by_device
        addresses, sizes, counts = array("Q"), array("Q"), array("Q")
        for extent in self.extents:
            can_read, pieces = self.is_read(extent.shard()), extent.pieces()
            for piece in pieces:
                address = address_of(piece)
                addresses.append(address if can_read else 0)
                sizes.append(piece.nbytes if can_read or not address else 0)
            counts.append(len(pieces))
        return *(column.tobytes() for column in (addresses, sizes, counts)), steps, self.by_device

    def _signals(self) -> bytes:
        if self.in_c:
            return _fcdp.evidence_signals(self, self.extents)
        signals = array("Q")
        for extent in self.extents:
            signals.extend(extent.signals(self))
        return signals.tobytes()

    def _scene(self) -> tuple[bool, bool, int]:
        """Of an observation: grad mode, does an optimizer step the group, how often were its gradients reduced."""
        self.steps = steps.n_made
        # Backward hooks run without grad mode; what counts is that of the forward it belongs to.
        grad = in_backward() or torch.is_grad_enabled()
        return grad, any(extent.steps for extent in self.extents), self.reductions

    def make_inputs(self, stale: bytes, side: Any) -> tuple[bytes, int | None]:
        """Addresses of the stale extents' shards, and the stream behind which they are to be read: `side`'s (side.py),
        where there is one, on which they are made. The tensors live until the group is waited for."""
        wanted = [i for i, flag in enumerate(stale) if flag and self.shard_bytes[i]]
        addresses, keep = array("Q", [0]) * self.n, []
        if side is not None:
            side.wait_for_current()
        with side.entered() if side is not None else contextlib.nullcontext():
            shards = self.collect(wanted)
        for i, tensor in shards.items():
            if tensor.nbytes != self.shard_bytes[i] or not tensor.is_contiguous():
                raise RuntimeError(
                    f"fcdp: the shard of {self.extents[i].name} has {tensor.nbytes} bytes now, "
                    f"{self.shard_bytes[i]} when FCDP first saw it; a parameter's size and dtype must not change after the first forward"
                )
            addresses[i] = tensor.data_ptr()
            keep.append(tensor)
        self.inputs = (self.inputs, *keep)  # a tuple: no garbage collector empties it
        return addresses.tobytes(), side.handle if side is not None else None

    def inputs_done(self) -> None:
        self.inputs = None

    def carry(self, votes: bytes) -> bytes:
        """The maximum of every byte over the ranks."""
        return self.shards.agree(votes)

    def may_begin(self, ahead: int) -> bool:
        """Before FSDP unshards it: ahead of that, or with other small groups."""
        return self.is_sharded()

    def written(self) -> bool:
        """Into what was gathered, by anybody."""
        written = [extent.written() for extent in self.extents]  # of each: asking remembers what was seen
        return any(written)

    def blind(self) -> None:
        options["fingerprint"] = _fcdp.FINGERPRINT_NEVER
        words.say(
            "the device takes no fingerprints of parameters: a write that moves no version counter may go unnoticed (FCDP_FINGERPRINT)"
        )

    # What FSDP asks.

    def unshard(self, tree: Tree, forward: bool, by_hand: bool, stream: int, side: Any = None) -> None:
        """Its gather or restore, under `tree`. `by_hand`: not from within FSDP's hooks. `stream`: the current one; `side`
        (side.py): where what is gathered is made; None: on the current one."""
        handle, alone = (self.tree or tree).handle(self.shards), self.tree is not None
        pass_ = _fcdp.PASS_FORWARD if forward else _fcdp.PASS_BACKWARD if in_backward() else _fcdp.PASS_OTHER
        made_on = side.handle if alone and side is not None else stream  # extensions have made their tensors there
        call(self.handle.unshard, handle, pass_, by_hand or alone, stream, made_on, side)

    def wait(self, stream: int) -> None:
        """`stream`, the current one, goes on when the bytes are there; on CPUs this thread does."""
        call(self.handle.wait, stream)
        self.inputs = None  # their memory is used again behind their readers

    def reshard(self, stream: int) -> None:
        """FSDP resharded it, or (FSDP1) has its own copy of it."""
        call(self.handle.reshard, stream)

    def cancel(self, stream: int) -> None:
        """FSDP will not use what it unsharded (a prefetch of what the backward did not need)."""
        if call(self.handle.cancel, stream):
            self.inputs = None
        self.reshard(stream)

    def give_up(self, stream: int) -> None:
        """Its use has failed after the unshard, so FSDP holds nothing."""
        self.handle.give_up(stream)

    def reduced(self) -> None:
        """Its gradients have been reduced: an optimizer may step inside this backward."""
        self.reductions += 1
        self.ask_again()

    def ask_again(self) -> None:
        """Its shard group agrees anew at its next unshard."""
        self.handle.ask_again()


def attach(shards: Shards, described: list[Description], tiers: list[str]) -> tuple[list[Group | None], str]:
    """Groups for them; None for those of the tier "gather" and for those for which some node has no host memory, nor
    room in FCDP_SPILL_DIR, and why. The same ones on every rank: a collective of the shard group. Raises Unsupported if
    it serves none. `tiers`: of each, the same on every rank."""
    handles: list[_fcdp.Group | None] = []
    order, files, ahead, problem = [], [], True, None
    stays = bytes(stays for *_, stays in described)
    if planned.FILE in tiers and not _all_may_spill(shards):
        planned.say(
            "has groups in files, and FCDP_SPILL_DIR is not set on every rank; so policy decides where these live"
        )
        tiers = [planned.POLICY if tier == planned.FILE else tier for tier in tiers]
    try:
        for one, tier in zip(described, tiers):
            handles.append(_create(shards, one, tier))
        order, files, gathered = shards.comm.host_order(handles, stays)
        for i in gathered:
            handles[i] = None
    except _fcdp.Error as error:
        problem = error.with_traceback(None)
    shards.raise_together(problem)
    in_file, why = _take_files(shards, handles, described, tiers, files, "")
    refused = [i for i in files if i not in in_file]
    if refused:  # by some rank's disk: they have no plan, then
        planned.say(f"has groups in files that a rank cannot make ({why}); so policy decides where these live")
        try:
            for i in refused:
                handles[i] = _create(shards, described[i], planned.POLICY)
        except _fcdp.Error as error:
            problem = error.with_traceback(None)
        shards.raise_together(problem)
    offsets, left, why = _take_host_memory(shards, handles, order + refused)
    more, why = _take_files(shards, handles, described, tiers, left, why)
    in_file += more
    attached = [i for i, handle in enumerate(handles) if handle is not None]
    if not attached:
        raise Unsupported(why or planned.GATHERED)
    try:
        for i in attached:
            if i not in in_file:
                handles[i].attach(offsets[i])
    except _fcdp.Error as error:
        problem = error.with_traceback(None)
    shards.raise_together(problem)
    mapped.map_groups(shards, [(name, handle) for (name, *_), handle in zip(described, handles)], options["host_map"])
    try:  # once it is known which groups take device memory
        ahead = shards.comm.fits([handles[i] for i in attached], bytes(stays[i] for i in attached))
    except _fcdp.Error as error:
        problem = error.with_traceback(None)
    shards.raise_together(problem)
    shards.ahead &= shards.agree(b"\0" if ahead else b"\1") == b"\0"
    shards.comm.set_ahead(shards.ahead)
    made: list[Group | None] = []
    for handle, (name, extents, specs, collect, _) in zip(handles, described):
        if handle is None:
            made.append(None)
            continue
        group = Group(name, extents, shards, handle, [bytes_ for bytes_, *_ in specs], collect)
        by_id[handle.id] = group
        made.append(group)
    return made, why


def _create(shards: Shards, described: Description, tier: str) -> _fcdp.Group:
    name, _, specs, _, _ = described
    handle = shards.comm.create_group(name, specs)
    handle.set_tier(tier)
    return handle


def _take_host_memory(
    shards: Shards, handles: list[_fcdp.Group | None], order: list[int]
) -> tuple[array[int], list[int], str]:
    """Blocks of the nodes' host memory for the groups, taken in `order`: their offsets on this node. A group for which
    some node has no room is left out on all of them: its handle becomes None. Returned as well: those that were left
    out, and why the first one was.

    Each node's leader takes blocks up to the first one that it is refused. The first refusal of all nodes counts, and
    leaves out the later groups that are as large as well: each node holds what came before it, and that stays. So
    there are at most as many rounds as groups have sizes; one, where all fit."""
    sizes = [handle.stats()["bytes"] if handle is not None else 0 for handle in handles]
    offsets, why = array("Q", [0]) * len(handles), ""
    taken: set[int] = set()
    left_out: list[int] = []
    while True:
        refused, text, problem = bytearray(len(order)), "", None
        for place, i in enumerate(order if shards.local == 0 else ()):
            try:
                if i not in taken:
                    offsets[i] = handles[i].allocate_host()
                    taken.add(i)
            except _fcdp.Error as error:
                refused[place], text = 1, str(error.args[0])
                if error.args[1] != _fcdp.ERR_NO_HOST_MEM:
                    problem = error.with_traceback(None)
                break
        shards.raise_together(problem)
        first = shards.agree(bytes(refused)).find(1)
        if first < 0:
            return array("Q", shards.from_leader(offsets.tobytes())), left_out, why
        why = why or shards.first_problem(text if refused[first] else "")
        left = [i for i in order[first:] if sizes[i] >= sizes[order[first]]]
        order = [i for i in order if i not in left]
        for i in left:
            handles[i] = None  # what it took here goes back
        taken.difference_update(left)
        left_out += left


def _all_may_spill(shards: Shards) -> bool:
    """Was every rank of the shard group given a directory for files? A line says which were not, if some were.
    Collective; asked where groups would be put there."""
    has = bool(options["spill_dir"])
    some_have, some_lack = shards.agree(bytes((has, not has)))
    if some_have and some_lack:
        said = shards.all_gather_bytes(bytes((has,)))
        lack = [str(rank) for rank, theirs in zip(shards.ranks, said) if not theirs]
        ranks = f"rank{'s'[: len(lack) > 1]} {', '.join(lack[:8])}{', ...' if len(lack) > 8 else ''}"
        words.once(
            f"FCDP_SPILL_DIR is not set on {ranks}, so no group is in a file on any rank; set it on every rank, or on none",
            shards.ranks[0],
        )
    return not some_lack


def _take_files(
    shards: Shards,
    handles: list[_fcdp.Group | None],
    described: list[Description],
    tiers: list[str],
    left: list[int],
    why: str,
) -> tuple[list[int], str]:
    """New handles for the groups that are left, each in a file of every rank's (FCDP_SPILL_DIR), as far as all ranks
    have room: which ones. Also returned: why the first one has none, where every rank was given a directory."""
    problem = None
    if not left or not _all_may_spill(shards):
        return [], why
    refused, text = bytearray(len(left)), ""
    for place, i in enumerate(left):
        try:
            handles[i] = _create(shards, described[i], tiers[i])
            handles[i].attach_file()
        except _fcdp.Error as error:
            refused[place], text = 1, text or str(error.args[0])
            if error.args[1] not in (_fcdp.ERR_NO_HOST_MEM, _fcdp.ERR_UNSUPPORTED):
                problem = error.with_traceback(None)
    shards.raise_together(problem)
    agreed = shards.agree(bytes(refused))
    first = agreed.find(1)
    if first >= 0:
        why = shards.first_problem(text if refused[first] else "") or why
    for i, is_refused in zip(left, agreed):
        if is_refused:
            handles[i] = None
    return [i for i, is_refused in zip(left, agreed) if not is_refused], why
