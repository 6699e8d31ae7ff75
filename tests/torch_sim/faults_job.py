"""FCDP=1 with faults of order planted in the seam and below it, one after another: python faults_job.py NAME,...|sweep[:N] OUT.
Writes for each how it was found: "race: ..." by simgpu, "error: ..." by an exception, "bytes" by other losses than
without a fault, or "nothing".

Below the seam a fault is a call of the driver's that is left out (simgpu_sites_drop), named by the streams that it
orders. `sweep` leaves out each place of FCDP's that makes such calls, from the N-th on."""

import contextlib
import ctypes
import functools
import json
import os
import pathlib
import re
import sys

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1] / "sim" / "torch"), str(HERE)]
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import torch_sim
import training_job
from fcdp import _fcdp
from fcdp.runtime import Runtime, runtime

simgpu = ctypes.CDLL(torch_sim._library)
RACES_STRICT, RACES_GO_ON = 2, 4


class Unordered(ctypes.Structure):  # struct simgpu_unordered
    _fields_ = [(name, ctypes.c_ulong) for name in ("aliases", "races", "unmaps")] + [("text", ctypes.c_char * 640)]


class Site(ctypes.Structure):  # struct simgpu_site
    _fields_ = [
        ("entry", ctypes.c_char_p),
        *((name, ctypes.c_char * size) for name, size in (("stream", 48), ("event", 48), ("site", 160))),
        ("calls", ctypes.c_ulong),
        ("taught", ctypes.c_ulong),
    ]


# ---- programs, which return what they computed ----


def trains(device, mesh):
    return training_job.fsdp2(device, mesh)[1]


def trains_fsdp1(device, mesh):
    return training_job.fsdp1(device, mesh)[1]


def one_by_one(program):
    """Small groups are not gathered together."""

    @functools.wraps(program)
    def alone(device, mesh):
        together, Runtime.coalesce = Runtime.coalesce, lambda *_: None
        try:
            return program(device, mesh)
        finally:
            Runtime.coalesce = together

    return alone


@one_by_one
def trains_one_by_one(device, mesh):
    return trains(device, mesh)


@one_by_one
def trains_without_fingerprints(device, mesh):
    """For which the host waits, behind all that was written before."""
    asked = runtime.options.get("fingerprint")
    runtime.options["fingerprint"] = _fcdp.FINGERPRINT_NEVER
    try:
        return trains(device, mesh)
    finally:
        runtime.options["fingerprint"] = asked


@one_by_one
def skips_its_last_layer(device, mesh):
    """Which was gathered ahead, and is not waited for; then the optimizer writes it, as its gradients are zeros. Backward
    restores nothing, or its restores would be behind that gather."""
    model = training_job.sharded(training_job.fresh(n_layers=3).to(device), mesh, reshard_after_forward=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    last, losses = model.blocks[2], []
    for step in range(4):
        model.blocks = torch.nn.ModuleList([*model.blocks][:2] + ([] if step % 2 else [last]))
        ids = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(step)).to(device)
        loss = model(ids).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        losses.append(loss.detach())
    return [loss.item().hex() for loss in losses]


# ---- faults ----


@contextlib.contextmanager
def on_another_stream(name, at):
    """_fcdp's function of that name gets another stream than the current one, as its argument number `at`."""
    original, other = getattr(_fcdp, name), torch.sim.Stream().stream_id
    setattr(_fcdp, name, lambda *arguments: original(*arguments[:at], other, *arguments[at + 1 :]))
    yield
    setattr(_fcdp, name, original)


@contextlib.contextmanager
def left_out(entry, stream, event="", site=""):
    simgpu.simgpu_sites_watch(1)
    like = Site(*(text.encode() for text in (entry, stream, event, site)))
    assert simgpu.simgpu_sites_drop(ctypes.byref(like)) == 0, entry
    yield
    simgpu.simgpu_sites_watch(0)


FAULTS = {
    "none": (contextlib.nullcontext, trains),
    "the_compute_does_not_wait_for_the_gather": (lambda: on_another_stream("group_wait", 1), trains),
    "the_pages_pass_on_before_the_compute_is_over": (lambda: on_another_stream("group_reshard", 1), trains),
    "the_fingerprint_does_not_wait_for_the_write": (lambda: on_another_stream("comm_fingerprints", 3), trains),
    "the_gather_does_not_wait_for_the_optimizer": (
        lambda: on_another_stream("group_begin", 3),
        trains_without_fingerprints,
    ),
    "the_optimizer_does_not_wait_for_a_gather_ahead": (
        lambda: on_another_stream("engine_order_writes", 1),
        skips_its_last_layer,
    ),
}


def sites(device, mesh):
    """Of FCDP's calls that order, on any rank: (entry, stream, event, site) -> [calls, of them that taught something]."""
    simgpu.simgpu_sites_watch(1)
    PROGRAM(device, mesh)
    torch.sim.synchronize()
    rows = (Site * 512)()
    n, mine = simgpu.simgpu_sites_list(rows, 512), {}
    simgpu.simgpu_sites_watch(0)
    for row in rows[:n]:
        if not row.site.startswith(b"_fcdp"):
            continue
        names = [re.sub(r"\d+$", "", name.decode()) for name in (row.stream, row.event)]
        counts = mine.setdefault((row.entry.decode(), *names, row.site.decode()), [0, 0])
        counts[0] += row.calls
        counts[1] += row.taught
    everybodys = [None] * dist.get_world_size()
    dist.all_gather_object(everybodys, mine)
    merged = {}
    for one in everybodys:
        for key, counts in one.items():
            merged[key] = [a + b for a, b in zip(merged.get(key, [0, 0]), counts)]
    return dict(sorted(merged.items()))


# ---- the job ----


@functools.cache
def expected(program, device, mesh):
    return program(device, mesh)


def how_it_is_found(plant, program, device, mesh):
    """And did the job get through?"""
    reference, found = expected(program, device, mesh), Unordered()
    torch.sim.synchronize()
    simgpu.simgpu_unordered_reset()
    try:
        with plant():
            result = program(device, mesh)
            torch.sim.synchronize()
    except (RuntimeError, AssertionError) as error:
        result = error
    simgpu.simgpu_unordered(ctypes.byref(found))
    if found.text:
        return f"race: {found.text.decode()}", not isinstance(result, Exception)
    if isinstance(result, Exception):
        return f"error: {result}", False
    return "nothing" if result == reference else "bytes", True


def main(names, out):
    rank = int(os.environ["RANK"])
    torch.sim.set_device(rank)
    dist.init_process_group()
    device, mesh = torch.device("sim", rank), init_device_mesh("sim", (dist.get_world_size(),))
    simgpu.simgpu_set_races(RACES_STRICT | RACES_GO_ON)
    faults, found = FAULTS, {}
    if names.startswith("sweep"):
        rows = sites(device, mesh)
        faults = {json.dumps([*key, *counts]): (functools.partial(left_out, *key), PROGRAM) for key, counts in rows.items()}
        names = [*faults][int(names.partition(":")[2] or 0) :]
    else:
        names = [*FAULTS] if names == "all" else names.split(",")
    for name in names:
        found[name], goes_on = how_it_is_found(*faults[name], device, mesh)
        pathlib.Path(out, f"rank{rank}.json").write_text(json.dumps(found))
        if not goes_on:
            break
    sys.stdout.flush()
    os._exit(0)  # behind such an error nothing ends in order


PROGRAM = {
    "trains": trains,
    "alone": trains_one_by_one,
    "fsdp1": trains_fsdp1,
    "plain": trains_without_fingerprints,
    "skips": skips_its_last_layer,
}[os.environ.get("TEST_PROGRAM", "trains")]

if __name__ == "__main__":
    main(*sys.argv[1:])
