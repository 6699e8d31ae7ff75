"""A tensor subclass that takes part in FSDP2's all-gather through its extension points, as float8 libraries do."""

import torch
import torch.utils._pytree as pytree

_KEEPS_TYPE = {
    torch.ops.aten.empty_like.default,
    torch.ops.aten.new_zeros.default,
    torch.ops.aten.new_empty.default,
    torch.ops.aten.slice.Tensor,
    torch.ops.aten.copy_.default,
    torch.ops.aten.view.default,
    torch.ops.aten.as_strided.default,
    torch.ops.aten._to_copy.default,
    torch.ops.aten._pin_memory.default,
    torch.ops.aten.split.Tensor,
    torch.ops.aten.clone.default,
    torch.ops.aten.detach.default,
}


class Bf16AllGather(torch.Tensor):
    @staticmethod
    def __new__(cls, data):
        return torch.Tensor._make_wrapper_subclass(
            cls,
            data.size(),
            strides=data.stride(),
            storage_offset=data.storage_offset(),
            dtype=data.dtype,
            device=data.device,
            requires_grad=data.requires_grad,
        )

    def __init__(self, data):
        self._data = data
        self.scale, self.calls = 1.0, 0

    def __tensor_flatten__(self):
        return ["_data"], None

    @staticmethod
    def __tensor_unflatten__(inner, metadata, outer_size, outer_stride):
        return Bf16AllGather(inner["_data"])

    @classmethod
    def __torch_dispatch__(cls, function, types, args, kwargs=None):
        def unwrap(x):
            return x._data

        args, kwargs = pytree.tree_map_only(cls, unwrap, (args, kwargs or {}))
        out = function(*args, **kwargs)
        if function in _KEEPS_TYPE:
            return pytree.tree_map_only(torch.Tensor, cls, out)
        return out

    def fsdp_pre_all_gather(self, mesh):
        self.calls += 1
        return ((self._data * self.scale).to(torch.bfloat16),), None

    def fsdp_post_all_gather(self, outputs, metadata, param_dtype, *, out=None):
        (tensor,) = outputs
        if out is not None:
            return None
        return tensor, (tensor,)


class Scaled(Bf16AllGather):
    """Two tensors of different dtypes are gathered, and a number beside them that is not."""

    def fsdp_pre_all_gather(self, mesh):
        self.calls += 1
        largest = self._data.abs().amax(dim=1, keepdim=True).clamp_min(1e-6)
        codes = (self._data / largest * 127).round().to(torch.int8)
        return (codes, largest.contiguous()), self.scale

    def fsdp_post_all_gather(self, outputs, metadata, param_dtype, *, out=None):
        codes, largest = outputs
        whole = codes.to(torch.float32) / 127 * largest * metadata
        if out is not None:
            with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out):
                out.copy_(whole)
            return None
        return whole, (whole,)


class Noisy(Bf16AllGather):
    """As stochastic rounding: never the same bytes twice."""

    def fsdp_pre_all_gather(self, mesh):
        self.calls += 1
        return ((self._data + torch.rand_like(self._data) * 1e-3).to(torch.bfloat16),), None


class OfASubclass(Bf16AllGather):
    """Gathers tensors that are no plain ones."""

    class Plainly(torch.Tensor):
        pass

    def fsdp_pre_all_gather(self, mesh):
        (tensor,), metadata = super().fsdp_pre_all_gather(mesh)
        return (tensor.as_subclass(self.Plainly),), metadata


def extend(blocks, kind=Bf16AllGather):
    """Their first linear layers' weights become such tensors."""
    for block in blocks:
        block.up.weight = torch.nn.Parameter(kind(block.up.weight.detach().clone()))
        block.up.register_forward_pre_hook(lambda module, inputs: (inputs[0].to(module.weight.dtype),))
        block.up.register_forward_hook(lambda module, inputs, output: output.float())
        block.up.bias = None
