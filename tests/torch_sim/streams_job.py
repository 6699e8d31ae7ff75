"""Programs that use more than one stream, as plain FSDP allows: python streams_job.py NAME|all OUT. Writes, for each, what
simgpu found or "ordered"; behind a finding the device is gone, and so are the programs that follow."""

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

PROGRAMS = {}


def program(function):
    PROGRAMS[function.__name__] = function
    return function


class Unordered(ctypes.Structure):  # struct simgpu_unordered
    _fields_ = [(name, ctypes.c_ulong) for name in ("aliases", "races", "unmaps")] + [("text", ctypes.c_char * 640)]


def unordered():
    found = Unordered()
    ctypes.CDLL(torch_sim._library).simgpu_unordered(ctypes.byref(found))
    return found.text.decode()


def ready(device, mesh, **options):
    """A model that has trained a step, so that FSDP has initialised it, and whose shards were written since."""
    model = training_job.sharded(training_job.fresh(n_layers=3).to(device), mesh, **options)
    training_job.train(model, device, steps=1)
    return model


def shards(block):
    return [parameter._local_tensor.detach() for parameter in block.parameters()]


def use_others(model, block):
    """The block's pages, if it has left them, serve the blocks beside it."""
    for _ in range(2):
        for other in model.blocks:
            if other is not block:
                other.unshard()
                other.reshard()


@program
def a_stream_waits_for_an_unshard_of_another(device, mesh):
    model = ready(device, mesh)
    block, side = model.blocks[0], torch.sim.Stream()
    expected = block.up.weight.full_tensor().cpu()
    handle = block.unshard(async_op=True)
    with torch.sim.stream(side):
        handle.wait()
        got = block.up.weight * 1
    torch.sim.current_stream().wait_stream(side)
    block.reshard()
    assert torch.equal(got.cpu(), expected)


@program
def memory_of_inputs_is_used_again(device, mesh):
    """They are cast on the stream of the unshard, where their memory is free once they are."""
    model = ready(device, mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    block, side = model.blocks[0], torch.sim.Stream()
    mine = shards(block)
    handle = block.unshard(async_op=True)
    with torch.sim.stream(side):
        handle.wait()
    # FSDP2 casts all of a group's into one tensor
    others = [torch.zeros(sum(shard.numel() for shard in mine), dtype=torch.bfloat16, device=device)]
    torch.sim.current_stream().wait_stream(side)
    block.reshard()
    del others


@program
def a_shard_is_written_behind_its_gather(device, mesh):
    """Plain FSDP2 has copied it on the stream of the unshard."""
    model = ready(device, mesh)
    block, side = model.blocks[0], torch.sim.Stream()
    mine = shards(block)
    handle = block.unshard(async_op=True)
    with torch.sim.stream(side):
        handle.wait()
    for shard in mine:
        shard.mul_(2)
    torch.sim.current_stream().wait_stream(side)
    block.reshard()


@program
def a_group_is_resharded_on_another_stream(device, mesh):
    """Plain FSDP2 frees its storage, which was allocated on the stream that waited: that one may use the memory again."""
    model = ready(device, mesh)
    block, side = model.blocks[0], torch.sim.Stream()
    side.wait_stream(torch.sim.current_stream())
    block.unshard()
    got = block.up.weight * 1
    with torch.sim.stream(side):
        block.reshard()
        use_others(model, block)
    torch.sim.current_stream().wait_stream(side)
    assert torch.equal(got.cpu(), block.up.weight.full_tensor().cpu())


@program
def layers_have_streams_of_their_own(device, mesh):
    """Backward unshards each of them ahead, under the stream of the one before."""
    model = training_job.sharded(training_job.fresh().to(device), mesh)
    sides = [torch.sim.Stream(), torch.sim.Stream()]

    def forward(ids):
        x = model.tokens(ids) + model.places(torch.arange(ids.shape[1], device=ids.device))
        before = torch.sim.current_stream()
        for i, block in enumerate(model.blocks):
            side = sides[i % 2]
            side.wait_stream(before)
            with torch.sim.stream(side):
                x.record_stream(side)
                x, before = block(x), side
        torch.sim.current_stream().wait_stream(before)
        x.record_stream(torch.sim.current_stream())
        return model.head(model.norm(x))

    model.forward = forward
    losses, _ = training_job.train(model, device)
    assert losses == training_job.fsdp2(device, mesh)[1]


def main(name, out):
    rank = int(os.environ["RANK"])
    torch.sim.set_device(rank)
    dist.init_process_group()
    device, mesh = torch.device("sim", rank), init_device_mesh("sim", (dist.get_world_size(),))
    found = {}
    for one in PROGRAMS if name == "all" else [name]:
        try:
            PROGRAMS[one](device, mesh)
            torch.sim.synchronize()
            found[one] = unordered() or "ordered"
        except (RuntimeError, AssertionError) as error:
            found[one] = unordered() or f"{type(error).__name__}: {error}"
            break
    pathlib.Path(out, f"rank{rank}.json").write_text(json.dumps(found))
    sys.stdout.flush()
    os._exit(0)  # behind such an error nothing ends in order


if __name__ == "__main__":
    main(*sys.argv[1:])
