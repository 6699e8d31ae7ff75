"""What a CPU job of FSDP2 needs that older torch releases lack.  Applied alike with and without FCDP, before any model
is built; nothing here touches a name that FCDP patches, except the 2.6 copy-out whose version bump upstream fixed."""

import torch
import torch.distributed as dist


class _NoEvent:
    def __init__(self, *args, **kwargs):
        pass

    def record(self, *args):
        pass

    def synchronize(self):
        pass

    def wait(self, *args):
        pass


def _give_the_cpu_stream_events():
    if hasattr(torch.cpu.Stream, "record_event"):
        return
    for name in ("wait_stream", "wait_event"):
        setattr(torch.cpu.Stream, name, lambda self, *args: None)
    torch.cpu.Stream.record_event = lambda self, *args: _NoEvent()
    torch.cpu.Event = _NoEvent


def _reduce_scatter_by_all_reduce(output, input, group=None, op=dist.ReduceOp.SUM, async_op=False):
    total = input.clone()
    dist.all_reduce(total, group=group)
    size = dist.get_world_size(group)
    if op == dist.ReduceOp.AVG:
        total /= size
    output.copy_(total.view(size, -1)[dist.get_rank(group)])


def _keep_versions_in_copy_out():
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group as param_group

    inner = param_group.foreach_all_gather_copy_out

    def copy_out(result, fsdp_params, group, *args, **kwargs):
        before = [(t, t._version) for p in fsdp_params for t in p.all_gather_outputs]
        inner(result, fsdp_params, group, *args, **kwargs)
        for tensor, version in before:
            try:
                torch._C._autograd._unsafe_set_version_counter(tensor, version)
            except TypeError:
                torch._C._autograd._unsafe_set_version_counter((tensor,), (version,))

    param_group.foreach_all_gather_copy_out = copy_out


def prepare():
    _give_the_cpu_stream_events()
    from torch.distributed.fsdp import FSDPModule

    if hasattr(FSDPModule, "set_force_sum_reduction_for_comms"):
        return
    # torch < 2.9: FSDP2 asks gloo for ReduceOp.AVG, which it does not have.
    dist.reduce_scatter_tensor = _reduce_scatter_by_all_reduce
    if torch.__version__ < "2.8":
        _keep_versions_in_copy_out()


def sum_only(model):
    """gloo has no ReduceOp.AVG: let FSDP2 sum and divide where it can."""
    for module in model.modules():
        if hasattr(module, "set_force_sum_reduction_for_comms"):
            module.set_force_sum_reduction_for_comms(True)
