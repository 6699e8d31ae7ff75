"""One rank of test_changed.py: trains, and writes what fcdp.changed() says after each optimizer step, and now and then what
the weights are. argv: the folder, a scenario, steps."""

import json
import os
import pathlib
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

import fcdp
import place
from models import IN, OUT, Net

DEVICE = place.DEVICE
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)


class Model(nn.Module):
    """A parameter that is sharded along its second dimension, a tied one, and one that FSDP leaves alone."""

    def __init__(self, lora=0):
        super().__init__()
        self.net = Net(lora=lora)
        self.narrow = nn.Linear(OUT, 8)
        self.wide = nn.Linear(8, 3, bias=False)
        self.tied = nn.Linear(3, 3, bias=False)
        self.again = nn.Linear(3, 3, bias=False)
        self.again.weight = self.tied.weight
        self.own = nn.Parameter(torch.ones(3, dtype=torch.float32))

    def forward(self, x):
        x = self.wide(self.narrow(self.net(x)))
        return self.again(self.tied(x)).float() * self.own


def sharded(scenario):
    torch.manual_seed(3)
    model = Model(lora=2 if scenario == "lora" else 0).to(DEVICE)
    if scenario == "lora":
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("lora" in name)
    meshes = {"hsdp": [[0, 2], [1, 3]], "hsdp_inside": [[0, 1], [2, 3]]}
    mesh = DeviceMesh(DEVICE.type, meshes[scenario], mesh_dim_names=("a", "b")) if scenario in meshes else None
    settings = {"mp_policy": BF16} if scenario != "float32" else {}
    settings |= {"mesh": mesh} if mesh is not None else {}
    for block in model.net.blocks:
        fully_shard(block, **settings)
    others = {}
    if scenario == "two_meshes":  # no rank is the first of this one and of the other
        others["mesh"] = DeviceMesh(DEVICE.type, [[2, 3], [0, 1]], mesh_dim_names=("a", "b"))
    if scenario == "backwards":  # FSDP shards by the ranks of its process group, which is in their order
        others["mesh"] = DeviceMesh(DEVICE.type, [3, 2, 1, 0])
        fully_shard(model.net.head, **settings | others)  # whose shards are not alike
    fully_shard(model.wide, shard_placement_fn=lambda parameter: Shard(1), **settings | others)
    return fully_shard(model, ignored_params={model.own}, **settings)


def truth(model, scenario):
    dtype = torch.float32 if scenario == "float32" else torch.bfloat16
    for module in model.modules():
        if hasattr(module, "reshard"):
            module.reshard()
    whole = {}
    for name, parameter in model.named_parameters():
        is_sharded = hasattr(parameter, "full_tensor")
        value = parameter.full_tensor().to(dtype) if is_sharded else parameter
        whole[name] = value.detach().cpu().clone()
    return whole


def step(model, optimizer):
    loss = model(torch.randn(6, IN).to(DEVICE)).float().pow(2).mean()
    loss.backward()
    # FSDP reduces no gradient of a parameter that it leaves alone
    if model.own.grad is not None:
        dist.all_reduce(model.own.grad)
    optimizer.step()
    optimizer.zero_grad()


def raised(function):
    try:
        function()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def main():
    folder, scenario, n_steps = pathlib.Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    dist.init_process_group("gloo" if DEVICE.type == "cpu" else None)
    rank = dist.get_rank()
    model = sharded(scenario)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-4, foreach=False)
    torch.manual_seed(100 + rank)
    found = {"bytes": [], "errors": {}}

    def write(name, value):
        torch.save(value, folder / f"{name}-{rank}.part")
        os.rename(folder / f"{name}-{rank}.part", folder / f"{name}-{rank}.pt")

    changes = fcdp.changed(model)
    for i in range(n_steps + 1):
        found["bytes"].append(changes.nbytes)
        write(f"changes{i}", list(changes))
        if i in (0, n_steps // 2, n_steps):
            whole = truth(model, scenario)
            if rank == 0:
                write(f"truth{i}", whole)
        if i == n_steps:
            break
        step(model, optimizer)
        changes = fcdp.changed(changes.version)
        if scenario == "evaluation":  # the root stays unsharded behind it
            with torch.no_grad():
                model(torch.randn(6, IN).to(DEVICE))
            assert len(fcdp.changed(changes.version)) == 0
    step(model, optimizer)
    step(model, optimizer)
    found["errors"]["gone"] = raised(lambda: fcdp.changed(changes.version))
    found["errors"]["type"] = raised(lambda: fcdp.changed(7))
    pair = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).to(DEVICE)
    fully_shard([*pair])  # one group
    found["errors"]["part"] = raised(lambda: fcdp.changed(pair[0]))
    found["again"] = fcdp.changed(model).nbytes
    found["stats"] = fcdp.stats()["gathers"]
    (folder / f"rank{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
