"""What an unshard launches on the stream that computes: python inputs_job.py OUT. Trains with mixed precision, with shards
that are offloaded to the CPU, and with an all-gather extension. Each rank writes rankN.json: by case, the losses and
parameters, how many gathers were made so far, and what unshards launched on the compute stream, by name."""

import collections
import json
import os
import pathlib
import sys

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1] / "sim" / "torch"), str(HERE), str(HERE.parent / "torch_plugin")]
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecision, MixedPrecisionPolicy
from torch.distributed.fsdp._flat_param import FlatParamHandle
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.utils._python_dispatch import TorchDispatchMode

import subclass
import torch_sim  # noqa: F401
import training_job

HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
CASES = {
    "half": {"mp_policy": HALF},
    "full": {},
    "offloaded": {"mp_policy": HALF, "offload_policy": CPUOffloadPolicy()},
    "extended": {},
}
# Which makes them on streams of its own. (PyTorch moves no flat parameter between the CPU and such a device as "sim".)
OF_FSDP1 = {"fsdp1 half": {"mixed_precision": MixedPrecision(param_dtype=torch.bfloat16)}}
COPIES = ("_to_copy", "copy_", "_foreach_copy_")


def on_compute(stream):
    return stream == torch.sim.default_stream().stream_id


class Launched(TorchDispatchMode):
    """Counts copies of what is on the device, or goes there, that are launched on the stream that computes."""

    def __init__(self, counts):
        super().__init__()
        self.counts = counts

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        name, out = function.overloadpacket.__name__, function(*arguments, **keywords or {})
        written = arguments[0] if out is None else out
        is_here = (
            (written[0] if isinstance(written, list) else written).device.type == "sim" if name in COPIES else False
        )
        if is_here and on_compute(torch.sim.current_stream().stream_id):
            self.counts[name] += 1
        return out


def watch_unshard(cls, counts):
    unshard = cls.unshard

    def watched(*arguments, **keywords):
        with Launched(counts):
            return unshard(*arguments, **keywords)

    cls.unshard = watched


def watch(counts):
    watch_unshard(FSDPParamGroup, counts)
    watch_unshard(FlatParamHandle, counts)
    if os.environ["FCDP"] != "1":
        return
    from fcdp.group import Group

    make_inputs = Group.make_inputs

    def made(*arguments):
        inputs, stream = make_inputs(*arguments)
        if on_compute(torch.sim.current_stream().stream_id if stream is None else stream):
            counts["fingerprint"] += 1  # the inputs are fingerprinted behind that stream
        return inputs, stream

    Group.make_inputs = made


def gathers_made():
    if os.environ["FCDP"] != "1":
        return 0
    import fcdp

    return fcdp.stats()["gathers"]["made"]


def train(device, mesh, name, counts):
    if name in OF_FSDP1:
        counts.clear()
        model, losses = training_job.fsdp1(device, mesh, **OF_FSDP1[name])
        return {"numbers": [losses, training_job.hashed(model)], "gathers": gathers_made(), "launched": dict(counts)}
    model = training_job.fresh().to(device)
    if name == "extended":
        subclass.extend(model.blocks)
    training_job.sharded(model, mesh, **CASES[name])
    counts.clear()
    losses, _ = training_job.train(model, device)
    return {"numbers": [losses, training_job.hashed(model)], "gathers": gathers_made(), "launched": dict(counts)}


def main(out):
    rank, counts = int(os.environ["RANK"]), collections.Counter()
    torch.sim.set_device(rank)
    dist.init_process_group()
    device, mesh = torch.device("sim", rank), init_device_mesh("sim", (dist.get_world_size(),))
    watch(counts)
    found = {name: train(device, mesh, name, counts) for name in (*CASES, *OF_FSDP1)}
    pathlib.Path(out, f"rank{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
