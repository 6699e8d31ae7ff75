"""Runs an example as it is, but larger and on the simulated device: python example_job.py OUT SCRIPT [ARGUMENTS]. Each rank
writes how many bytes its tensors had at most, and how many pages."""

import gc
import json
import os
import pathlib
import runpy
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "sim" / "torch"), str(ROOT / "examples")]
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.optim.optimizer import register_optimizer_step_post_hook

import torch_sim  # noqa: F401

LARGER = 8  # than the examples' models, in width
STEPS = 2  # after which what lives repeats


def on_sim(name):
    """torchtitan finds the device. accelerate, and with it transformers' Trainer and TRL, knows a list of device types and
    trains alone on any other: it is told that there are several processes, as of CPUs, of which the examples say that
    FSDP is to shard them, and the device."""
    if name.startswith("torchtitan"):
        sys.modules["on_cpu"] = torch  # nothing is to be done for CPUs
        return
    import on_cpu  # noqa: F401

    os.environ |= {"ACCELERATE_USE_CPU": "false", "ACCELERATE_TORCH_DEVICE": f"sim:{torch.sim.current_device()}"}
    from accelerate import state

    state.PartialState._prepare_backend = lambda self, *_: ("gloo", state.DistributedType.MULTI_CPU)


def enlarge():
    import transformers

    begin = transformers.LlamaConfig.__init__

    def __init__(self, *args, **sizes):
        for name in ("hidden_size", "intermediate_size"):
            if name in sizes:
                sizes[name] *= LARGER
        begin(self, *args, **sizes)

    transformers.LlamaConfig.__init__ = __init__
    make = transformers.LlamaForCausalLM.__init__

    def on_device(*args, **options):
        """torch does not let `.data` change from the CPU to a device of another backend, as fully_shard would."""
        with torch.device("sim", torch.sim.current_device()):
            make(*args, **options)

    transformers.LlamaForCausalLM.__init__ = on_device


class Enough(BaseException):
    pass


def stop_early():
    n_steps = 0

    def stepped(optimizer, arguments, keywords):
        nonlocal n_steps
        n_steps += 1
        if n_steps == STEPS:
            raise Enough

    register_optimizer_step_post_hook(stepped)


def main(out, script, *arguments):
    torch.set_num_threads(1)
    torch.sim.set_device(int(os.environ["LOCAL_RANK"]))
    name = pathlib.Path(script).name
    on_sim(name)
    if not name.startswith("torchtitan"):
        dist.init_process_group()
        enlarge()
    stop_early()
    os.chdir(out)
    sys.argv = [script, *arguments]
    found = {}
    try:
        runpy.run_path(script, run_name="__main__")
    except Enough:
        pass
    except torch.OutOfMemoryError as error:
        found["out_of_memory"] = str(error)
    found["n_groups"] = sum(isinstance(o, FSDPModule) for o in gc.get_objects())
    stats = torch.sim.memory_stats()
    found |= {
        "live": stats["allocated_bytes.all.peak"],
        "reserved": stats["reserved_bytes.all.peak"],
        "n_tensors": stats["allocation.all.allocated"],
    }
    pathlib.Path(out, f"rank{os.environ['RANK']}.json").write_text(json.dumps(found))
    os._exit(0 if "out_of_memory" not in found else 3)


if __name__ == "__main__":
    main(*sys.argv[1:])
