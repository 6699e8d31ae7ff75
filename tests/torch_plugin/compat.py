"""What a job of plain FSDP needs here: on a CPU, what older torch releases lack; on a device, an order. Applied alike
with and without FCDP, before any model is built; nothing here touches a name that FCDP patches, except the 2.6
copy-out whose version bump upstream fixed, and on a device FSDP2's gather, around what FCDP has made of it."""

import functools
import os
import sys

import torch
import torch.distributed as dist

import place


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


def _order_edits_of_shards():
    """On a device, plain FSDP's gathers wait for what the root's forward waited for: a script that writes into shards
    between forward and backward, as some cases do, races with them. Here each gather of FSDP's own waits for what the
    script has enqueued, and the script for the gather's reads. FCDP's gathers of FSDP2 are on no stream that this names.
    Those of FSDP1 are on its own stream for them, which is left as it is. Of the stream on which it writes back before,
    and for which nothing waits where that is all, what follows waits here."""
    from torch.distributed.fsdp import _runtime_utils as fsdp1
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group as fsdp2

    def ordered(original, before, after):
        """`before`, `after`: which arguments are streams that wait, and are waited for."""

        @functools.wraps(original)
        def wrapper(*args, **kwargs):
            current = torch.accelerator.current_stream()
            for i in before:
                args[i].wait_stream(current)
            result = original(*args, **kwargs)
            for i in after:
                current.wait_stream(args[i])
            return result

        return wrapper

    fsdp2.foreach_all_gather = ordered(fsdp2.foreach_all_gather, (3,), (3,))  # all_gather_copy_in_stream
    UNSHARD, PRE_UNSHARD = 2, 3
    both = () if os.environ.get("FCDP") == "1" else (UNSHARD, PRE_UNSHARD)
    fsdp1._unshard = ordered(fsdp1._unshard, both, both or (PRE_UNSHARD,))


def _reduce_scatter_in_two_steps():
    """TEST_REDUCE=two_steps: what FCDP_REDUCE=hierarchical is compared with. FSDP's own reduce-scatters over two nodes of
    two ranks add within the nodes first."""
    original = dist.reduce_scatter_single

    def reduce_scatter(output, input, op=dist.ReduceOp.SUM, group=None, async_op=False):
        by_fsdp = "/torch/distributed/fsdp/" in sys._getframe(1).f_code.co_filename
        if not by_fsdp or dist.get_world_size(group) < 4 or op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            return original(output, input, op, group, async_op)
        rows = [torch.empty_like(input) for _ in range(4)]
        dist.all_gather(rows, input, group)
        a, b, c, d = (row.view(4, -1)[dist.get_rank(group)] for row in rows)
        half = 0.5 if op == dist.ReduceOp.AVG else 1
        output.copy_((((a + b) * half) + ((c + d) * half)) * half)

    dist.reduce_scatter_single = reduce_scatter


def prepare():
    if os.environ.get("TEST_REDUCE") == "two_steps":
        _reduce_scatter_in_two_steps()
    if place.KIND != "cpu":
        _order_edits_of_shards()
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
