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
        return (self._data.to(torch.bfloat16),), None

    def fsdp_post_all_gather(self, outputs, metadata, param_dtype, *, out=None):
        (tensor,) = outputs
        if out is not None:
            return None
        return tensor, (tensor,)
