"""A parameter as a whole, from the node's copy of it, and where a part of it lies: the only file with DTensor's private
names.

`DTensor.full_tensor()`, `redistribute` to a replica and full state dicts gather in one function of DTensor's.
For a parameter that FCDP serves, the ranks agree first: the copy is fresh on all of them, or it is stale and
all of them gather it (which serves the next forward too), or the function gathers itself. The result is a
tensor of its own in each case, and autograd sees no difference.

All ranks of a mesh call the function together. Whether they ask at all depends on what is the same on all of
them: the DTensor's mesh, placements, shape and dtype, and which of these FCDP has ever served. What may differ
is in the vote: which parameter it is, and what a rank knows of its copy. The calling thread may differ too: one
rank saves in the background, the others on the main thread. Each agreement takes the place of a gather of
torch's own over the same process group, so a program that orders its gathers alike on all ranks orders these.
"""

from __future__ import annotations

import weakref
from array import array
from typing import Any

import torch

from fcdp import _fcdp, seam, shard_groups
from fcdp.c10d import Shards
from fcdp.failures import call
from fcdp.group import Group, address_of
from fcdp.runtime import runtime
from fcdp.seam import stream_of
from fcdp.settings import options

counts = [0, 0, 0, 0]  # parameters asked for: by WHOLE_*

_N_ID = 6  # bytes that name a group and an extent of it


_Offer = tuple["weakref.ref[Group]", int]  # a served parameter: its group, and which one of it that is


def offer(group: Group, index: int, shape: torch.Size, dtype: torch.dtype) -> None:
    """Offer a parameter: its whole tensor is the beginning of group.gathered[index]."""
    offers = group.shards.wholes.setdefault((tuple(shape), dtype), [])
    offers[:] = [one for one in offers if one[0]() is not None]
    offers.append((weakref.ref(group), index))


def place_of(parameter: Any) -> tuple[tuple[int, ...], tuple[int, ...], bool]:
    """Where this rank's part of a DTensor lies: its first element's indices and its shape; and whether another rank, the
    first that has the same part, stands for it. Raises NotImplementedError for placements under which the part is no box
    of the whole, or not this rank's alone to know.

    By its ranks in the process groups, as FSDP shards and full_tensor() gathers: a group's order need not be the mesh's."""
    from torch.distributed.tensor import Shard

    placements, mesh = parameter.placements, parameter.device_mesh
    dims = [placement.dim for placement in placements if type(placement) is Shard]
    if len(set(dims)) != len(dims) or not all(type(p) is Shard or p.is_replicate() for p in placements):
        raise NotImplementedError(f"its placements are {placements}")
    if mesh.get_coordinate() is None:  # this rank is not in the mesh, and has no part
        return (), (0,), False
    offset, shape, is_again = [0] * parameter.dim(), list(parameter.shape), False
    for mesh_dim, placement in enumerate(placements):
        rank, n = mesh.get_local_rank(mesh_dim), mesh.size(mesh_dim)
        if placement.is_replicate():
            is_again = is_again or rank > 0
            continue
        dim = placement.dim
        size = -(-shape[dim] // n)
        offset[dim] = min(rank * size, shape[dim])
        shape[dim] = min(size, shape[dim] - offset[dim])
    return tuple(offset), tuple(shape), is_again


def _sharded_dim(current: Any, target: Any) -> int | None:
    """The mesh dimension along which one all-gather makes the whole tensor; None: it takes another operation, or
    several."""
    from torch.distributed.tensor import Shard

    if current.mesh is not target.mesh or not all(placement.is_replicate() for placement in target.placements):
        return None
    sharded = [dim for dim, placement in enumerate(current.placements) if not placement.is_replicate()]
    if len(sharded) != 1 or type(current.placements[sharded[0]]) is not Shard:
        return None
    return sharded[0] if current.placements[sharded[0]].dim == 0 else None


def _asked(local: torch.Tensor, current: Any, target: Any) -> Shards | None:
    """The shard group that agrees on this tensor; None: there is no agreement. The same on every rank."""
    if type(local) is not torch.Tensor or not options["whole_tensors"]:  # another type is a compiler's
        return None
    dim = _sharded_dim(current, target)
    if dim is None or current.mesh.get_coordinate() is None:
        return None
    shards = shard_groups.known(current.mesh.get_group(dim))
    if not isinstance(shards, Shards) or (tuple(current.shape), local.dtype) not in shards.wholes:
        return None
    return None if seam.captures(shards.device) else shards


def _find(shards: Shards, shape: tuple[int, ...], local: torch.Tensor) -> tuple[Group, int] | None:
    """The parameter of which `local` is this rank's shard, in group.gathered too."""
    for reference, index in shards.wholes[shape, local.dtype]:
        group = reference()
        if group is not None and group.extents[index].holds(local):
            return group, index
    return None


def _vote(group: Group, index: int, stream: int) -> int:
    """WHOLE_*, as this rank sees it. Remembers nothing that an agreement in force rests on."""
    extent = group.extents[index]
    extent.settle()
    shard, fingerprint = extent.shard(), b""
    address = address_of(shard) if shard.device == group.shards.device else 0  # 0: not read here
    if address and group.by_device:
        addresses, sizes = (array("Q", [n]).tobytes() for n in (address, shard.nbytes))
        if call(group.shards.comm.begin_fingerprints, addresses, sizes, stream):
            fingerprint = call(group.shards.comm.end_fingerprints, 1)
    if not group.is_host_read(shard):
        address = 0
    signals = array("Q", extent.signals(group)).tobytes()
    return group.handle.vote_whole(index, signals, address, shard.nbytes, fingerprint)


def _agree(shards: Shards, found: tuple[Group, int] | None, stream: int) -> int:
    """What all ranks do: WHOLE_*. PLAIN if they do not mean the same parameter."""
    vote, name = _fcdp.WHOLE_PLAIN, bytes(_N_ID)
    if found is not None:
        group, index = found
        name = (group.number << 16 | index).to_bytes(_N_ID, "little")
        vote = _vote(group, index, stream)
    agreed = shards.agree(bytes((vote, *name, *(255 - byte for byte in name))))
    is_one = all(a + b == 255 for a, b in zip(agreed[1 : 1 + _N_ID], agreed[1 + _N_ID :]))
    return agreed[0] if is_one else _fcdp.WHOLE_PLAIN


def _copy(group: Group, index: int, out: torch.Tensor, stream: int) -> None:
    """From the device, where the group is brought for it."""
    call(group.handle.begin_whole, index, stream)
    group.wait(stream)
    group.storages.open()
    try:
        out.view(-1).copy_(group.gathered[index][: out.numel()])
    finally:
        group.storages.close()
    group.reshard(stream)


def _whole(local: torch.Tensor, current: Any, target: Any, is_async: bool) -> torch.Tensor | None:
    """The whole parameter as a new tensor, for which the current stream waits; None: torch gathers."""
    shards = _asked(local, current, target)
    if shards is None:
        return None
    shape, stream = tuple(current.shape), stream_of(shards.device)
    found = None if is_async else _find(shards, shape, local)
    agreed = _agree(shards, found, stream)
    if agreed == _fcdp.WHOLE_STALE:
        if call(found[0].handle.agree, stream):  # one that nobody asks for, of the same group, is missing
            agreed = _fcdp.WHOLE_PLAIN
    counts[agreed] += 1
    if agreed == _fcdp.WHOLE_PLAIN:
        return None
    group, index = found
    out = torch.empty(shape, dtype=local.dtype, device=local.device)
    if agreed == _fcdp.WHOLE_HOST:
        call(group.handle.read_whole, index, out.data_ptr(), out.nbytes, stream)
        return out
    _copy(group, index, out, stream)
    return out


def install() -> None:
    from torch.distributed.tensor import _redistribute as module

    if not seam.begins(
        getattr(module, "redistribute_local_tensor", None), ("local_tensor", "current_spec", "target_spec")
    ):
        return  # full_tensor() gathers itself

    @seam.wrap(module, "redistribute_local_tensor")
    def redistribute(original, local_tensor, current_spec, target_spec, *args, **kwargs):
        whole = None
        if runtime.engine is not None:
            whole = _whole(local_tensor, current_spec, target_spec, bool(args or kwargs.get("async_op")))
        return original(local_tensor, current_spec, target_spec, *args, **kwargs) if whole is None else whole
