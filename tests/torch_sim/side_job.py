"""Programs that write and read on streams beside the compute, some with a fault of order: python side_job.py NAME OUT.
Writes what simgpu found, or "nothing"; where something else went wrong, that."""

import ctypes
import json
import os
import pathlib
import sys

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1] / "sim" / "torch"), str(HERE)]
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

import torch_sim
import training_job
from fcdp.side import Side

FAULTS = {}


def fault(function):
    FAULTS[function.__name__] = function
    return function


@fault
def a_hook_writes_what_the_next_gather_casts():  # no fault
    """On the compute stream, inside a forward, where FSDP2 lets the stream that casts wait for nothing."""
    sharded = training_job.sharded

    @torch.no_grad()
    def write(block, *arguments):
        block.up.weight.to_local().mul_(1)

    def with_hook(model, *arguments, **keywords):
        sharded(model, *arguments, **keywords).blocks[1].register_forward_pre_hook(write, prepend=True)
        return model

    training_job.sharded = with_hook


@fault
def the_cast_does_not_wait_for_what_a_hook_writes():
    a_hook_writes_what_the_next_gather_casts()
    Side.wait_for_current = lambda self: None


def another_stream_reads_parameters(is_recorded):
    """Of each block, in its forward; beyond it, as far as any event of the program's tells."""
    side, compute, read = torch.sim.Stream(), training_job.Block.compute, []

    def reading(block, x):
        side.wait_stream(torch.sim.current_stream())
        with torch.sim.stream(side):
            read.append(block.up.weight.detach() * 2)
        if is_recorded:
            block.up.weight.record_stream(side)
        return compute(block, x)

    training_job.Block.compute = reading


@fault
def a_stream_that_was_not_recorded_reads_parameters():
    another_stream_reads_parameters(is_recorded=False)


@fault
def a_stream_that_was_recorded_reads_parameters():  # no fault
    another_stream_reads_parameters(is_recorded=True)


HALF = {"mp_policy": MixedPrecisionPolicy(torch.bfloat16)}  # so that inputs are made
SHARDING = {
    "a_hook_writes_what_the_next_gather_casts": HALF,
    "the_cast_does_not_wait_for_what_a_hook_writes": HALF,
}


class Unordered(ctypes.Structure):  # struct simgpu_unordered
    _fields_ = [(name, ctypes.c_ulong) for name in ("aliases", "races", "unmaps")] + [("text", ctypes.c_char * 640)]


def main(name, out):
    rank = int(os.environ["RANK"])
    torch.sim.set_device(rank)
    dist.init_process_group()
    FAULTS[name]()
    said, found = "nothing", Unordered()
    try:
        torch.sim.set_rates(gflops=2, gbytes=0.05)  # so slow that no query finds the optimizer's step done
        mesh = init_device_mesh("sim", (dist.get_world_size(),))
        training_job.fsdp2(torch.device("sim", rank), mesh, SHARDING.get(name))
        torch.sim.synchronize()
    except RuntimeError as error:
        said = str(error)
    ctypes.CDLL(torch_sim._library).simgpu_unordered(ctypes.byref(found))
    said = found.text.decode() or said
    pathlib.Path(out, f"rank{rank}.json").write_text(json.dumps(said))
    sys.stdout.flush()
    os._exit(0)  # behind such an error nothing ends in order


if __name__ == "__main__":
    main(*sys.argv[1:])
