#!/usr/bin/env python3
"""Records what jobs of examples/ allocate, for fcdp-replay: python tools/replay/record_jobs.py [NAME ...]

Each runs on two ranks with the simulated device (sim/torch), plain FSDP, at the sizes of JOBS. The trace is rank 0's, of
every tensor on its device, in the order and on the streams of its allocator. Its form is record.py's.
"""

import argparse
import atexit
import gzip
import os
import pathlib
import runpy
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
TRACES = ROOT / "tools" / "replay" / "traces" / "jobs"

LLAMA = {
    "hidden_size=128, intermediate_size=384, num_hidden_layers=4": (
        "hidden_size=1024, intermediate_size=2816, num_hidden_layers=8"
    ),
}
SMALL = {"DIM, LAYERS, LENGTH = 512, 128, 4, 32": "DIM, LAYERS, LENGTH = 4096, 1024, 8, 128"}

# Of the scripts: what stands in place of what. The examples' own sizes are of a few pages.
JOBS = {
    "fsdp2": SMALL,
    "fsdp1": SMALL,
    "accelerate_lora": LLAMA | {"VOCABULARY, LENGTH, STEPS = 512, 32, 6": "VOCABULARY, LENGTH, STEPS = 4096, 256, 3"},
    "transformers_trainer": LLAMA | {"VOCABULARY, LENGTH = 512, 32": "VOCABULARY, LENGTH = 4096, 128"},
    "trl_sft": LLAMA | {"vocab_size=512": "vocab_size=4096"},
}


def lines_of(entries):
    """Of the allocator's history (torch.cuda.memory._snapshot's device_traces)."""
    lines, live, count, streams = [], {}, 0, {}
    for entry in entries:
        if entry["action"] == "alloc":
            lines.append(f"{entry['size']} {streams.setdefault(entry['stream'], len(streams))}")
            live[entry["addr"]] = count
            count += 1
        elif entry["action"] == "free_requested" and entry["addr"] in live:
            lines.append(f"-{live.pop(entry['addr'])}")
    return lines, count


def write(name, torch):
    lines, count = lines_of(torch.sim.memory._snapshot()["device_traces"][0])
    header = [
        f"# {name}: examples/{name}.py, larger, rank 0 of 2; torch {torch.__version__.split('+')[0]}",
        f"# {len(lines)} events, {count} allocations",
    ]
    path = TRACES / f"{name}.txt.gz"
    TRACES.mkdir(exist_ok=True)
    path.write_bytes(gzip.compress("\n".join(header + lines).encode() + b"\n", 9, mtime=0))
    print(f"{path.relative_to(ROOT)}: {len(lines)} events, {count} allocations, {path.stat().st_size} bytes")


def take_the_device(name, torch):
    """PyTorch finds it. accelerate, and with it transformers' Trainer and TRL, knows a list of device types and trains alone
    on any other: it is told of the device, and of several processes as of CPUs, which on_cpu.py has it shard by FSDP."""
    torch.sim.set_device(int(os.environ["LOCAL_RANK"]))
    if name in ("fsdp1", "fsdp2"):
        sys.modules["on_cpu"] = torch
        return
    torch.distributed.init_process_group()
    import on_cpu  # noqa: F401

    device = torch.device("sim", torch.sim.current_device())
    os.environ |= {"ACCELERATE_USE_CPU": "false", "ACCELERATE_TORCH_DEVICE": str(device)}
    import transformers
    from accelerate import state

    state.PartialState._prepare_backend = lambda self, *_: ("gloo", state.DistributedType.MULTI_CPU)
    make = transformers.LlamaForCausalLM.__init__

    def make_there(*args, **options):
        """torch does not let `.data` change from the CPU to a device of another backend, as fully_shard would."""
        with device:
            make(*args, **options)

    transformers.LlamaForCausalLM.__init__ = make_there


def run_rank(script):
    import torch

    sys.path.insert(0, str(script.parent))
    take_the_device(script.stem, torch)
    if os.environ["RANK"] == "0":
        torch.sim.memory._record_memory_history()
        atexit.register(write, script.stem, torch)
    sys.argv = [str(script)]
    os.chdir(script.parent)
    runpy.run_path(str(script), run_name="__main__")


def record(name):
    with tempfile.TemporaryDirectory() as folder:
        for script in (ROOT / "examples").glob("*.py"):
            text = script.read_text()
            for old, new in JOBS[name].items():
                text = text.replace(old, new)
            pathlib.Path(folder, script.name).write_text(text)
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
        autoload = str(ROOT / "sim" / "torch" / "autoload")
        env = os.environ | {"PYTHONPATH": autoload, "FCDP": "0", "OMP_NUM_THREADS": "1"}
        subprocess.run(
            [*torchrun, pathlib.Path(__file__).resolve(), "--rank", f"{folder}/{name}.py"], env=env, check=True
        )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", choices=[[], *JOBS], help=f"of {', '.join(JOBS)} (all)")
    parser.add_argument("--rank", type=pathlib.Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank:
        run_rank(arguments.rank)
        return
    for name in arguments.names or JOBS:
        record(name)


if __name__ == "__main__":
    main()
