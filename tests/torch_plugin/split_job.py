"""One rank of test_split.py: state dicts of a model with split layers, between it and the model that is not split; and what
one with adapters trains to. argv: the folder. Each rank writes what does not hold. With TEST_DEVICE=sim, parameters are
offloaded to the CPU, and the process group is the device's alone, as NCCL's is."""

import json
import os
import pathlib
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard

import compat
import fcdp
import place

OUT = pathlib.Path(sys.argv[1])
RANK = int(os.environ["RANK"])
FULL = StateDictOptions(full_state_dict=True)
wrong = []


def expect(holds, what):
    if not holds:
        wrong.append(what)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(8, 12, bias=False), nn.Linear(12, 35)

    def forward(self, x):
        return self.head(torch.relu(self.first(x)))


def made(seed, mesh, split=True, **kwargs):
    torch.manual_seed(seed)
    model = Net()
    parts = [*fcdp.split(model.head, 4), *fcdp.split(model.first, 3)] if split else [model.head]
    for part in parts:
        fully_shard(part, mesh=mesh, **kwargs)
    fully_shard(model, mesh=mesh, **kwargs)
    compat.sum_only(model)
    return model


def whole(seed):
    torch.manual_seed(seed)
    return {name: value.clone() for name, value in Net().state_dict().items()}


def has(model, values, what):
    """The model has these values: in its state dict, and as it computes."""
    found = {name: value.full_tensor() for name, value in model.state_dict().items()}
    expect(list(found) == list(values), f"{what}: names {list(found)}")
    expect(all(torch.equal(found[name], value) for name, value in values.items()), f"{what}: values")
    plain = Net()
    plain.load_state_dict(values)
    x = torch.randn(5, 8)
    expect(torch.allclose(model(x), plain(x), atol=1e-6), f"{what}: outputs")


def raises(kind, words, what, function, *args, **kwargs):
    try:
        function(*args, **kwargs)
    except kind as error:
        expect(words in str(error), f"{what}: {error}")
    else:
        wrong.append(f"{what}: nothing was raised")


def trained(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model(torch.ones(3, 8)).sum().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def loads_in_place(mesh):
    """dcp.load() into a state dict that nobody keeps: written to the copies alone."""
    dcp.save({"model": made(1, mesh).state_dict()}, checkpoint_id=OUT / "in_place")

    def resume(model):
        dcp.load({"model": model.state_dict()}, checkpoint_id=OUT / "in_place")

    model = made(2, mesh)
    resume(model)
    raises(RuntimeError, "pass the state dict to load_state_dict()", "a lost load", model, torch.ones(1, 8))
    raises(RuntimeError, "pass the state dict to load_state_dict()", "a lost load, again", model, torch.ones(1, 8))
    raises(RuntimeError, "pass the state dict to load_state_dict()", "a lost load, then saved", model.state_dict)
    model.load_state_dict(whole(3))
    has(model, whole(3), "after a lost load")
    first, second = model.state_dict(), model.state_dict()
    dcp.load({"model": first}, checkpoint_id=OUT / "in_place")
    raises(RuntimeError, "pass the state dict to load_state_dict()", "an earlier state dict", model, torch.ones(1, 8))
    model.load_state_dict(first)
    del second
    has(model, whole(1), "an earlier state dict")


class Adapted(nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base_layer = base
        self.down, self.up = nn.Linear(base.in_features, 4, bias=False), nn.Linear(4, base.out_features, bias=False)

    def forward(self, x):
        return self.base_layer(x) + self.up(self.down(x))


def adapters(mesh):
    """The losses of a frozen model whose split layers have adapters, as bits; about those of the whole layers."""
    losses = {True: [], False: []}
    for split, of in losses.items():
        torch.manual_seed(5)
        model = Net().requires_grad_(False)
        model.first, model.head = Adapted(model.first), Adapted(model.head)
        for layer in (model.first, model.head):
            for part in fcdp.split(layer.base_layer, 3) if split else ():
                fully_shard(part, mesh=mesh)
            fully_shard(layer, mesh=mesh)
        compat.sum_only(fully_shard(model, mesh=mesh))
        optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)
        for _ in range(4):
            loss = model(torch.linspace(-1, RANK, 40).view(5, 8)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            of.append(loss.item())
    expect(torch.allclose(*map(torch.tensor, losses.values()), rtol=1e-5), f"adapters: {losses}")
    expect(len(set(losses[True])) == 4, "the adapters train")
    return [loss.hex() for loss in losses[True]]


def offloaded():
    dist.init_process_group("simgloo")
    mesh, policy = init_device_mesh("sim", (dist.get_world_size(),)), CPUOffloadPolicy(pin_memory=False)
    split, other = made(1, mesh, offload_policy=policy), made(2, mesh, split=False, offload_policy=policy)

    def is_on(model, seed, what):
        on_cpu, x = model.state_dict(), torch.ones(5, 8, device="sim")
        expect(all(value.device.type == "cpu" for value in on_cpu.values()), f"{what}: devices")
        full = get_model_state_dict(model, options=FULL)
        expect(all(torch.equal(full[name].cpu(), value) for name, value in whole(seed).items()), f"{what}: values")
        out = model(x)
        reference = Net()
        reference.load_state_dict(whole(seed))
        expect(torch.allclose(out.cpu(), reference(x.cpu()), atol=1e-6), f"{what}: outputs")

    is_on(split, 1, "as it was made")
    for assign in (False, True):
        split.load_state_dict(made(3 + assign, mesh, split=False, offload_policy=policy).state_dict(), assign=assign)
        is_on(split, 3 + assign, "whole to split")
    other.load_state_dict(split.state_dict())
    is_on(other, 4, "split to whole")
    finish()


def exchange(name, mesh, **kwargs):
    split, other = made(1, mesh, **kwargs), made(2, mesh, split=False, **kwargs)
    has(split, whole(1), f"{name}: as it was made")
    trained(split)
    full = get_model_state_dict(split, options=FULL)
    other.load_state_dict(split.state_dict())
    has(other, full, f"{name}: split to whole")
    split.load_state_dict(made(3, mesh, split=False, **kwargs).state_dict())
    has(split, whole(3), f"{name}: whole to split")
    split.load_state_dict(made(4, mesh, split=False, **kwargs).state_dict(), assign=True)
    has(split, whole(4), f"{name}: whole to split, assigned")
    set_model_state_dict(split, dict(full), options=FULL)  # it adds to the dict
    has(split, full, f"{name}: a full state dict")


def checkpoints(mesh):
    split, other = made(1, mesh), made(2, mesh, split=False)
    for source, target, seed in ((split, other, 1), (made(2, mesh, split=False), split, 2)):
        state = get_model_state_dict(source)
        dcp.save({"model": state}, checkpoint_id=OUT / f"checkpoint{seed}")
        state = get_model_state_dict(target)
        dcp.load({"model": state}, checkpoint_id=OUT / f"checkpoint{seed}")
        set_model_state_dict(target, state)
        has(target, whole(seed), f"a checkpoint of seed {seed}")


def optimizers(mesh):
    model = made(1, mesh)
    optimizer = trained(model)
    again = made(1, mesh)
    fresh = torch.optim.AdamW(again.parameters(), lr=1e-2)
    set_optimizer_state_dict(again, fresh, get_optimizer_state_dict(model, optimizer))
    mine, theirs = (
        [optimizer.state[p]["exp_avg"].to_local() for p in model.parameters()]
        for model, optimizer in ((model, optimizer), (again, fresh))
    )
    expect(len(mine) == 11 and all(map(torch.equal, mine, theirs)), "the optimizer's state")


def refusals(mesh):
    model = made(1, mesh)
    state = model.state_dict()
    state["head.weight"].to_local().zero_()
    raises(RuntimeError, "pass the state dict to load_state_dict()", "a written copy", model, torch.ones(1, 8))
    model.load_state_dict(state)
    expect(not model.state_dict()["head.weight"].full_tensor().any(), "what was written is loaded")
    raises(
        RuntimeError,
        "size mismatch for head.weight",
        "another size",
        model.load_state_dict,
        state | {"head.weight": torch.ones(34, 12)},
    )
    turned = state["head.weight"].redistribute(placements=[Replicate()])
    raises(
        NotImplementedError,
        "head.weight is sharded otherwise in the state dict than the split layer's parts are",
        "other placements",
        model.load_state_dict,
        state | {"head.weight": turned},
    )
    alone = nn.Linear(12, 35)
    fcdp.split(alone, 4)
    raises(
        NotImplementedError,
        "weight is a DTensor in the state dict, and the split layer is not sharded",
        "not sharded",
        alone.load_state_dict,
        {"weight": state["head.weight"], "bias": torch.ones(35)},
    )
    sharded = made(1, mesh, split=False).head
    raises(ValueError, "fully_shard has sharded it already; split it before", "FSDP's layer", fcdp.split, sharded, 2)
    alone = nn.Linear(12, 35)
    alone.weight = nn.Parameter(turned)
    raises(ValueError, "it has been sharded already; split it before", "a DTensor", fcdp.split, alone, 2)
    del state["head.bias"]
    raises(RuntimeError, 'Missing key(s) in state_dict: "head.bias"', "a missing key", model.load_state_dict, state)
    if RANK:  # where another rank has the state dict, that one's broadcast brings the split layers' names nowhere
        own = {name: p for name, p in made(1, mesh).named_parameters() if "parts" not in name or "head" in name}
        raises(RuntimeError, "broadcast_from_rank0", "parts alone", model.load_state_dict, own)


def one_group(mesh):
    """The parts are not sharded by themselves, which a line says."""
    model = Net()
    fcdp.split(model.head, 4)
    fully_shard(model, mesh=mesh)
    for _ in range(2):
        model(torch.ones(1, 8))


def main():
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (4,))
    exchange("sharded", mesh)
    exchange("kept", mesh, reshard_after_forward=False)
    exchange("HSDP", init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
    exchange("by columns", mesh, shard_placement_fn=lambda p: Shard(1) if p.ndim > 1 else None)
    checkpoints(mesh)
    optimizers(mesh)
    refusals(mesh)
    loads_in_place(mesh)
    one_group(mesh)
    served = [group["name"] for group in fcdp.stats()["groups"]] if os.environ.get("FCDP") == "1" else []
    finish(served=served, adapted=adapters(mesh))


def finish(**found):
    (OUT / f"rank{RANK}.json").write_text(json.dumps({"wrong": wrong, **found}))
    dist.barrier()
    dist.destroy_process_group()


offloaded() if place.KIND == "sim" else main()
