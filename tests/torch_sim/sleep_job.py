"""Trainings that sleep between their steps, on the simulated device: python sleep_job.py NAME OUT."""

import contextlib
import json
import os
import pathlib
import sys

sys.path[:0] = [str(pathlib.Path(__file__).resolve().parent)]
import torch
import torch.distributed as dist

import fcdp
import memory_job
from fcdp import _fcdp

N_STEPS = 20
JOBS = memory_job.JOBS


def refusal(function, *arguments):
    """What is said of something that cannot be done now."""
    try:
        function(*arguments)
    except (RuntimeError, ValueError) as error:
        return str(error)
    raise AssertionError("it was done")


def handles():
    from fcdp import group

    return [one.handle for one in sorted(group.by_id.values(), key=lambda one: one.number)]


def shard_read(handle):
    """What is said where the first bytes of a shard are asked for, as fcdp.changed() does."""
    to = torch.empty(4, dtype=torch.uint8)
    return refusal(handle.gathered_shard, 0, to.data_ptr(), to.nbytes)


def on_device():
    gathered = fcdp.stats()["device_bytes"]["current"]
    return torch.sim.memory_reserved() + gathered


@memory_job.job
def twenty_steps(device):
    trained = memory_job.Trained(device)
    for _ in range(N_STEPS):
        trained.step(trained.batch())
    return trained.found()


@memory_job.job
def sleeps_between_steps(device):
    """Twice each time: the second finds nothing that has changed. Some tensors are freed asleep."""
    trained, nights = memory_job.Trained(device), []
    for _ in range(N_STEPS):
        trained.step(trained.batch())
        passing = torch.ones(3 << 20, device=device)
        torch.sim.synchronize()
        before = on_device()
        night = {"before": before, "down": fcdp.sleep(), "asleep": on_device(), "away": fcdp.stats()["asleep_bytes"]}
        night["parameters"] = fcdp.stats()["asleep"]
        del passing
        night["said"] = refusal(lambda: torch.empty(1, device=device))
        night["changed"] = refusal(fcdp.changed, trained.model)
        night["up"] = fcdp.wake()
        night["again"] = fcdp.sleep()
        if fcdp.stats()["enabled"]:
            night["unsharded"] = refusal(trained.model.blocks[0].unshard)
            night["read"] = [shard_read(handle) for handle in handles()]
        fcdp.wake()
        assert not fcdp.stats()["asleep"]
        nights.append(night)
    return trained.found() | {"nights": nights}


@memory_job.job
def tagged_tensors_sleep(device):
    trained = memory_job.Trained(device)
    with fcdp.tag("kv"):
        cache = torch.arange(1 << 20, device=device)
    for _ in range(N_STEPS):
        down = fcdp.sleep("kv")
        assert down["live_bytes"] == cache.nbytes and down["freed_bytes"] >= cache.nbytes, down
        assert not fcdp.stats()["asleep"]
        trained.step(trained.batch())
        assert fcdp.wake("kv", keep=False)["copied_bytes"] == cache.nbytes
        assert cache.tolist()[::4096] == list(range(0, 1 << 20, 4096))
    assert refusal(fcdp.sleep, "vk") == "no tensor was allocated under fcdp.tag('vk')"
    return trained.found()


@contextlib.contextmanager
def sleep_fails(leaves_asleep):
    """Of tensors, once they sleep or at once."""
    real = _fcdp.tensors_sleep

    def fails(number):
        if leaves_asleep:
            real(number)
        raise _fcdp.Error("planted")

    _fcdp.tensors_sleep = fails
    try:
        yield
    finally:
        _fcdp.tensors_sleep = real


@memory_job.job
def sleeps_that_fail(device):
    """What was asleep before a call that fails is asleep behind it, and what could not be woken."""
    trained, none = memory_job.Trained(device), torch.zeros(1, 1, dtype=torch.int64)
    for step in range(N_STEPS):
        trained.step(trained.batch())
        torch.sim.synchronize()
        with sleep_fails(leaves_asleep=False):
            assert refusal(fcdp.sleep) == "planted"
        assert fcdp.stats()["asleep_bytes"] == 0
        if step % 2:
            continue  # the next step is made as if nothing had been asked
        for leaves_asleep in (True, False):
            with sleep_fails(leaves_asleep):
                assert refusal(fcdp.sleep) == "planted"
            assert "asleep" in refusal(trained.model, none)
        fcdp.wake()
    return trained.found()


@memory_job.job
def ends_asleep(device):
    trained = memory_job.Trained(device)
    for _ in range(2):
        trained.step(trained.batch())
    torch.sim.synchronize()
    dist.barrier()
    fcdp.sleep()
    sys.exit()


@memory_job.job
def a_peer_dies_asleep(device):
    trained = memory_job.Trained(device)
    trained.step(trained.batch())
    torch.sim.synchronize()
    dist.barrier()
    fcdp.sleep()
    if dist.get_rank() == 3:
        os._exit(0)
    fcdp.wake()
    said = refusal(trained.step, trained.batch())
    pathlib.Path(sys.argv[2], f"rank{dist.get_rank()}.json").write_text(json.dumps({"said": said}))
    os._exit(0)


if __name__ == "__main__":
    memory_job.main(*sys.argv[1:])
