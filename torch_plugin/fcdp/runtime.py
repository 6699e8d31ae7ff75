"""One process's FCDP: the engine and the groups that it serves.

FSDP's names are in fsdp1.py and fsdp2.py, process groups in c10d.py; what is stale, what moves and how is decided in C.

The protocol of an unshard is comm/unshard.h's. It asks a Group for what only Python knows: where the shards lie, what
their signals are, the shards in the gathered dtype, the other ranks' votes. When the ranks agree is decided from
events that this file passes on: a root forward or a backward begins, a group is unsharded, its gradients are reduced,
an optimizer has stepped its parameters. All of them happen on every rank of the shard group in the same order. What
concerns no group that is served (another optimizer, another model) is not passed on.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import weakref
from array import array
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

import fcdp.ending  # noqa: F401 (it calls end())
from fcdp import OptionError, _fcdp, gil, nccl, released, report, tensors, words
from fcdp.c10d import Shards, TurnedOff, Unsupported
from fcdp.released import Storages

log = logging.getLogger("fcdp")

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


def say(text: str, speaker: int = 0) -> None:
    """One line to the user, from one rank alone."""
    rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else int(os.environ.get("RANK", "0"))
    if rank == speaker and runtime.options.get("log", 1) > 0:
        words.write(text)


# Of a parameter group: name, extents, (shard_bytes, span) per extent, collect (Group.collect), does it stay
# gathered after forward.
Description = tuple[str, list[Any], list[tuple[int, int]], Callable, bool]


class Tree:
    """What lies under one FSDP root: its passes begin for all of it at once. One agreement for each shard group
    in it."""

    def __init__(self, param_groups: list[Any]):
        self.param_groups = param_groups  # FSDP's, served or not
        self.handles: dict[Shards, Any] = {}
        # A backward that raised has left FSDP's mark of one under way; and the task of autograd's that last began one.
        self.interrupted, self.task = False, -1

    def begins_backward(self, is_marked: bool) -> bool:
        """In a backward's first hook, and in no later one. `is_marked`: FSDP knows of a backward."""
        before, self.task = self.task, torch._C._current_graph_task_id()
        return not is_marked or self.interrupted and self.task != before

    def handle(self, shards: Shards) -> Any:
        if shards not in self.handles:
            self.handles[shards] = _fcdp.tree_create(shards.comm)
            self._enter(shards)
        return self.handles[shards]

    def enter(self) -> None:
        """Groups of it have been decided on since the handles were made."""
        for shards in self.handles:
            self._enter(shards)

    def _enter(self, shards: Shards) -> None:
        groups = [g.__dict__.get("_fcdp") for g in self.param_groups]
        served = [group for group in groups if group is not None and group.shards is shards and group.tree is None]
        _fcdp.tree_set_groups(self.handles[shards], [group.handle for group in served])


class Group:
    """A parameter group that FCDP serves."""

    def __init__(
        self, name: str, extents: list[Any], shards: Shards, handle: Any, shard_bytes: list[int], collect: Callable
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
        self.steps = 0  # runtime.steps at the last observation
        self.reductions = 0
        self.by_device = False  # the device fingerprints its shards
        self.inputs: tuple | None = None  # of the use under way, which must outlive their readers
        _fcdp.group_set_owner(handle, self, [extent.name for extent in extents])

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
                capsule = _fcdp.dlpack(
                    _fcdp.group_extent(self.handle, i), bytes_ * 8 // bits, code, bits, kind, index, self.handle
                )
                flat = torch.from_dlpack(capsule)
                out.append(flat if dtype in _DLPACK else flat.view(dtype))
        return out

    @property
    def by_host(self) -> bool:
        """The host compares the bytes of the shards that it has."""
        return not self.by_device and runtime.options["fingerprint"] == _fcdp.FINGERPRINT_AUTO

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
            self.by_device = runtime.device_reads(self)
        places = self._places() if what & _fcdp.LOOK_PLACES else None
        scene = self._scene() if what & _fcdp.LOOK_SCENE else None
        signals = self._signals() if what & _fcdp.LOOK_SIGNALS else None
        return places, signals, scene

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
        self.steps = runtime.steps
        # Backward hooks run without grad mode; what counts is that of the forward it belongs to.
        grad = runtime.in_backward() or torch.is_grad_enabled()
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
        runtime.options["fingerprint"] = _fcdp.FINGERPRINT_NEVER
        say(
            "the device takes no fingerprints of parameters: a write that moves no version counter may go unnoticed (FCDP_FINGERPRINT)"
        )

    # What FSDP asks.

    def wait(self, stream: int) -> None:
        """`stream`, the current one, goes on when the bytes are there; on CPUs this thread does."""
        call(_fcdp.group_wait, self.handle, stream)
        self.inputs = None  # their memory is used again behind their readers

    def cancel(self, stream: int) -> None:
        """FSDP will not use what it unsharded (a prefetch of what the backward did not need)."""
        if call(_fcdp.group_cancel, self.handle, stream):
            self.inputs = None
        runtime.release(self, stream)

    def give_up(self, stream: int) -> None:
        """Its use has failed after the unshard, so FSDP holds nothing."""
        _fcdp.group_give_up(self.handle, stream)

    def reduced(self) -> None:
        """Its gradients have been reduced: an optimizer may step inside this backward."""
        self.reductions += 1
        self.ask_again()

    def ask_again(self) -> None:
        """Its shard group agrees anew at its next unshard."""
        _fcdp.group_ask_again(self.handle)


def call(function: Callable, *args: Any) -> Any:
    try:
        return function(*args)
    except _fcdp.Error as error:
        if error.args[1] == _fcdp.ERR_NO_DEVICE_MEM:
            # As FSDP's own gathers, in the words that scripts look for when they try a smaller batch.
            raise torch.OutOfMemoryError(f"CUDA out of memory. fcdp: {error.args[0]}") from None
        raise RuntimeError(f"fcdp: {error.args[0]}{runtime.missing(error)}") from None


class Runtime:
    def __init__(self) -> None:
        self.pid = os.getpid()
        self.options: dict[str, Any] = {}
        self.engine: Any = None
        self.device: torch.device | None = None  # the engine's
        # By id of the process group, which lives as long as the job wants it: then the entry goes.
        self.shards: dict[int, tuple[weakref.ref[dist.ProcessGroup], Shards | Unsupported]] = {}
        # Models on process groups of their own may meet them first on several threads. None waits for a peer of its
        # group inside.
        self.lock = threading.Lock()
        self.past_agreements = [0, 0, 0]  # of shard groups that have ended
        self.groups: weakref.WeakSet[Group] = weakref.WeakSet()
        self.by_id: weakref.WeakValueDictionary[int, Group] = weakref.WeakValueDictionary()
        self.bypassed: list[dict[str, Any]] = []
        self.reported: set[frozenset[str]] = set()
        self.unreported: tuple[list[tuple[str, str]], int, str] | None = None
        self.beside_bytes = 0  # that each rank received in gathers of FSDP's own
        self.plain: dict[str, list[int]] = {kind: [0, 0, 0] for kind in ("plain_gather", "reduce_scatter")}
        self.steps = 0
        self.wholes = [0, 0, 0, 0]  # parameters asked for as a whole: by WHOLE_*

    def device_reads(self, group: Group) -> bool:
        """Is the device to fingerprint the group's shards? All of them, or none."""
        asked, device = self.options["fingerprint"], group.shards.device
        wanted = asked == _fcdp.FINGERPRINT_DEVICE or asked == _fcdp.FINGERPRINT_AUTO and device.type != "cpu"
        return wanted and all(extent.shard().device == device for extent in group.extents)

    @staticmethod
    def in_backward() -> bool:
        return torch._C._current_graph_task_id() != -1

    # Passes begin: copies are not trusted any more without asking.

    def begin_forward(self, tree: Tree) -> None:
        for handle in tree.handles.values():
            _fcdp.tree_begin_forward(handle)
        if self.engine is not None:
            _fcdp.engine_begin_pass(self.engine)
            report.say_once()  # of optimizers that step inside of backward

    def begin_backward(self, tree: Tree) -> None:
        for handle in tree.handles.values():
            _fcdp.tree_begin_backward(handle)

    # Serving.

    def known(self, group: dist.ProcessGroup) -> Shards | Unsupported | None:
        entry = self.shards.get(id(group))
        return entry[1] if entry is not None and entry[0]() is group else None

    def connect(
        self, group: dist.ProcessGroup, device: torch.device, gather: Callable[[], None], beside: Shards | None
    ) -> Shards:
        """The lanes and the comm of a shard group; made once, by all its ranks together. Raises Unsupported each
        time where it cannot be served. `gather` is presence.py's. `beside`: one of the same model, run by the same
        thread; its streams serve this one too."""
        known = self.known(group)
        if known is None:
            with self.lock:
                self._close_ended()
            known = self._connect(group, device, gather, beside)
            self.shards[id(group)] = weakref.ref(group), known
        if isinstance(known, Unsupported):
            raise Unsupported(*known.args)
        return known

    def _close_ended(self) -> None:
        """Close what belongs to process groups that were destroyed, though a dead model may still hold the
        object."""
        alive = distributed_c10d._world.pg_map
        for key, (reference, shards) in list(self.shards.items()):
            if reference() is None or reference() not in alive:
                del self.shards[key]
                self._close(shards)

    def _close(self, shards: Shards | Unsupported) -> None:
        if isinstance(shards, Shards):
            self.past_agreements = [a + b for a, b in zip(self.past_agreements, shards.agreed())]
            shards.close()

    def served_shards(self) -> list[Shards]:
        return [shards for _, shards in self.shards.values() if isinstance(shards, Shards)]

    def _connect(
        self, group: dist.ProcessGroup, device: torch.device, gather: Callable[[], None], beside: Shards | None
    ) -> Shards | Unsupported:
        try:
            shards = Shards(group, device, self.options, gather)
            problem: Exception | None = None  # without its traceback, which would hold this frame
            try:
                with self.lock:
                    self._need_engine(device)
                    self._need_account(shards)
            except (_fcdp.Error, Unsupported) as error:
                problem = error.with_traceback(None)
            shards.raise_together(problem)
            self._trace_job(shards)
            shards.comm = self._comm(shards)
            try:
                _fcdp.comm_set_streams(shards.comm, beside.comm if beside is not None else None)
            except _fcdp.Error as error:  # its order with what runs on other streams would not be the peers'
                problem = error.with_traceback(None)
            shards.raise_together(problem)
            _fcdp.comm_set_shard_group(shards.comm, shards.number())
            self._share_host_memory(shards)
            return shards
        except Unsupported as error:
            if isinstance(error, TurnedOff) and error.first != 0:  # rank 0 may have nothing to say of it
                say(f"{error}; plain FSDP runs", error.first)
            # kept for the job's life: the one raised holds the frames, and so the model, that met it
            return Unsupported(*error.args)

    def _trace_job(self, shards: Shards) -> None:
        """This process's place in the job, for who reads its trace."""
        rank, size = dist.get_rank(), dist.get_world_size()
        of_node = self.options["local_size"] or int(os.environ.get("LOCAL_WORLD_SIZE", shards.node_size))
        of_node = min(of_node, size)
        _fcdp.trace_job(rank, size, rank // of_node, -(-size // of_node), rank % of_node, of_node)

    def _comm(self, shards: Shards) -> Any:
        """The core's shard group, over NCCL or over torch.distributed's gloo, the same on every rank."""
        asked = self.options["transport"]
        if asked == _fcdp.TRANSPORT_NCCL or (asked == _fcdp.TRANSPORT_AUTO and shards.device.type != "cpu"):
            comm, problem = nccl.connect(self.engine, shards)
            if not problem:
                shards.can_ask = True
                return comm
            if asked == _fcdp.TRANSPORT_NCCL:
                raise OptionError(f"fcdp: FCDP_TRANSPORT=nccl, but {problem}")
            say(
                f"its collectives go over gloo, through host memory, as NCCL cannot carry them ({problem}); FCDP_TRANSPORT=torch silences this"
            )
        if self.options["restore"] == _fcdp.RESTORE_SLICE and shards.device.type != "cpu":
            say(
                "FCDP_RESTORE=slice is for NCCL: over gloo the ranks of a node meet in host memory, as with FCDP_RESTORE=whole"
            )
        if shards.device.type != "cpu":
            gil.wait_without(shards.device)
        transport, comm, problem = shards.transport(), None, None
        try:
            comm = _fcdp.comm_create(self.engine, shards.node_of, shards.rank, transport)
        except _fcdp.Error as error:
            problem = error.with_traceback(None)
        shards.raise_together(problem)
        return comm

    def _need_engine(self, device: torch.device) -> None:
        if self.engine is not None:
            if self.device != device:
                raise Unsupported(
                    f"this process serves another device already ({self.device}, this shard group is on {device})"
                )
            return
        asked = self.options["driver"]
        is_cuda, on_host = device.type == "cuda", device.type == "cpu"
        kind = _fcdp.DRIVER_CUDA if is_cuda else _fcdp.DRIVER_SIM
        if asked == _fcdp.DRIVER_CUDA and on_host:
            raise Unsupported(
                "FCDP_DRIVER=cuda, but the model is on the CPU (is there a CUDA device?); use FCDP_DRIVER=auto, or sim"
            )
        if asked == _fcdp.DRIVER_SIM and kind == _fcdp.DRIVER_CUDA:
            raise Unsupported("FCDP_DRIVER=sim, but the model is on a CUDA device; use FCDP_DRIVER=auto")
        library = os.path.join(os.path.dirname(__file__), "libfcdp_simgpu.so")
        # one pool of pages for parameters and tensors; all tensors of "sim" are fcdp_alloc's
        shares = tensors.is_current() if is_cuda else not on_host
        ordinal = device.index or 0 if is_cuda else 0  # simgpu has one device, whatever its index in torch
        self.engine = _fcdp.engine_create(kind, ordinal, library, shares, self._mapping(), on_host)
        self.device = device
        self.account_ready = False
        if kind == _fcdp.DRIVER_CUDA and not shares:
            tensors.share_device(self.engine)

    def _mapping(self) -> int:
        """A stale access to a page that another group has by now would read a wrong number. So it must fault where
        torch has no storages that raise."""
        asked = self.options["mapping"]
        return _fcdp.MAPPING_EXACT if asked == _fcdp.MAPPING_AUTO and not released.SUPPORTED else asked

    def _need_account(self, shards: Shards) -> None:
        """The budget of the node's host memory: the node's first process to come here makes it, whatever its
        shard group; the others join."""
        if self.account_ready:
            return
        key, store = f"fcdp/account/{shards.machine}", shards.store
        if store.add(f"{key}/comers", 1) == 1:
            try:
                ticket = _fcdp.engine_account_create(self.engine)
            except _fcdp.Error as error:
                store.set(key, f"!{error.args[0]}")
                raise
            store.set(key, ticket.hex())
        else:
            said = store.get(key).decode()
            if said.startswith("!"):
                raise Unsupported(said[1:])
            _fcdp.engine_account_join(self.engine, bytes.fromhex(said))
        self.account_ready = True

    def _share_host_memory(self, shards: Shards) -> None:
        ticket, problem = b"", None
        if shards.local == 0:
            try:
                ticket = _fcdp.comm_host_create(shards.comm)
            except _fcdp.Error as error:
                problem = error.with_traceback(None)
        shards.raise_together(problem)
        ticket = shards.from_leader(ticket)
        if shards.local != 0:
            try:
                _fcdp.comm_host_join(shards.comm, ticket)
            except _fcdp.Error as error:
                problem = error.with_traceback(None)
        shards.raise_together(problem)
        shards.meets = True

    def attach(self, shards: Shards, described: list[Description]) -> list[Group]:
        """Groups for them, all or none; a collective of the shard group."""
        handles: list[Any] = []
        ahead = True
        offsets, problem = array("Q", [0]) * len(described), None
        try:
            for i, (name, _, specs, _, _) in enumerate(described):
                handles.append(_fcdp.group_create(shards.comm, name, specs))
                if shards.local == 0:
                    offsets[i] = _fcdp.group_host_alloc(handles[i])
            ahead = _fcdp.groups_fit(handles, bytes(stays for *_, stays in described))
        except _fcdp.Error as error:
            problem = error.with_traceback(None)
        shards.raise_together(problem)
        offsets = array("Q", shards.from_leader(offsets.tobytes()))
        try:
            for handle, offset in zip(handles, offsets):
                _fcdp.group_attach(handle, offset)
        except _fcdp.Error as error:
            problem = error.with_traceback(None)
        shards.raise_together(problem)
        shards.ahead &= shards.agree(b"\0" if ahead else b"\1") == b"\0"
        _fcdp.comm_set_ahead(shards.comm, shards.ahead)
        made = []
        for handle, (name, extents, specs, collect, _) in zip(handles, described):
            group = Group(name, extents, shards, handle, [bytes_ for bytes_, _ in specs], collect)
            self.groups.add(group)
            self.by_id[_fcdp.group_id(handle)] = group
            made.append(group)
        return made

    def bypass(self, name: str, reason: str, size: tuple[int, int] | None = None) -> None:
        """The group is FSDP's own from here on. `size`: its bytes, and the trainable ones of them."""
        figures = dict(zip(("bytes", "trainable_bytes"), size)) if size else {}
        self.bypassed.append({"group": name, "reason": reason, **figures})
        _fcdp.trace_bypass(name, reason, *(size or (0, 0)))

    def report_bypassed(self, bypassed: list[tuple[str, str]], n_groups: int, complete: bool, fsdp: str) -> None:
        """One line about the (name, reason) left to `fsdp` ("FSDP2") of a model's `n_groups`, once for each set of
        reasons. Not `complete`: others are decided later, and what is said waits for them, or for the exit."""
        self.unreported = None
        reasons = Counter(reason for _, reason in bypassed)
        if not bypassed or frozenset(reasons) in self.reported:
            return
        if not complete:
            self.unreported = bypassed, n_groups, fsdp
            return
        self.reported.add(frozenset(reasons))
        why = "; ".join(reason if len(reasons) == 1 else f"{reason} ({count})" for reason, count in reasons.items())
        names = ", ".join(name or "the root group" for name, _ in bypassed[:3]) + (", ..." if len(bypassed) > 3 else "")
        served = n_groups - len(bypassed)
        say(f"served {served} of {n_groups} groups: {why}; plain {fsdp} runs" + (f" for {names}" if served else ""))

    def unshard(self, group: Group, tree: Tree, forward: bool, by_hand: bool, stream: int, side: Any = None) -> None:
        """The gather or restore of `group`, of `tree`. `by_hand`: not from within FSDP's hooks. `stream`: the current
        one; `side` (side.py): where what is gathered is made; None: on the current one."""
        handle, alone = (group.tree or tree).handle(group.shards), group.tree is not None
        pass_ = _fcdp.PASS_FORWARD if forward else _fcdp.PASS_BACKWARD if self.in_backward() else _fcdp.PASS_OTHER
        made_on = side.handle if alone and side is not None else stream  # extensions have made their tensors there
        call(_fcdp.group_unshard, group.handle, handle, pass_, by_hand or alone, stream, made_on, side)

    def release(self, group: Group, stream: int) -> None:
        """FSDP resharded the group, or (FSDP1) has its own copy of it."""
        call(_fcdp.group_reshard, group.handle, stream)

    def missing(self, error: _fcdp.Error) -> str:
        """Which ranks did not come, for a failure of collectives that do not say so themselves; else ""."""
        if error.args[1] not in (_fcdp.ERR_TIMEOUT, _fcdp.ERR_PEER, _fcdp.ERR_TRANSPORT):
            return ""
        for shards in self.served_shards():
            try:
                _fcdp.comm_check(shards.comm)
            except _fcdp.Error:
                if who := shards.missing():
                    return f"; {who}"
        return ""

    def order_writes(self, stream: int) -> None:
        """What `stream` does next may write into shards. Raises what the device, a peer or a collective has
        failed at by now."""
        call(_fcdp.engine_order_writes, self.engine, stream)

    # Counting.

    def count_plain(
        self,
        kind: str,
        group: dist.ProcessGroup,
        bytes_per_hop: int,
        around: Shards | None = None,
        start_ns: int = 0,
    ) -> None:
        """A collective of FSDP's: a ring over the group's ranks in which each sends `bytes_per_hop` to the next.
        `around`: a shard group that the ranks are a part of. `start_ns`: it has taken the program's time since then,
        and is done; 0: its end is not known."""
        entry = self.plain[kind]
        entry[0] += 1
        if kind == "plain_gather":
            self.beside_bytes += bytes_per_hop
        shards = self.known(group)
        if isinstance(shards, Shards):
            crosses: bool | None = shards.local == shards.node_size - 1
        else:
            crosses = around.crosses(dist.get_process_group_ranks(group)) if around is not None else None
        if crosses is not None:
            entry[1 if crosses else 2] += bytes_per_hop
        _fcdp.trace_plain(kind == "plain_gather", bytes_per_hop, crosses, group.size(), start_ns)


runtime = Runtime()


def end() -> None:
    """The interpreter ends (ending.py)."""
    from fcdp import settings

    if runtime.pid != os.getpid():  # a forked child
        return
    if runtime.unreported:
        bypassed, n_groups, fsdp = runtime.unreported
        runtime.report_bypassed(bypassed, n_groups, True, fsdp)
    settings.say_unread()
    if runtime.engine is None:
        return
    report.summary()
    # The streams must be idle before the interpreter ends: a thread that asks for the GIL after that is ended inside
    # torch, which aborts. A collective whose peer is gone ends by itself: its connection is closed, or FCDP_TIMEOUT passes.
    try:
        _fcdp.engine_drain(runtime.engine)
    except _fcdp.Error as error:
        log.debug("at exit: %s", error.args[0])
    _fcdp.engine_destroy(runtime.engine)
    for shards in runtime.served_shards():
        shards.close()
