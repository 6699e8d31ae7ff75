"""FCDP=1 on a slow device: a call that keeps the GIL waits for the device while gathers are still to come, as some
extensions do: python gil_job.py OUT. Each rank writes rankN.json: how many gathers of differences came meanwhile, and the
calls into Python so far."""

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

import fcdp
import torch_sim  # noqa: F401
import training_job
from fcdp import _fcdp

holds_gil = ctypes.PyDLL(str(pathlib.Path(_fcdp.__file__).with_name("libfcdp_simgpu.so")))


def main(out):
    rank = int(os.environ["RANK"])
    torch.sim.set_device(rank)
    dist.init_process_group()
    device, mesh = torch.device("sim", rank), init_device_mesh("sim", (dist.get_world_size(),))
    model = training_job.sharded(training_job.fresh(n_layers=6).to(device), mesh)
    training_job.train(model, device, steps=2)
    torch.sim.synchronize()
    torch.sim.set_rates(gflops=0.004)  # a forward takes the device 1.5 s, and the host far less
    model(torch.zeros(2, training_job.LENGTH, dtype=torch.long).to(device))
    before = fcdp.stats()["deltas"]["gathers"]
    assert holds_gil.cuCtxSynchronize() == 0
    stats = fcdp.stats()
    found = {"meanwhile": stats["deltas"]["gathers"] - before, "python_calls": stats["python_calls"]}
    pathlib.Path(out, f"rank{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
