"""FCDP=1 with faults of order planted in the seam and below it, one after another: python faults_job.py WHICH OUT [cpu].
WHICH is NAME,...|all|slices|differences|sweep[:N]. Writes for each how it was found: "race: ..." by simgpu, "error: ..." by an
exception, "bytes" by other losses than without a fault, or "nothing"; and as "left" those that an exception left out.
With `cpu` on CPU tensors, as the matrix of tests/torch_plugin trains: there simgpu looks at two addresses of the same
memory alone.

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
from torch.distributed.fsdp import MixedPrecisionPolicy

import streams_job
import training_job
from fcdp import _fcdp
from fcdp.group import Group, by_id
from fcdp.settings import options

simgpu = ctypes.CDLL(str(pathlib.Path(_fcdp.__file__).with_name("libfcdp_simgpu.so")))
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
    return training_job.fsdp2(device, mesh, n_layers=4)[1]


def trains_fsdp1(device, mesh):
    return training_job.fsdp1(device, mesh)[1]


def one_by_one(program):
    """Small groups are not gathered together."""

    @functools.wraps(program)
    def alone(device, mesh):
        may_begin, Group.may_begin = Group.may_begin, lambda self, ahead: bool(ahead) and may_begin(self, ahead)
        try:
            return program(device, mesh)
        finally:
            Group.may_begin = may_begin

    return alone


def without_fingerprints(program):
    """For which the host waits, behind all that was written before."""

    @functools.wraps(program)
    def without(device, mesh):
        asked = options.get("fingerprint")
        options["fingerprint"] = _fcdp.FINGERPRINT_NEVER
        try:
            return program(device, mesh)
        finally:
            options["fingerprint"] = asked

    return without


@one_by_one
def trains_one_by_one(device, mesh):
    return trains(device, mesh)


@one_by_one
def trains_more_layers_one_by_one(device, mesh):
    """Than gathers of differences that take turns in host memory."""
    return training_job.fsdp2(device, mesh, n_layers=8)[1]


@without_fingerprints
def trains_together_blindly(device, mesh):
    return trains(device, mesh)


@without_fingerprints
def trains_in_several_chunks(device, mesh):
    """Of the staging buffer, so that a half of it serves twice in one agreement."""
    return training_job.fsdp2(device, mesh, width=128, n_layers=6)[1]


@one_by_one
@without_fingerprints
def trains_blindly(device, mesh):
    return trains(device, mesh)


@one_by_one
@without_fingerprints
def trains_in_bf16(device, mesh):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    return training_job.fsdp2(device, mesh, sharding={"mp_policy": policy})[1]


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


@one_by_one
def writes_what_was_gathered(device, mesh):
    """As an initialisation of weights does; plain FSDP2 drops it at the reshard."""
    model = training_job.sharded(training_job.fresh().to(device), mesh)
    training_job.train(model, device, steps=1)
    block = model.blocks[0]
    block.unshard()
    with torch.no_grad():
        block.up.weight.zero_()
    block.reshard()
    return training_job.train(model, device, steps=1)[0]


# ---- faults ----


@contextlib.contextmanager
def on_another_stream(kind, name, at):
    """That method of a type of _fcdp's gets another stream than the current one, as its argument number `at`; self is 0."""
    original, other = getattr(kind, name), torch.sim.Stream().stream_id
    setattr(kind, name, lambda *arguments: original(*arguments[:at], other, *arguments[at + 1 :]))
    yield
    setattr(kind, name, original)


@contextlib.contextmanager
def left_out(entry, stream, event="", site="_fcdp"):
    simgpu.simgpu_sites_watch(1)
    like = Site(*(text.encode() for text in (entry, stream, event, site)))
    assert simgpu.simgpu_sites_drop(ctypes.byref(like)) == 0, entry
    yield
    simgpu.simgpu_sites_watch(0)


@contextlib.contextmanager
def inputs_of_another_stream():
    """To the core they were made there."""
    original, other = Group.make_inputs, torch.sim.Stream().stream_id
    Group.make_inputs = lambda *arguments: (original(*arguments)[0], other)
    yield
    Group.make_inputs = original


@contextlib.contextmanager
def inputs_freed_at_once():
    original = Group.unshard

    def unshard(self, *arguments):
        original(self, *arguments)
        for group in list(by_id.values()):  # those that were begun ahead, too
            group.inputs = None

    Group.unshard = unshard
    yield
    Group.unshard = original


@contextlib.contextmanager
def waits_on_the_stream_of_the_unshard():
    unshard, wait, asked_on = Group.unshard, Group.wait, {}

    def planted(self, tree, forward, by_hand, stream, side=None):
        unshard(self, tree, forward, by_hand, stream, side)
        asked_on[self] = stream

    Group.unshard, Group.wait = planted, lambda self, stream: wait(self, asked_on[self])
    yield
    Group.unshard, Group.wait = unshard, wait


@contextlib.contextmanager
def copied_out_on_another_stream():
    from fcdp.fsdp1 import _Flat

    original = _Flat.copy_to

    def copy_to(self, buffer):
        with torch.sim.stream(torch.sim.Stream()):
            original(self, buffer)

    _Flat.copy_to = copy_to
    yield
    _Flat.copy_to = original


@contextlib.contextmanager
def words_not_waited_for():
    """Half of the ranks store slowly, else the others might find there what they did not wait for."""
    simgpu.simgpu_set_pcie(ctypes.c_double(0.001 * (dist.get_rank() % 2)))
    with left_out("cuStreamWaitValue32", "h2d"):
        yield
    simgpu.simgpu_set_pcie(ctypes.c_double(0))


WAIT, RECORD = "cuStreamWaitEvent", "cuEventRecord"
wrong, out, of = (
    functools.partial(functools.partial, on_another_stream),
    functools.partial(functools.partial, left_out),
    streams_job.PROGRAMS,
)
FAULTS = {
    "none": (contextlib.nullcontext, trains),
    # of the seam: another stream, a missing reference
    "the compute does not wait for the gather": (wrong(_fcdp.Group, "wait", 1), trains),
    "the fingerprint does not wait for the write": (wrong(_fcdp.Group, "unshard", 4), trains),
    "the gather does not wait for the optimizer": (inputs_of_another_stream, trains_blindly),
    "small groups do not wait for the optimizer": (inputs_of_another_stream, trains_together_blindly),
    "the optimizer does not wait for a gather ahead": (wrong(_fcdp.Engine, "order_writes", 1), skips_its_last_layer),
    "a wait is on the stream of the unshard": (
        waits_on_the_stream_of_the_unshard,
        of["a_stream_waits_for_an_unshard_of_another"],
    ),
    "casts are freed before the gather has read them": (inputs_freed_at_once, trains_in_bf16),
    "FSDP1's copy does not wait for the gather": (wrong(_fcdp.Group, "wait", 1), trains_fsdp1),
    "FSDP1 copies on another stream": (copied_out_on_another_stream, trains_fsdp1),
    # below it: a call of the driver's that is left out
    "the gather's end is recorded too early": (out(RECORD, "h2d"), trains),
    "the store does not wait for the gather": (out(WAIT, "d2h", "inter"), trains_one_by_one),
    "small groups are split before they are there": (out(WAIT, "d2h", "inter"), trains),
    "the staging buffer is filled before it was emptied": (out(WAIT, "inter", "d2h"), trains_in_several_chunks),
    "the restore overwrites what the compute reads": (out(WAIT, "h2d", "null stream"), trains_blindly),
    "what the store reads is overwritten": (out(WAIT, "h2d", "d2h"), writes_what_was_gathered),
    "the stream of the unshard does not wait for reads": (
        out(WAIT, "null stream", "inter"),
        of["memory_of_inputs_is_used_again"],
    ),
    "a shard is written while it is read": (
        out(WAIT, "null stream", "inter"),
        of["a_shard_is_written_behind_its_gather"],
    ),
    "a reshard does not wait for the reader's stream": (
        out(WAIT, "stream", "null stream"),
        of["a_group_is_resharded_on_another_stream"],
    ),
    "a peer's words are not waited for": (words_not_waited_for, trains),
}
# With FCDP_RESTORE=slice, over NCCL.
FAULTS_OF_SLICES = {
    "the node's gather does not wait for the crossing": (out(WAIT, "node", "inter"), trains_one_by_one),
    "the node's gather does not wait for the copy": (out(WAIT, "node", "h2d"), trains_one_by_one),
    "the store does not wait for the node's gather": (out(WAIT, "d2h", "node"), trains_one_by_one),
}
# With FCDP_CODEC=delta, and as many groups ahead as such gathers take turns in host memory, too.
FAULTS_OF_DIFFERENCES = {
    "shards are judged before they are fetched": (out(WAIT, "inter", "fetch"), trains_one_by_one),
    "shards are fetched before they are written": (out(WAIT, "fetch", "inter"), trains_one_by_one),
    "places are written while they are copied": (out(WAIT, "inter", "h2d"), trains_one_by_one),
    "differences are decoded to what is still stored": (out(WAIT, "inter", "d2h"), trains_more_layers_one_by_one),
    "what has come is copied before it is decoded": (out(WAIT, "h2d", "inter"), trains_one_by_one),
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
    return dict(sorted(merged.items(), reverse=True))  # waits first: an event that is lacking may end the job


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
        ended = f"; it ended with: {result}" if isinstance(result, Exception) else ""
        return f"race: {found.text.decode()}{ended}", not ended
    if isinstance(result, Exception):
        return f"error: {result}", False
    return "nothing" if result == reference else "bytes", True


def main(names, out, kind="sim"):
    rank = int(os.environ["RANK"])
    torch.sim.set_device(rank)
    dist.init_process_group("gloo" if kind == "cpu" else None)
    device, mesh = torch.device(kind, rank if kind == "sim" else None), init_device_mesh(kind, (dist.get_world_size(),))
    if os.environ["FCDP_TRANSPORT"] == "nccl":
        trains(
            device, mesh
        )  # FCDP asks the device again and again whether it has connected: strictly, the answer is no
    simgpu.simgpu_set_races(RACES_STRICT | RACES_GO_ON if kind == "sim" else RACES_GO_ON)
    found = {}
    if names.startswith("sweep"):
        rows = sites(device, mesh)
        faults = {
            json.dumps([*key, *counts]): (functools.partial(left_out, *key), PROGRAM) for key, counts in rows.items()
        }
        names = [*faults][int(names.partition(":")[2] or 0) :]
    else:
        sets = {"all": FAULTS, "slices": FAULTS_OF_SLICES, "differences": FAULTS_OF_DIFFERENCES}
        faults = FAULTS | FAULTS_OF_SLICES | FAULTS_OF_DIFFERENCES
        names = [*(sets.get(names) or names.split(","))]
    for name in names:
        found[name], goes_on = how_it_is_found(*faults[name], device, mesh)
        left = [other for other in names if other not in found]
        pathlib.Path(out, f"rank{rank}.json").write_text(json.dumps(found | {"left": left}))
        if not goes_on:
            break
    sys.stdout.flush()
    os._exit(0)  # behind such an error nothing ends in order


PROGRAM = {
    "trains": trains,
    "alone": trains_one_by_one,
    "fsdp1": trains_fsdp1,
    "blind": trains_blindly,
    "together": trains_together_blindly,
    "skips": skips_its_last_layer,
    "writes": writes_what_was_gathered,
}[os.environ.get("TEST_PROGRAM", "trains")]

if __name__ == "__main__":
    main(*sys.argv[1:])
