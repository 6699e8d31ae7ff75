"""`fcdp.changed()`: what a step has changed in a model's weights, for programs elsewhere (blocks.py).

A rank knows its own shards: what they are now, and, from the copy that its node keeps, what they were when they were
last gathered. Their difference is what is sent, so there is no other copy of the weights and no collective. All ranks'
changes together are the model's.

A version is the fingerprint of every shard that the rank sends. Changes are made from the gathered copy if that is of
the version asked for, by its fingerprint; nothing is guessed.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

import fcdp
from fcdp import _fcdp
from fcdp.blocks import fingerprint, pack


class Version:
    """Weights of a model as they were on this rank. Of this process alone: nothing of it can be sent."""

    def __init__(self, model: torch.nn.Module, fingerprints: dict[str, int]):
        self.model, self.fingerprints = weakref.ref(model), fingerprints


class Changes:
    """(name, blocks) of every parameter of which this rank has a part that has changed; blocks: bytes for `apply`."""

    def __init__(self, blocks: list[tuple[str, bytes]], version: Version):
        self._blocks = blocks
        self.version = version  # what the weights are now: for the next changed()

    def __iter__(self) -> Iterator[tuple[str, bytes]]:
        return iter(self._blocks)

    def __len__(self) -> int:
        return len(self._blocks)

    @property
    def nbytes(self) -> int:
        return sum(len(blocks) for _, blocks in self._blocks)


def _model_and_version(since: Any) -> tuple[torch.nn.Module, dict[str, int] | None]:
    if isinstance(since, torch.nn.Module):
        return since, None
    if not isinstance(since, Version):
        raise TypeError(f"fcdp.changed() takes a model, or a version of one, not {type(since).__name__}")
    model = since.model()
    if model is None:
        raise fcdp.VersionError("the version's model is gone")
    return model, since.fingerprints


def _clean(name: str) -> str:
    """Without what checkpointing's and the compiler's wrappers put into a parameter's name."""
    return name.replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", "")


def _refuse_fsdp1(model: torch.nn.Module) -> None:
    module = sys.modules.get("torch.distributed.fsdp.fully_sharded_data_parallel")
    if module is not None and any(isinstance(part, module.FullyShardedDataParallel) for part in model.modules()):
        raise NotImplementedError(
            "fcdp.changed() serves models of FSDP2 (fully_shard), and this one has modules of FSDP1"
        )


def _is_first(parameters: Iterable[torch.Tensor]) -> bool:
    """Does this rank send what is not sharded? Each rank has it: the smallest of those in the model's meshes does. None need
    be the first in all meshes."""
    meshes = {parameter.device_mesh for parameter in parameters if isinstance(parameter, DTensor)}
    return all(dist.get_rank() <= mesh.mesh.min().item() for mesh in meshes)


def _local(
    name: str, parameter: torch.Tensor, is_first: bool
) -> tuple[torch.Tensor, tuple[int, ...], tuple[int, ...], bool]:
    """This rank's part, where it begins, its shape, and whether another rank has it too, and sends it. `is_first`: this one
    sends what is not sharded."""
    if not isinstance(parameter, DTensor):
        return parameter.detach(), (0,) * parameter.dim(), tuple(parameter.shape), not is_first
    from fcdp import whole

    try:
        offset, shape, is_again = whole.place_of(parameter)
    except NotImplementedError as why:
        raise NotImplementedError(f"fcdp.changed(): {name}: {why}") from None
    return parameter.to_local().detach(), offset, shape, is_again


def _refuse_subclass(name: str, local: torch.Tensor) -> None:
    if type(local) is not torch.Tensor:
        raise NotImplementedError(f"fcdp.changed() compares plain tensors, and {name} is a {type(local).__name__}")


def _now(sharded: Any, local: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """This rank's part in the dtype in which it is gathered, in host memory."""
    part = local.to(local.dtype if sharded is None else sharded.dtype)
    return part.view(shape).contiguous().cpu()


def _difference(sharded: Any, now: torch.Tensor, before: int) -> bytes | None:
    """From what the node has of it; b"": it is no smaller than the bytes; None: the node has not what it was."""
    if sharded is None or sharded.group is None:
        return b""
    from fcdp.failures import call

    was = torch.empty_like(now)
    if not call(sharded.group.handle.gathered_shard, sharded.index, was.data_ptr(), was.nbytes):
        return b""
    if fingerprint(was) != before:
        return None
    return _fcdp.delta_encode(was.data_ptr(), now.data_ptr(), now.nbytes, now.itemsize)


@torch.no_grad()
def changed(since: Any) -> Changes:
    from fcdp import fsdp2, sleeping

    if sleeping.asleep_bytes():
        raise RuntimeError(
            "fcdp.changed(): tensors of this process are asleep, and their bytes cannot be read. Call fcdp.wake() first"
        )
    model, before = _model_and_version(since)
    _refuse_fsdp1(model)
    sharded = {_clean(one.name): one for one in fsdp2.sharded_parameters(model)}
    parameters = {name: one.parameter for name, one in sharded.items()}
    others = {_clean(name): parameter for name, parameter in model.named_parameters()}
    for alias in (alias for one in sharded.values() for alias in (one.name, *one.aliases)):
        others.pop(_clean(alias), None)  # while they are unsharded, the module has another tensor in their place
    parameters |= others
    is_first = _is_first(parameters.values())
    blocks, fingerprints = [], {}
    for name, parameter in parameters.items():
        local, offset, shape, is_again = _local(name, parameter, is_first)
        _refuse_subclass(name, local)
        if is_again or 0 in shape:
            continue
        now = _now(sharded.get(name), local, shape)
        fingerprints[name] = fingerprint(now)
        if before is not None and before.get(name) == fingerprints[name]:
            continue
        wire: bytes | None = b""
        if before is not None and name in before:
            wire = _difference(sharded.get(name), now, before[name])
        if wire is None:
            raise fcdp.VersionError(
                f"{name}: the version is no longer there: the node has gathered the weights since they changed again. "
                "Call fcdp.changed() after each optimizer step, or with the model for all weights"
            )
        was = 0 if before is None else before.get(name, 0)
        blocks.append((name, pack(name, now, tuple(parameter.shape), offset, was, fingerprints[name], wire)))
    return Changes(blocks, Version(model, fingerprints))
