"""Trainings with an embedding in a group of its own, which FCDP_HOST_MAP may name: python mapped_job.py OUT [HOW]. Each
rank writes, for an embedding that is trained, for one that is frozen and for one that is frozen and that the program
writes into, as into a layer, while they are gathered, the losses and parameters, and what FCDP says.

HOW: asleep: it sleeps between two steps. refused: rank 1's driver has no such memory."""

import ctypes
import gc
import json
import os
import pathlib
import sys

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1] / "sim" / "torch"), str(HERE)]
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import torch_sim
import training_job

N_WORDS, WIDTH, N_STEPS = 20480, 128, 3  # the embedding: five pages, so no other group takes its slot
NOT_SUPPORTED = 801  # CUDA_ERROR_NOT_SUPPORTED
said = []


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(N_WORDS, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, 64)

    def forward(self, ids):
        x = self.tokens(ids)
        for block in (*self.blocks, self.blocks[0]):  # one is used twice in a pass
            x = x + torch.tanh(block(x))
        return self.head(x)


def model_of(device, mesh, trains):
    torch.manual_seed(0)
    model = Model()
    model.tokens.requires_grad_(trains)
    model.to(device)
    for module in (model.tokens, *model.blocks, model):
        fully_shard(module, mesh=mesh)
    return model


def write(module, arguments):
    """As nn.Embedding(max_norm=...) does; plain FSDP drops it at the reshard."""
    module.weight.data.mul_(0.5)


def train(device, mesh, name, between):
    model = model_of(device, mesh, name == "trained")
    if name == "written":
        model.tokens.register_forward_pre_hook(write)
        model.blocks[0].register_forward_pre_hook(write)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    random = torch.Generator().manual_seed(100 + dist.get_rank())
    losses = []
    for step in range(N_STEPS):
        ids = torch.randint(0, N_WORDS, (2, 16), generator=random).to(device)
        loss = F.cross_entropy(model(ids).flatten(0, 1), (ids % 64).flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().item().hex())
        between(step)
    whole = None
    if name == "written":
        with torch.no_grad():
            model(ids)  # no agreement has looked at what this has written
            whole = model.tokens.weight.full_tensor().double().sum().item().hex()
    torch.sim.synchronize()
    return model, {"losses": losses, "whole": whole, "parameters": training_job.hashed(model)}


def saw():
    import fcdp
    from fcdp_memtrace import _trace

    stats = fcdp.stats()
    tokens = next(group for group in stats["groups"] if group["name"] == "tokens")
    traced = {group["name"]: group["mapped"] for group in _trace.live_groups(os.getpid())[0]["groups"]}
    return {"tokens": tokens, "traced": traced} | {
        name: stats[name] for name in ("device_bytes", "host", "host_bytes", "moves", "bypassed")
    }


def refuse():
    """The next handle that this process asks for in map_groups() is refused."""
    from fcdp import mapped

    map_groups = mapped.map_groups

    def refused(*arguments):
        ctypes.CDLL(torch_sim._library).simgpu_fail_nth(b"cuMemCreate", 1, NOT_SUPPORTED)
        map_groups(*arguments)

    mapped.map_groups = refused


def sleep(step):
    import fcdp

    if step != 1:
        return
    torch.sim.synchronize()
    fcdp.sleep()
    assert fcdp.stats()["device_bytes"]["current"] == 0
    fcdp.wake()


def main(out, how=""):
    rank, serves = int(os.environ["RANK"]), os.environ["FCDP"] == "1"
    torch.sim.set_device(rank)
    dist.init_process_group(None)
    device, mesh = torch.device("sim", rank), init_device_mesh("sim", (dist.get_world_size(),))
    if serves:
        from fcdp import words

        words.write = said.append
    if how == "refused" and rank == 1:
        refuse()
    found = {}
    for name in ("trained", "frozen", "written"):
        model, found[name] = train(device, mesh, name, sleep if how == "asleep" else lambda step: None)
        if serves:
            dist.barrier()  # host memory is the node's: its other rank has its part of it
            found[name]["fcdp"] = saw()
            dist.barrier()
        del model
        gc.collect()
        if serves:
            found[name]["after"] = saw_nothing()
    pathlib.Path(out, f"rank{rank}.json").write_text(json.dumps(found | {"said": said}))
    dist.barrier()
    dist.destroy_process_group()


def saw_nothing():
    """What is left once the model is gone."""
    import fcdp

    stats = fcdp.stats()
    fcdp.reset_peaks()
    return {"mapped_bytes": stats["host"]["mapped_bytes"], "groups": len(stats["groups"])}


if __name__ == "__main__":
    main(*sys.argv[1:])
