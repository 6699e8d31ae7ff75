"""FCDP=1 on a slow device: parameters are saved while gathers are still to come: python saves_job.py OUT."""

import io
import json
import os
import pathlib
import pickle
import sys

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1] / "sim" / "torch"), str(HERE)]
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import torch_sim  # noqa: F401
import training_job


def main(out):
    rank = int(os.environ["RANK"])
    torch.sim.set_device(rank)
    dist.init_process_group()
    device, mesh = torch.device("sim", rank), init_device_mesh("sim", (dist.get_world_size(),))
    model = training_job.sharded(training_job.fresh().to(device), mesh)
    training_job.train(model, device, steps=1)
    torch.sim.synchronize()
    torch.sim.set_rates(gflops=0.02)  # a forward takes the device 0.1 s, and the host less
    ids = torch.zeros(2, training_job.LENGTH, dtype=torch.long).to(device)
    model(ids)
    saved = io.BytesIO()
    torch.save([p.to_local() for p in model.blocks.parameters()], saved)
    torch.sim.synchronize()
    model(ids)
    part = next(model.blocks.parameters()).to_local()
    assert torch.equal(pickle.loads(pickle.dumps(part)), part)
    pathlib.Path(out, f"rank{rank}.json").write_text(json.dumps(len(saved.getvalue())))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
