"""An unmodified job of a framework trains the same, bit for bit, with FCDP=1: losses, gradients, parameters, optimizer
state. FSDP shards it, every group is served, and fewer bytes cross the nodes. Two nodes of two ranks are emulated."""

import importlib.util
import sys
import tempfile

import pytest

import jobs

sys.path.append(str(jobs.HERE.parent / "torch_plugin"))
import launch

STALL_S = 300
FCDP = {"FCDP": "1", "FCDP_LOCAL_SIZE": "2", "FCDP_TIMEOUT": "120"}
# By which Lightning knows torchrun; and what on_cpu sets, which a fork of its process does not keep.
OF_A_RANK = {
    "GROUP_RANK": "0",
    "TORCHELASTIC_RUN_ID": "none",
    "ACCELERATE_USE_CPU": "true",
    "ACCELERATE_TORCH_DEVICE": "cpu",
}
SAYS = ("loss ", "grad_norm ", "eval")  # of a script's lines, those that must be the same


def run(job, tmp, env):
    preload = (str(jobs.EXAMPLES), "on_cpu", *job.framework.warm)
    for arguments in [job.before, job.arguments] if job.before else [job.arguments]:
        command = ["--out", tmp, job.script, *arguments]
        done = launch.forked(jobs.HERE / "rank.py", command, tmp, {**OF_A_RANK, **env}, STALL_S, preload)
        assert done.returncode == 0 and not done.timed_out and len(done.ranks) == launch.WORLD, done.output[-6000:]
        assert not list(tmp.glob(f"{tempfile.gettempprefix()}*")), "a temporary folder is left"
    return done


def said(done):
    return [line for line in done.output.splitlines() if line.startswith(SAYS)]


def first_difference(plain, fcdp):
    for i, (one, other) in enumerate(zip(plain["losses"], fcdp["losses"])):
        if one != other:
            return f"backward {i}: the loss was {one}, is {other}"
    for i, (one, other) in enumerate(zip(plain["steps"], fcdp["steps"])):
        for key in one | other:
            if one.get(key) != other.get(key):
                return f"step {i}: {key} was {one.get(key)}, is {other.get(key)}"
    lengths = [(len(rank["losses"]), len(rank["steps"])) for rank in (plain, fcdp)]
    return None if lengths[0] == lengths[1] else f"backwards and steps: {lengths}"


def check_that_it_trains_sharded(job, rank):
    assert not rank["modules"], "FCDP was loaded into the plain job"
    assert rank["model"][job.fsdp] > 1 and not rank["model"]["ddp"], rank["model"]
    assert bool(rank["model"]["frozen"]) == job.frozen
    first, last = rank["steps"][0], rank["steps"][-1]
    changed = [key for key in first if key.startswith("parameter") and first[key] != last[key]]
    assert len(rank["steps"]) > 2 and changed, "nothing was trained"


def check_what_it_saved(job, rank):
    stats, groups = rank["stats"], rank["model"][job.fsdp]
    assert len(stats["groups"]) == groups - job.unserved, (groups, stats["bypassed"])
    assert len(rank["end"]["bypassed"]) == job.unserved, rank["end"]["bypassed"]
    if job.unserved == groups:
        return
    saved = rank["end"]["saved"]
    assert saved["plain_bytes"] > 0 and saved["gather_bytes"] <= job.most * saved["plain_bytes"], saved


def case(name, job, *marks):
    missing = job.missing()
    skip = pytest.mark.skipif(
        bool(missing), reason=f"not installed: {', '.join(missing)} (build/logs/pip-frameworks.log)"
    )
    return pytest.param(job, id=name, marks=[skip, *marks])


CASES = [case(name, job) for name, job in jobs.JOBS.items()] + [
    case(name, job, pytest.mark.frameworks) for name, job in jobs.MORE.items()
]


@pytest.mark.skipif(importlib.util.find_spec("fcdp") is None, reason="fcdp is not installed in this interpreter")
@pytest.mark.parametrize("job", CASES)
def test_a_framework_trains_the_same(job, tmp_path):
    plain = run(job, tmp_path / "plain", {})
    fcdp = run(job, tmp_path / "fcdp", FCDP)
    for rank, (one, other) in enumerate(zip(plain.ranks, fcdp.ranks)):
        check_that_it_trains_sharded(job, one)
        assert other["model"] == one["model"]
        assert (found := first_difference(one, other)) is None, f"rank {rank}: {found}"
        check_what_it_saved(job, other)
    assert said(plain) == said(fcdp)


@pytest.mark.frameworks
@pytest.mark.parametrize("job", [case(name, jobs.JOBS[name]) for name in ("accelerate-lora", "transformers-trainer")])
def test_accumulated_gradients_cross_with_the_last_micro_batch(job, tmp_path):
    """Which the framework's own accumulation says to FSDP2. Sums are rounded in another order than plain FSDP2's."""
    plain = run(job, tmp_path / "plain", {})
    fcdp = run(job, tmp_path / "fcdp", FCDP | {"FCDP_REDUCE": "hierarchical"})
    for one, other in zip(plain.ranks, fcdp.ranks):
        made = other["end"]["reductions"]
        assert made["flat"] == 0 and made["kept"] == made["hierarchical"] > 0, made  # of two micro-batches each
        losses = [[loss for _, loss in rank["losses"]] for rank in (one, other)]
        assert losses[1] == pytest.approx(losses[0], rel=1e-3)
