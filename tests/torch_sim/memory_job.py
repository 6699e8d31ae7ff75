"""Memory of trainings on the simulated device: python memory_job.py NAME OUT. Each rank writes what its function returns."""

import json
import os
import pathlib
import sys

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1] / "sim" / "torch"), str(HERE), str(HERE.parent / "torch_plugin")]
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

import torch_sim  # noqa: F401
import training_job

JOBS = {}
MIB = 1 << 20


def job(function):
    JOBS[function.__name__] = function
    return function


def in_vain(n_bytes=1 << 40):
    """An allocation that cannot be had; what is said of it."""
    try:
        torch.empty(n_bytes, dtype=torch.uint8, device="sim")
    except torch.OutOfMemoryError as error:
        return str(error)
    raise AssertionError(f"{n_bytes} bytes were had")


class Trained:
    """A GPT over all ranks, trained a step at a time."""

    def __init__(self, device, **options):
        torch.manual_seed(1)
        mesh = init_device_mesh("sim", (dist.get_world_size(),))
        self.device, self.model = device, training_job.sharded(training_job.fresh(**options).to(device), mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.random = torch.Generator().manual_seed(100 + dist.get_rank())
        self.losses = []

    def batch(self, n=2):
        shape = (n, training_job.LENGTH + 1)
        return torch.randint(training_job.VOCABULARY, shape, generator=self.random).to(self.device)

    def loss_of(self, ids):
        return F.cross_entropy(self.model(ids[:, :-1]).flatten(0, 1).float(), ids[:, 1:].flatten())

    def step(self, ids):
        loss = self.loss_of(ids)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.detach().item().hex())

    def found(self):
        torch.sim.synchronize()
        return {"losses": self.losses, "parameters": training_job.hashed(self.model)}


def saved():
    import fcdp

    stats = fcdp.stats()
    return {name: stats[name] for name in ("device_bytes", "gathers", "moves")}


@job
def nothing_fails(device):
    trained = Trained(device)
    for _ in range(5):
        trained.step(trained.batch())
    return trained.found()


@job
def allocations_fail_between(device):
    """Before and behind each forward, inside of each backward, and behind each step."""
    trained, said = Trained(device), []
    for _ in range(5):
        said.append(in_vain())
        ids = trained.batch()
        loss = trained.loss_of(ids)
        said.append(in_vain())
        loss.register_hook(lambda gradient: said.append(in_vain()))
        loss.backward()
        trained.optimizer.step()
        said.append(in_vain())
        trained.optimizer.zero_grad()
        trained.losses.append(loss.detach().item().hex())
    assert len(said) == 20 and all("out of memory" in text for text in said)
    return trained.found()


class FailsBackward(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        return x.view_as(x)

    @staticmethod
    def backward(context, gradient):
        torch.empty(1 << 40, dtype=torch.uint8, device="sim")


def fails_forward(module, inputs, output):
    torch.empty(1 << 40, dtype=torch.uint8, device="sim")


def fails_backward(module, inputs, output):
    return FailsBackward.apply(output)


def break_step(trained, name, ids, how=fails_forward):
    """A step runs out of memory inside of that module, as one whose batch is too large, on all ranks alike."""
    hook = trained.model.get_submodule(name).register_forward_hook(how)
    try:
        trained.step(ids)
    except torch.OutOfMemoryError as error:
        assert "out of memory" in str(error)
    else:
        raise AssertionError("nothing was raised")
    finally:
        hook.remove()
    trained.optimizer.zero_grad()


@job
def forwards_fail(device):
    trained = Trained(device)
    for name in ("blocks.0.up", "blocks.1", "head", "blocks.1.qkv", "blocks.0"):
        ids = trained.batch()
        break_step(trained, name, ids)
        trained.step(ids)
    return trained.found()


@job
def backwards_fail(device):
    """Where other groups' gradients have been reduced. reset_iter_state() is what FSDP2 asks for then."""
    trained = Trained(device)
    for name in ("blocks.0", "blocks.1", "head", "blocks.1", "blocks.0.up"):
        ids = trained.batch()
        break_step(trained, name, ids, fails_backward)
        trained.model.reset_iter_state()
        trained.step(ids)
    return trained.found()


@job
def nothing_leaks(device):
    """What is live behind each step, without and with a failure in it."""
    trained, live = Trained(device), {"well": [], "failed": []}
    for name in (None, None, "blocks.0", None, "blocks.1.up", None, "head", None):
        ids = trained.batch()
        if name:
            break_step(trained, name, ids)
        trained.step(ids)
        del ids
        torch.sim.synchronize()
        live["failed" if name else "well"].append(torch.sim.memory_allocated())
    return live


@job
def kept_groups_make_room(device):
    """FCDP_TAU=1, FCDP_DEVICE_BUDGET=64M: what FCDP keeps on the device goes before a tensor is refused."""
    trained = Trained(device, width=256)
    for _ in range(3):
        trained.step(trained.batch())
    torch.sim.synchronize()
    torch.sim.empty_cache()
    before = saved()
    room = 64 * MIB - torch.sim.memory_reserved()
    all_of_it = torch.zeros(room, dtype=torch.uint8, device="sim")
    during = saved()
    said = in_vain(2 * MIB)
    n_ooms = torch.sim.memory_stats()["num_ooms"]
    del all_of_it
    for _ in range(2):
        trained.step(trained.batch())
    return {"before": before, "during": during, "said": said, "n_ooms": n_ooms, **trained.found()}


@job
def gathers_fail(device):
    """FCDP_DEVICE_BUDGET=64M: the second micro-batch's forward finds no memory to gather a group into, on all ranks
    alike. The optimizer steps by what the first one gave."""
    trained = Trained(device, width=256)
    trained.step(trained.batch())
    for n_free in (0, 2, 4, 6):
        ids = trained.batch()
        trained.loss_of(ids).backward()
        torch.sim.synchronize()
        torch.sim.empty_cache()
        room = 64 * MIB - torch.sim.memory_reserved() - n_free * MIB
        all_of_it = torch.zeros(room, dtype=torch.uint8, device="sim")
        try:
            trained.step(ids)
        except torch.OutOfMemoryError as error:
            assert "out of memory" in str(error), error
        else:
            raise AssertionError("there was room")
        del all_of_it
        trained.model.reset_iter_state()
        trained.optimizer.step()
        trained.optimizer.zero_grad()
        trained.step(ids)
    return trained.found()


@job
def a_storage_grows(device):
    """FCDP_DEVICE_BUDGET=64M: into memory that a stream holds which is behind gathers still to come."""
    trained, side = Trained(device), torch.sim.Stream()
    trained.step(trained.batch())
    torch.sim.synchronize()
    torch.sim.empty_cache()
    taken = torch.zeros(24 * MIB, dtype=torch.uint8, device="sim")
    torch.sim.set_rates(gflops=0.02)  # a forward takes the device 0.1 s, and the host less
    trained.loss_of(trained.batch())
    side.wait_stream(torch.sim.current_stream())
    with torch.sim.stream(side):
        taken.add_(1)
    taken.record_stream(side)
    del taken
    grown = torch.empty(0, dtype=torch.uint8, device="sim").untyped_storage()
    grown.resize_(40 * MIB)  # PyTorch keeps the GIL, which those gathers want
    torch.sim.set_rates(gflops=0)
    return {"bytes": grown.nbytes()}


@job
def a_cache_is_emptied(device):
    """While gathers are still to come, behind which memory was freed."""
    trained = Trained(device)
    trained.step(trained.batch())
    torch.sim.synchronize()
    torch.sim.set_rates(gflops=0.02)
    trained.loss_of(trained.batch())
    held = torch.sim.memory_reserved()
    torch.accelerator.empty_cache()  # PyTorch keeps the GIL
    torch.sim.set_rates(gflops=0)
    return {"given_back": held - torch.sim.memory_reserved()}


@job
def restores_are_put_off(device):
    """On two ranks of four, none of them finds memory ahead of its use."""
    from fcdp import _fcdp

    refused, n_refused = set(), 0

    def refuses(group):
        """Each use once: it begins when it is waited for."""
        nonlocal n_refused
        if group in refused:
            refused.remove(group)
            return False
        refused.add(group)
        n_refused += 1
        return True

    if dist.get_rank() in (1, 2):
        _fcdp.refuse_restores(refuses)
    trained = Trained(device)
    for _ in range(5):
        trained.step(trained.batch())
    return {"n_refused": n_refused, **trained.found()}


def traced():
    """Of this process's own trace (FCDP_TRACE=2): tensors' bytes and pages, as its events say, and its counters."""
    from trace_job import Trace

    trace, live, pages = Trace(), {}, [0]
    now = most = n_allocated = 0
    for _, kind, _, _, n_bytes, a, b, *_ in trace.events():
        if kind == "allocate":
            live[a] = n_bytes
            now += n_bytes
            n_allocated += 1
            most = max(most, now)
        elif kind == "free":
            now -= live.pop(a)
        elif kind in ("pages_take", "pages_give") and a & 0xFF == 0:  # tensors'
            pages.append(b)
    return {
        "allocated": now,
        "most_allocated": most,
        "reserved": pages[-1],
        "most_reserved": max(pages),
        "n_live": len(live),
        "n_allocated": n_allocated,
        "counters": {name: value for name, value in trace.counters().items() if name.startswith("device.")},
    }


def told():
    """The same by torch.sim, by torch.accelerator, and by a snapshot."""
    stats = torch.sim.memory_stats()
    segments = torch.sim.memory_snapshot()
    blocks = [block for segment in segments for block in segment["blocks"] if block["state"] == "active_allocated"]
    return {
        "stats": stats,
        "accelerator_stats": dict(torch.accelerator.memory_stats()),
        "sim": [
            torch.sim.memory_allocated(),
            torch.sim.max_memory_allocated(),
            torch.sim.memory_reserved(),
            torch.sim.max_memory_reserved(),
        ],
        "accelerator": [
            torch.accelerator.memory_allocated(),
            torch.accelerator.max_memory_allocated(),
            torch.accelerator.memory_reserved(),
            torch.accelerator.max_memory_reserved(),
        ],
        "snapshot": {
            "allocated": sum(block["size"] for block in blocks),
            "requested": sum(block["requested_size"] for block in blocks),
            "n_live": len(blocks),
            "reserved": sum(segment["total_size"] for segment in segments),
        },
    }


@job
def every_view_agrees(device):
    """FCDP_TRACE=2. At the peak of a backward, with what the streams have not done yet, and at the end."""
    trained, views = Trained(device, width=128), []

    def look(gradient):
        views.append({"told": told(), "traced": traced()})

    for i in range(4):
        loss = trained.loss_of(trained.batch(8))
        if i == 2:
            loss.register_hook(look)
        loss.backward()
        trained.optimizer.step()
        trained.optimizer.zero_grad()
        in_vain()
        del loss
    torch.sim.synchronize()
    look(None)
    before = torch.sim.max_memory_allocated()
    torch.accelerator.reset_peak_memory_stats()
    torch.accelerator.reset_accumulated_memory_stats()
    views.append({"told": told(), "traced": traced()})
    return {"views": views, "peak_before_reset": before}


def main(name, out):
    rank = int(os.environ["RANK"])
    torch.sim.set_device(rank)
    dist.init_process_group()
    found = JOBS[name](torch.device("sim", rank))
    if os.environ.get("FCDP") == "1":
        found["saved"] = saved()
    pathlib.Path(out, f"rank{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
