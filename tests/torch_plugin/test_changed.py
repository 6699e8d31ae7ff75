"""fcdp.changed() and fcdp.apply(): this process rebuilds the weights of a job of 2 nodes x 2 ranks from what its steps have
changed, bit for bit."""

import pathlib
import random
import re
import subprocess
import sys
import types

import pytest
import torch

import launch
from configurations import ON_SIM, is_whole
from conftest import needs_fcdp

pytestmark = needs_fcdp
N_STEPS = 20 if is_whole() else 8
ON = {"FCDP": "1", "FCDP_LOCAL_SIZE": "2", "FCDP_TIMEOUT": "60"}
HOST, KEPT = ON | {"FCDP_TAU": "0"}, ON | {"FCDP_TAU": "1"}


def train(folder, scenario, env, n_steps=N_STEPS):
    job = launch.forked(launch.HERE / "changed_job.py", [folder, scenario, n_steps], folder, env)
    assert not job.timed_out and job.returncode == 0, job.output
    return job.ranks


def of_ranks(folder, step):
    """The changes of all ranks, in any order."""
    changes = [one for path in sorted(folder.glob(f"changes{step}-*.pt")) for one in torch.load(path)]
    random.Random(step).shuffle(changes)
    return changes


def assert_equal(weights, truth):
    assert weights.keys() == truth.keys()
    for name, tensor in truth.items():
        assert weights[name].dtype == tensor.dtype
        assert torch.equal(weights[name].view(torch.uint8), tensor.view(torch.uint8)), name


def rebuilt(folder, n_steps=N_STEPS):
    import fcdp

    first = torch.load(folder / "truth0-0.pt")
    weights = {name: torch.full_like(tensor, float("nan")) for name, tensor in first.items()}
    for step in range(n_steps + 1):
        fcdp.apply(weights, of_ranks(folder, step))
        if (path := folder / f"truth{step}-0.pt").exists():
            assert_equal(weights, torch.load(path))
    return weights


@pytest.mark.parametrize(
    "scenario, env, n_steps",
    [
        ("bf16", HOST, N_STEPS),
        ("bf16", KEPT, 4),
        ("bf16", HOST | {"FCDP_CODEC": "int8"}, 4),
        ("float32", HOST | {"FCDP_RESTORE": "slice"}, 4),
        ("lora", HOST, 4),
        ("hsdp", HOST, 4),
        ("hsdp_inside", HOST, 4),  # nothing for FCDP to serve
        ("two_meshes", HOST, 4),
        ("backwards", HOST, 4),
        ("evaluation", KEPT | {"FCDP_CODEC": "delta"}, 4),
    ],
    ids=[
        "bf16-host",
        "bf16-kept",
        "bf16-rounded",
        "float32-slices",
        "lora",
        "hsdp",
        "hsdp-inside",
        "two-meshes",
        "backwards",
        "evaluation",
    ],
)
def test_another_process_has_the_weights_of_each_step(tmp_path, scenario, env, n_steps):
    ranks = train(tmp_path, scenario, env, n_steps)
    weights = rebuilt(tmp_path, n_steps)
    n_bytes = sum(tensor.nbytes for tensor in weights.values())
    by_step = [sum(at) for at in zip(*(rank["bytes"] for rank in ranks))]
    assert n_bytes < by_step[0]
    if scenario == "lora":
        assert all(0 < each < 0.6 * n_bytes for each in by_step[1:])
    for i, rank in enumerate(ranks):
        is_served = scenario != "hsdp_inside"
        assert not is_served or rank["stats"]["avoided"] > 0
        if not is_served or env.get("FCDP_CODEC") == "int8":
            assert rank["errors"]["gone"] is None  # whole, as always
        elif scenario == "hsdp" and i % 2:  # of the second replica
            assert rank["errors"]["gone"] is None and not any(rank["bytes"])
        else:
            assert re.match("VersionError: net[.].*: the version is no longer there", rank["errors"]["gone"])
        assert rank["errors"]["type"] == "TypeError: fcdp.changed() takes a model, or a version of one, not int"
        part = r"ValueError: a parameter group of \w*Linear's has modules outside of it; pass the root module instead"
        assert re.fullmatch(part, rank["errors"]["part"])
        assert rank["again"] == rank["bytes"][0]


def test_the_programs_of_the_page(tmp_path):
    """docs/weights.md, as they stand there."""
    page = (pathlib.Path(__file__).parents[2] / "docs" / "weights.md").read_text()
    programs = dict(re.findall(r"```python\n# (\w+\.py)\n(.*?)```", page, re.DOTALL))
    follow = programs["follow.py"] + "torch.save(weights, 'weights.pt')\n"
    train = programs["train.py"].replace(
        "dist.destroy_process_group()",
        "whole = {n: p.full_tensor() for n, p in model.named_parameters()}\n"
        "pickle.dump(list(changes), open(f'step3-rank{dist.get_rank()}', 'wb'))\n"
        "torch.save(whole, f'whole{dist.get_rank()}.pt')\ndist.destroy_process_group()",
    )
    (tmp_path / "train.py").write_text(f"import os\nos.chdir({str(tmp_path)!r})\n" + train)
    (tmp_path / "follow.py").write_text(follow.replace("range(3)", "range(4)"))
    job = launch.forked(tmp_path / "train.py", [], tmp_path / "job", ON)
    assert not job.timed_out and job.returncode == 0, job.output
    subprocess.run([sys.executable, "follow.py"], cwd=tmp_path, check=True, timeout=120)
    assert_equal(torch.load(tmp_path / "weights.pt"), torch.load(tmp_path / "whole0.pt"))


@pytest.mark.usefixtures("sim_built")
@pytest.mark.parametrize("configuration", ["sim-slots", "sim-exact"] if is_whole() else ["sim-slots"])
def test_on_a_device(tmp_path, configuration):
    """Where the host runs ahead of what it asks for."""
    train(tmp_path, "bf16", ON_SIM[configuration], n_steps=4)
    rebuilt(tmp_path, n_steps=4)


def test_what_does_not_fit_is_refused_by_name(tmp_path):
    """Blocks in the wrong order, for another tensor, cut, or with a bit that was flipped: never the wrong weights."""
    import fcdp

    train(tmp_path, "bf16", HOST, n_steps=2)
    zeroes = {name: torch.zeros_like(tensor) for name, tensor in torch.load(tmp_path / "truth0-0.pt").items()}
    name, changed = next(one for one in of_ranks(tmp_path, 1) if one[0] == "net.blocks.0.up.weight")
    with pytest.raises(fcdp.Error, match="net.blocks.0.up.weight: .* in order"):
        fcdp.apply(zeroes, [(name, changed)])
    with pytest.raises(fcdp.Error, match="no tensor of this name"):
        fcdp.apply({}, [(name, changed)])
    with pytest.raises(fcdp.Error, match="the tensor is .* of float32"):
        fcdp.apply({name: zeroes[name].float()}, [(name, changed)])
    weights = rebuilt(tmp_path, n_steps=0)
    of_another = next(one for one in of_ranks(tmp_path, 0) if one[0] == "net.blocks.1.up.weight")[1]
    with pytest.raises(fcdp.Error, match="its blocks are net.blocks.1.up.weight's"):
        fcdp.apply(weights, [(name, of_another)])
    whole = next(one for one in of_ranks(tmp_path, 0) if one[0] == name)[1]
    before = weights[name].clone()
    for block in (changed, whole):
        for at in range(0, len(block), 7):
            flipped = bytearray(block)
            flipped[at] ^= 1 << at % 8
            for damaged in (bytes(flipped), block[:at]):
                with pytest.raises(fcdp.Error):
                    fcdp.apply(weights, [(name, damaged)])
                assert torch.equal(weights[name], before)
    for step in (1, 2):
        fcdp.apply(weights, of_ranks(tmp_path, step))
    assert_equal(weights, torch.load(tmp_path / "truth2-0.pt"))
    fcdp.apply(weights, of_ranks(tmp_path, 2))  # it has them
    older = [one for one in of_ranks(tmp_path, 1) if one[0] in ("own", name)]  # the first one comes whole
    assert len(older) == 5
    for one in older:
        with pytest.raises(fcdp.Error, match="in order"):
            fcdp.apply(weights, [one])
    assert_equal(weights, torch.load(tmp_path / "truth2-0.pt"))


def test_the_bytes_of_a_part_of_more_than_4_gib_are_whole():
    """As pack() puts them into a block. Here nearly none are touched."""
    from fcdp import blocks

    part = torch.empty((4 << 30) + 1, dtype=torch.uint8)
    part[-1] = 7
    payload = blocks._bytes_of(part)
    assert memoryview(payload).nbytes == part.nbytes and payload[-1] == b"\x07"


def test_a_model_without_fsdp_comes_whole():
    import fcdp

    with torch.device("meta"):  # what a program sets by default is not for the buffers that are compared
        assert_comes_whole(fcdp)


class Counted(torch.Tensor):
    """Of a type that is not torch's own."""


def test_a_model_that_cannot_be_compared_is_told():
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.tensor import Partial

    import fcdp
    from fcdp import whole

    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    model[0].bias = torch.nn.Parameter(torch.ones(2).as_subclass(Counted))
    with pytest.raises(NotImplementedError, match=r"fcdp.changed\(\) compares plain tensors, and 0.bias is a Counted"):
        fcdp.changed(model)
    with pytest.raises(NotImplementedError, match=r"its placements are \(Partial"):
        whole.place_of(types.SimpleNamespace(placements=(Partial(),), device_mesh=None))
    model[0].__class__ = FullyShardedDataParallel  # as it is when FSDP1 has wrapped it, for who looks at its type
    with pytest.raises(NotImplementedError, match=r"of FSDP2 \(fully_shard\), and this one has modules of FSDP1"):
        fcdp.changed(model)


def assert_comes_whole(fcdp):
    model = torch.nn.Linear(3, 2, device="cpu")
    weights = {name: torch.zeros_like(parameter) for name, parameter in model.named_parameters()}
    changes = fcdp.changed(model)
    fcdp.apply(weights, changes)
    with torch.no_grad():
        model.bias.add_(1)
    after = fcdp.changed(changes.version)
    assert [name for name, _ in after] == ["bias"] and 0 < after.nbytes < changes.nbytes
    fcdp.apply(weights, after)
    assert_equal(weights, model.state_dict())
    del model
    with pytest.raises(fcdp.VersionError, match="model is gone"):
        fcdp.changed(after.version)
