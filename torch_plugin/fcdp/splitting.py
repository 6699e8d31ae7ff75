"""`fcdp.split()`: a linear layer whose rows are computed in parts, so that each part can be a parameter group of its own.

The layer stays the module that it was; its parameters become those of its parts. A forward runs the parts one after
another and writes what each gives into its place of the output. Between two parts FSDP reshards, so of the layer one part
is gathered at a time, and those that are gathered ahead; in backward too, where the last part comes first.

A state dict has the layer's parameters under their own names and whole, so it fits the layer that was not split. Where
the parts are sharded on their rows, making it is a collective: a rank's rows of the whole lie in parts of others.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn as nn
from torch.multiprocessing.reductions import StorageWeakRef

from fcdp import words

_NAMES = ("weight", "bias")
# Parts begin at multiples of so many rows. BLAS computes rows in blocks, and those of an incomplete block in another order:
# on CPUs, multiples of 8 gave the whole layer's bits, and others did not.
_BLOCK = 64


class SplitPart(nn.Linear):
    """Rows of a split layer; `fully_shard` takes it like any module."""


class _Place(torch.autograd.Function):
    """Writes a part's output into its columns of the layer's. As a chain, it holds one part's at a time; torch.cat would
    hold all of them beside the whole."""

    @staticmethod
    def forward(ctx: Any, out: torch.Tensor, columns: torch.Tensor, begin: int) -> torch.Tensor:
        ctx.begin, ctx.end = begin, begin + columns.shape[-1]
        out[..., ctx.begin : ctx.end].copy_(columns)
        ctx.mark_dirty(out)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        (gradient,) = gradients
        return gradient, gradient[..., ctx.begin : ctx.end], None


class _Sum(torch.autograd.Function):
    """Begins a chain through all parts whose gradient is the sum of those of `x`, in float32. It has no values."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.dtype = x.dtype
        return x.new_zeros((), dtype=torch.float32).expand(x.shape)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0].to(ctx.dtype)


class _Summand(torch.autograd.Function):
    """`x` for one part, and the chain for the next one."""

    @staticmethod
    def forward(ctx: Any, chain: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.set_materialize_grads(False)
        return x.view_as(x), chain.view_as(chain)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, None]:
        of_x, of_chain = gradients
        if of_x is None or of_chain is None:
            return (of_chain if of_x is None else of_x.float()), None
        return of_chain + of_x, None


def _inputs(x: torch.Tensor, n: int) -> Iterator[torch.Tensor]:
    """`x` for each of n parts. Autograd adds up what they give for it in x's dtype, so 16-bit gradients would be rounded
    n times."""
    if not (torch.is_grad_enabled() and x.requires_grad and x.dtype.itemsize < 4):
        yield from (x for _ in range(n))
        return
    chain, values = _Sum.apply(x), x.detach()
    for _ in range(n):
        one, chain = _Summand.apply(chain, values)
        yield one
        del one


class _Whole:
    """What stands for a parameter that is split: what it is, and not its values."""

    def __init__(self, layer: SplitLinear, name: str):
        self._layer, self._name = layer, name

    @property
    def shape(self) -> torch.Size:
        one = getattr(self._layer.parts[0], self._name)
        return torch.Size((self._layer.out_features, *one.shape[1:]))

    def __getattr__(self, attribute: str) -> Any:
        if attribute in ("dtype", "device", "requires_grad", "ndim", "is_meta"):
            return getattr(getattr(self._layer.parts[0], self._name), attribute)
        raise AttributeError(f"{self!r} has no {attribute!r}: its rows are the parameters of the layer's parts")

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise TypeError(
            "a layer that fcdp.split() has split has no whole weight to compute with; call the layer, or do not split it"
        )

    def __repr__(self) -> str:
        return f"<{self._name} of a layer in {len(self._layer.parts)} parts>"


class SplitLinear(nn.Module):
    """What `fcdp.split()` makes of an nn.Linear."""

    parts: nn.ModuleList
    in_features: int
    out_features: int

    @property
    def weight(self) -> Any:
        return _Whole(self, "weight")

    @property
    def bias(self) -> Any:
        return None if self.parts[0].bias is None else _Whole(self, "bias")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self._check()
        recomputes = torch._C._current_graph_task_id() != -1  # activation checkpointing, inside of a backward
        out, begin = None, 0
        for part, own in zip(self.parts, _inputs(x, len(self.parts))):
            was_sharded = _is_distributed(part.weight)
            columns = part(own)
            if was_sharded and recomputes and hasattr(part, "reshard"):
                part.reshard()  # FSDP2 would keep all parts until each one's backward
            if out is None:
                out = columns.new_empty(*columns.shape[:-1], self.out_features)
            out = _Place.apply(out, columns, begin)
            begin += columns.shape[-1]
            del columns  # before the next part is gathered
        return out

    def _check(self) -> None:
        self._check_copies()
        if self._is_new:
            self._is_new = False
            self._refuse_wrapped()
            module = sys.modules.get("torch.distributed.fsdp")
            sharded = module is not None and all(isinstance(part, module.FSDPModule) for part in self.parts)
            if not sharded and any(part.weight is not own() for part, own in zip(self.parts, self._own)):
                words.say(
                    f"a layer was split into {len(self.parts)} parts, but fully_shard was not applied to each of these: "
                    "they are gathered together, which saves no memory"
                )

    def _check_copies(self) -> None:
        for name, copies in self._saved.items():
            self._saved[name] = [copy for copy in copies if not copy.is_done()]
            if any(copy.is_written() for copy in copies):
                raise RuntimeError(
                    f"the {name} that state_dict() gave of a split layer has been written to; it is a copy, "
                    "so pass the state dict to load_state_dict() (after torch.distributed.checkpoint.load(), too)"
                )

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, parts={len(self.parts)}"

    def __getstate__(self) -> dict[str, Any]:
        """Of a copy, or of what is pickled."""
        return self.__dict__ | {"_saved": {}, "_own": [], "_is_new": False}

    # State dicts: Module calls these two of each module, and then those of its children.

    def state_dict(self, *args: Any, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:
        if args:
            raise TypeError("state_dict() of a split layer takes keyword arguments alone")
        self._check_copies()  # what was written is not in what this one gives
        own = super().state_dict(prefix=prefix, keep_vars=keep_vars)
        for name in self._names():
            rows = [own.pop(f"{prefix}parts.{i}.{name}") for i in range(len(self.parts))]
            with torch.inference_mode(False), torch.no_grad():  # inference mode's tensors do not count writes
                whole = own[prefix + name] = _joined(rows, self.out_features, prefix + name)
            self._saved.setdefault(name, []).append(_Copy(whole))
        if destination is None:
            return own
        destination.update(own)
        if hasattr(destination, "_metadata"):
            destination._metadata.update(own._metadata)
        return destination

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        for part in self.parts:
            if hasattr(part, "reshard"):  # FSDPModule's
                part.reshard()
        for name in self._names():
            keys = [f"{prefix}parts.{i}.{name}" for i in range(len(self.parts))]
            own = [getattr(part, name) for part in self.parts]
            whole = state_dict.pop(prefix + name, None)
            if whole is None:
                if any(key in state_dict for key in keys):
                    error_msgs.append(
                        f"{prefix}{name} is not there, but its parts are: set_model_state_dict(broadcast_from_rank0=True) "
                        "cannot serve a split layer; give every rank the full state dict, or load it before fcdp.split()"
                    )
                missing_keys.append(prefix + name)
                rows = own
            elif tuple(whole.shape) != tuple(getattr(self, name).shape):
                shapes = f"{tuple(whole.shape)} in the checkpoint, {tuple(getattr(self, name).shape)} in the model"
                error_msgs.append(f"size mismatch for {prefix}{name}: {shapes}")
                rows = own
            else:
                rows = _rows(whole, own, prefix + name)
                self._are_loaded(name, local_metadata.get("assign_to_params_buffers", False))
            state_dict.update(zip(keys, rows))
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )

    def _are_loaded(self, name: str, is_assigned: bool) -> None:
        """What has been written to the copies is what is loaded, or would be gone by it."""
        if is_assigned:
            self._saved.pop(name, None)  # one of them may be the parameter now
        for copy in self._saved.get(name, ()):
            copy.accept()

    def _names(self) -> list[str]:
        self._refuse_wrapped()
        return [name for name in _NAMES if getattr(self.parts[0], name) is not None]

    def _refuse_wrapped(self) -> None:
        for part in self.parts:
            if not isinstance(part, SplitPart):
                raise NotImplementedError(
                    f"a part of a split layer is a {type(part).__name__} now: only fully_shard may be applied to parts "
                    "(FSDP1 and adapters on parts are not served; put adapters on before fcdp.split())"
                )


def _is_distributed(tensor: torch.Tensor) -> bool:
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


class _Copy:
    """Of a tensor that state_dict() gave, whether it has been written to: also when nobody has it any more. What was
    written is not taken over: parameters may have changed since, and ranks would have to agree."""

    def __init__(self, tensor: Any):
        local = tensor.to_local() if _is_distributed(tensor) else tensor
        self._counter = local.detach()  # has the version counter of `local`,
        self._counter.data = local.new_empty(0)  # and none of its memory
        self._storage = StorageWeakRef(local.untyped_storage())
        self.accept()

    def accept(self) -> None:
        self._version = self._counter._version

    def is_written(self) -> bool:
        return self._counter._version != self._version

    def is_done(self) -> bool:
        """It has not been written to, and nobody has it any more, nor a view of it, to do so."""
        return self._storage.expired() and not self.is_written()  # in this order, as other threads may write


def _row_dim(tensor: Any, name: str) -> int | None:
    """The mesh dimension over which the rows of a DTensor are sharded, in FSDP's way; None: each rank has all rows."""
    from torch.distributed.tensor import Shard

    placements = tensor.placements
    dims = [i for i, placement in enumerate(placements) if type(placement) is Shard and placement.dim == 0]
    if len(dims) > 1 or not all(type(placement) is Shard or placement.is_replicate() for placement in placements):
        raise NotImplementedError(f"state dicts of a split layer do not know the placements {placements} of {name}")
    return dims[0] if dims else None


def _extent(n: int, of: int, rank: int) -> tuple[int, int]:
    """Of n rows in FSDP's shards, this rank's: begin and end."""
    size = -(-n // of)
    return min(rank * size, n), min((rank + 1) * size, n)


def _empty_like(rows: Any, n: int) -> Any:
    """A DTensor of n rows, as `rows` for the rest; its local tensor is not set."""
    from torch.distributed.tensor import DTensor

    dim, local = _row_dim(rows, "it"), rows.to_local()
    begin, end = 0, n
    if dim is not None:
        begin, end = _extent(n, rows.device_mesh.size(dim), rows.device_mesh.get_local_rank(dim))
    shape = (n, *rows.shape[1:])
    # from_local() moves what is not on "meta" to the mesh's device
    meta = local.new_empty(end - begin, *local.shape[1:], device="meta")
    stride = (rows.shape[1], 1) if len(shape) == 2 else (1,)
    empty = DTensor.from_local(meta, rows.device_mesh, rows.placements, run_check=False, shape=shape, stride=stride)
    return torch.empty_like(empty, device=local.device)


def _joined(rows: list[Any], n: int, name: str) -> Any:
    """The whole, as a tensor of its own. A collective where rows are sharded; it holds one part at a time."""
    if not _is_distributed(rows[0]):
        return torch.cat(rows)
    dim = _row_dim(rows[0], name)
    whole = _empty_like(rows[0], n)
    local = whole.to_local()
    if dim is None:
        torch.cat([part.to_local() for part in rows], out=local)
    elif not local.is_meta:
        mine = _extent(n, rows[0].device_mesh.size(dim), rows[0].device_mesh.get_local_rank(dim))
        begin = 0
        for part in rows:
            _copy_overlap(local, mine, _gathered(part, dim), (begin, begin + part.shape[0]))
            begin += part.shape[0]
    return whole


def _collective_device(tensor: Any) -> torch.device:
    """Where collectives of a DTensor run: CPUOffloadPolicy keeps it on the host, and the process group may be NCCL's."""
    device, kind = tensor.to_local().device, tensor.device_mesh.device_type
    return device if device.type == kind else torch.device(kind)


def _gathered(part: Any, dim: int) -> torch.Tensor:
    """All rows of a part, each with the columns that this rank has."""
    from torch.distributed.tensor import Replicate

    placements = list(part.placements)
    placements[dim] = Replicate()
    return part.to(_collective_device(part)).redistribute(placements=placements).to_local()


def _copy_overlap(to: torch.Tensor, to_rows: tuple[int, int], of: torch.Tensor, of_rows: tuple[int, int]) -> None:
    begin, end = max(to_rows[0], of_rows[0]), min(to_rows[1], of_rows[1])
    if begin < end:
        to[begin - to_rows[0] : end - to_rows[0]].copy_(of[begin - of_rows[0] : end - of_rows[0]])


def _rows(whole: torch.Tensor, own: list[Any], name: str) -> list[Any]:
    """What of it each part gets, as the part's parameter is sharded. A collective where `whole` is a DTensor."""
    ends = [0]
    for part in own:
        ends.append(ends[-1] + part.shape[0])
    places = list(zip(ends, ends[1:]))
    if not _is_distributed(own[0]):
        if _is_distributed(whole):
            raise NotImplementedError(f"{name} is a DTensor in the state dict, and the split layer is not sharded")
        return [whole[begin:end] for begin, end in places]
    rows = []
    for part, place in zip(own, places):
        dim = _row_dim(part, name)
        to = _empty_like(part, part.shape[0])
        local = to.to_local()
        at = (
            0
            if dim is None
            else _extent(part.shape[0], part.device_mesh.size(dim), part.device_mesh.get_local_rank(dim))[0]
        )
        mine = place[0] + at, place[0] + at + local.shape[0]
        if _is_distributed(whole):
            _receive(whole, local, mine, place, part, name)
        else:
            _copy_overlap(local, mine, _columns(whole, part), (0, whole.shape[0]))
        rows.append(to)
    return rows


def _columns(whole: torch.Tensor, part: Any) -> torch.Tensor:
    """Of a whole tensor, the columns that this rank has of a part that is sharded over them."""
    from torch.distributed.tensor import Shard

    for dim, placement in enumerate(part.placements):
        if type(placement) is Shard and placement.dim == 1:
            begin, end = _extent(whole.shape[1], part.device_mesh.size(dim), part.device_mesh.get_local_rank(dim))
            whole = whole[:, begin:end]
    return whole


def _receive(
    whole: Any, local: torch.Tensor, mine: tuple[int, int], place: tuple[int, int], part: Any, name: str
) -> None:
    """The rows at `place` from the ranks that have them, each of which sends what is its own."""
    import torch.distributed as dist

    if whole.device_mesh != part.device_mesh or whole.placements != part.placements:
        raise NotImplementedError(f"{name} is sharded otherwise in the state dict than the split layer's parts are")
    dim, n = _row_dim(whole, name), whole.shape[0]
    theirs = whole.to_local()
    if dim is None:
        local.copy_(theirs[place[0] : place[1]])
        return
    group, size, me = (
        whole.device_mesh.get_group(dim),
        whole.device_mesh.size(dim),
        whole.device_mesh.get_local_rank(dim),
    )
    for rank in range(size):
        has = _extent(n, size, rank)
        begin, end = max(has[0], place[0]), min(has[1], place[1])
        if begin >= end:
            continue
        sent = local.new_empty(end - begin, *local.shape[1:], device=_collective_device(whole))
        if rank == me:
            sent.copy_(theirs[begin - has[0] : end - has[0]])
        dist.broadcast(sent, src=dist.get_global_rank(group, rank), group=group)
        _copy_overlap(local, mine, sent, (begin, end))


# ---- splitting ----


def _why_not(linear: nn.Module) -> str | None:
    """Why it is not split, or None."""
    if isinstance(linear, (SplitLinear, SplitPart)):
        return "it has been split already"
    if type(linear).__name__.startswith("FSDP") and isinstance(linear, nn.Linear):
        return "fully_shard has sharded it already; split it before"
    if type(linear) is not nn.Linear:
        return f"it is no linear layer (torch.nn.Linear) but a {type(linear).__name__}"
    if set(linear._parameters) != set(_NAMES) or linear._buffers or linear._modules:
        return "it has other parameters, buffers or modules than a linear layer's"
    for name in _NAMES:
        parameter = linear._parameters[name]
        if parameter is None:
            if name == "weight":
                return "it has no weight"
            continue
        if _is_distributed(parameter):
            return f"its {name} is a DTensor: it has been sharded already; split it before"
        if type(parameter) is not nn.Parameter or type(parameter.data) is not torch.Tensor:
            return f"its {name} is a {type(parameter).__name__} of {type(parameter.data).__name__}"
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            return f"its {name} has hooks"
        if parameter.grad is not None:
            return f"its {name} has a gradient"
    return None


def _holders(linear: nn.Linear) -> str | None:
    """What else has one of the parameters, which would go on with a copy that nothing trains."""
    own = [parameter for parameter in linear._parameters.values() if parameter is not None]
    ids = set(map(id, own))
    for candidate in gc.get_objects():
        kind = type(candidate)
        if issubclass(kind, nn.Module) and candidate is not linear:
            for name, parameter in candidate.__dict__.get("_parameters", {}).items():
                if id(parameter) in ids:
                    return f"its parameter is also the {name} of a {kind.__name__} (tied weights)"
        elif issubclass(kind, torch.optim.Optimizer):
            groups = candidate.__dict__.get("param_groups", ())
            if any(id(parameter) in ids for group in groups for parameter in group["params"]):
                return f"an optimizer ({kind.__name__}) has its parameters already; make it after fcdp.split()"
    return None


def _places(rows: int, n: int) -> list[int]:
    """Where n parts of so many rows begin, and where the last one ends."""
    block = _BLOCK if rows >= _BLOCK * n else 1
    return [round(rows * i / n / block) * block for i in range(n)] + [rows]


def _split(linear: Any, n: int) -> list[nn.Module]:
    parts = nn.ModuleList()
    places = _places(linear.out_features, n)
    for begin, end in zip(places, places[1:]):
        part = SplitPart.__new__(SplitPart)
        nn.Module.__init__(part)
        part.in_features, part.out_features, part.training = linear.in_features, end - begin, linear.training
        for name in _NAMES:
            whole = linear._parameters[name]
            rows = None if whole is None else nn.Parameter(whole.detach()[begin:end], requires_grad=whole.requires_grad)
            if rows is not None:
                rows.__dict__.update(whole.__dict__)
            part.register_parameter(name, rows)
        parts.append(part)
    for name in _NAMES:
        del linear._parameters[name]
    linear.__class__ = SplitLinear
    linear.parts = parts
    linear._saved, linear._is_new = {}, True
    linear._own = [weakref.ref(part.weight) for part in parts]
    return list(parts)


def split(module: nn.Module, parts: int, min_bytes: int | None) -> list[nn.Module]:
    if not isinstance(module, nn.Module):
        raise TypeError(f"fcdp.split() takes a torch.nn.Module, not {type(module).__name__}")
    if isinstance(parts, bool) or not isinstance(parts, int) or parts < 1:
        raise ValueError(f"fcdp.split(): parts is {parts!r}; it must be a whole number of at least 1")
    if min_bytes is None:
        layers = {"the module": module}
    else:
        layers = {
            name or "the module": layer
            for name, layer in module.named_modules()
            if isinstance(layer, nn.Linear)
            and not isinstance(layer, SplitPart)
            and layer.weight is not None
            and layer.weight.nbytes >= min_bytes
        }
    for name, layer in layers.items():
        why = _why_not(layer)
        if why is not None and min_bytes is None and not isinstance(layer, nn.Linear) and list(layer.children()):
            why += "; for the linear layers of a model, say how large they are at least: min_bytes"
        if why is None and parts > layer.out_features:
            why = f"it has {layer.out_features} rows, which do not make {parts} parts"
        why = why or _holders(layer)
        if why is not None:
            raise ValueError(f"fcdp.split() cannot split {name}: {why}")
    return [part for layer in layers.values() for part in _split(layer, parts)]
