"""fcdp-plan profile from the installed wheel: what it says of a job, and of what is none."""

import argparse
import json
import subprocess
import sys

import pytest

from test_plan import plan

measure = pytest.importorskip("fcdp_plan.measure", reason="the wheel is not installed in this interpreter")
from fcdp_plan.profile import read  # noqa: E402

# Two layers, of which one is frozen and one is used twice; the root's head stays gathered, and has rows enough to be split;
# one layer is never used.
JOB = """\
import os
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

torch.manual_seed(0)
torch.distributed.init_process_group("gloo")
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.idle = (nn.Linear(64, 64) for _ in range(3))
        self.head = nn.Linear(64, 128)

    def forward(self, x):
        return self.head(self.second(self.second(self.first(x)).relu()))

model = Net()
model.second.requires_grad_(False)
how = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)}
for layer in (model.first, model.second, model.idle):
    fully_shard(layer, **how)
fully_shard(model, **how)
model.set_force_sum_reduction_for_comms(True)
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
while True:
    for i in range(2):
        model.set_requires_gradient_sync(i == 1)
        model(torch.ones(2, 64)).float().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
LAYER, HEAD = 64 * 64 + 64, 64 * 128 + 128


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """(the profile's path, what was said) of the job above."""
    folder = tmp_path_factory.mktemp("profile")
    (folder / "train.py").write_text(JOB)
    once = "import sys; from fcdp_plan import cli, measure; measure.TURNS = 1; sys.exit(cli.main())"
    command = [sys.executable, "-c", once, "profile", "-o", str(folder / "job.json"), "--nodes", "2"]
    command += [
        "--calibrate",
        "--mode",
        "FCDP whole: --of-the-script",
        "--ranks",
        "1",
        "--steps",
        "5",
        "--batch",
        "2",
        "--timeout",
        "300",
        "--",
        str(folder / "train.py"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    if "namespace" in done.stderr:
        pytest.skip(done.stderr.strip().splitlines()[-1])
    assert done.returncode == 0, done.stderr
    return folder / "job.json", done.stderr


def reduces_in_the_parameter_s_dtype():
    """As torch 2.15 does, though parameters are gathered in another one."""
    param = pytest.importorskip("torch.distributed.fsdp._fully_shard._fsdp_param")
    return hasattr(param.FSDPParam, "unsharded_grad_dtype")


@pytest.mark.slow
def test_a_job_s_profile_has_its_groups_in_order(measured):
    path, said = measured
    profile = read(path)  # as its schema has it
    counts = [(r["name"], r["trainable"], r["frozen"], r["stays"]) for r in profile["regions"]]
    assert counts == [("(root)", HEAD, 0, True), ("first", LAYER, 0, False), ("second", 0, LAYER, False)]
    assert (profile["dtype"], profile["micro_batches"], profile["batch"]) == ("bfloat16", 2, 2)
    costs = profile["costs"]
    gradient_bytes = 4 if reduces_in_the_parameter_s_dtype() else 2
    assert (costs["parameter_bytes"], costs["gradient_bytes"], costs["shard_bytes"]) == (2, gradient_bytes, 4)
    assert costs["state_bytes"] == pytest.approx(8, rel=0.02)  # AdamW's two, and its step counts
    assert all(r["forward_seconds"] > 0 and r["unshard_seconds"] > 0 for r in profile["regions"])
    assert profile["regions"][0]["reduce_seconds"] > 0
    assert profile["regions"][1]["activation_bytes"] >= 2 * 64 * 2  # the input of a linear layer, in bfloat16
    linears = [region.get("linears", []) for region in profile["regions"]]
    size = {"rows": 128, "columns": 64, "trainable": HEAD, "frozen": 0, "share": 1}
    assert linears == [[{"name": "head", **size, "input_bytes": 2 * 64 * 2, "output_bytes": 2 * 128 * 2}], [], []]
    assert 0 < costs["step_seconds"] < 1 and profile["machine"]["gpus_per_node"] == 1
    assert "second is used 2 times in a forward" in said and "idle is not used in a step's forward" in said


@pytest.mark.slow
def test_a_measured_job_is_compared_and_searched(measured):
    path, _ = measured
    own = "--cluster measured --on-cpus --link 1gbit"
    step, faster = (
        json.loads(plan("compare", path, "--json", own, speed))["modes"]["FSDP2"]["step"]
        for speed in ("", "--speed 10")
    )
    assert faster["compute_seconds"] == pytest.approx(step["compute_seconds"] / 10)
    # Of two micro-batches: the root is gathered in forward, the others in backward too; each sends half over its link.
    gathered = 2 * 2 * (HEAD + 2 * 2 * LAYER) / 2
    assert step["forward_inter"] + step["backward_inter"] - step["reduce_inter"] == pytest.approx(gathered)
    assert json.loads(plan("search", path, "--json --link 25gbit"))["tiers"]
    assert "FCDP device" in plan("compare", path, own, "--over batch")


@pytest.mark.slow
def test_a_calibrated_mode_takes_what_was_measured_of_it(measured, tmp_path):
    """On links that are not shaped, as the calibration's are. More where the run with marks, which is another one, has
    measured more beside computing: only that is taken away, so it does not count how long it was."""
    path, _ = measured
    calibration = read(path)["calibration"]
    assert calibration["nodes"] == 2 and {*calibration["modes"]} == {"FSDP2", "FCDP", "FCDP device", "FCDP whole"}
    assert {*calibration["wire"]} == {"200mbit", "600mbit"}
    modes = json.loads(plan("compare", path, "--json --cluster measured --on-cpus --link unlimited"))["modes"]
    job = json.loads(path.read_text())
    job["regions"] = [region | {"forward_seconds": 0, "backward_seconds": 0} for region in job["regions"]]
    bare = tmp_path / "bare.json"
    bare.write_text(json.dumps(job))
    without = json.loads(plan("compare", bare, "--json --cluster measured --on-cpus --link unlimited"))["modes"]
    for name, of in calibration["modes"].items():
        seconds = modes[name]["step"]["seconds"]
        assert 0 < of["reduce_seconds"] < of["step_seconds"]
        assert seconds > of["step_seconds"] - 1e-3, name
        assert seconds == pytest.approx(without[name]["step"]["seconds"], abs=1e-3), name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "said"),
    [
        (
            "import sys\nsys.exit('the file is missing')\n",
            "rank 0 (node 0, local rank 0) exited with code 1:\nthe file",
        ),
        ("print('trained')\n", "the script used no group of FSDP2 (fully_shard)"),
    ],
    ids=["fails", "without FSDP2"],
)
def test_a_script_that_cannot_be_measured_is_said(tmp_path, script, said):
    path = tmp_path / "train.py"
    path.write_text(script)
    command = [sys.executable, "-m", "fcdp_plan", "profile", "--nodes", "1", "--ranks", "1", "--", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if "namespace" in done.stderr:
        pytest.skip(done.stderr.strip().splitlines()[-1])
    assert done.returncode == 1 and said in done.stderr and "Traceback" not in done.stderr, done.stderr


def test_a_job_that_gives_no_profile_is_said():
    """It stepped too seldom, or its ranks are not alike."""
    from fcdp_plan.failure import Error

    report = {"groups": [{"name": "a"}], "marks": [], "away": [], "steps": 2}
    with pytest.raises(Error, match="made 2 optimizer steps: 4 or more are needed, of which 3 do not count"):
        measure.profile_of([report], None, 1, 1)
    steps = [("optimizer", -1, float(i), i + 0.5, 0.0) for i in range(6)]
    ranks = [report | {"marks": steps, "groups": [{"name": name}]} for name in "ab"]
    with pytest.raises(Error, match="the ranks have different groups, as in a pipeline: .* whose ranks are alike"):
        measure.profile_of(ranks, None, 1, 1)


@pytest.mark.slow
def test_a_layer_that_backward_recomputes_is_gathered_once_more(tmp_path, monkeypatch):
    torch = pytest.importorskip("torch")
    from torch.utils.checkpoint import checkpoint

    from fcdp_plan import watch

    monkeypatch.setenv("RANK", "0")
    watched, layer, x = watch.Watch(str(tmp_path), 5), torch.nn.Linear(4, 8), torch.ones(2, 4, requires_grad=True)
    hooks = watched._watch_linears()
    try:
        layer(x).sum().backward()
        assert watched.linears == {id(layer): {"input_bytes": 2 * 4 * 4, "output_bytes": 2 * 8 * 4}}
        checkpoint(layer, x, use_reentrant=False).sum().backward()
        assert watched.linears[id(layer)]["extra_gathers"] == 1
    finally:
        for hook in hooks:
            hook.remove()


def test_linear_layers_that_are_small_are_not_split():
    from fcdp_plan import splits

    def linear(rows, columns):
        return {"name": "x", "rows": rows, "columns": columns, "trainable": rows * columns, "frozen": 0}

    large, rank_8, flat = linear(512, 512), linear(512, 8), linear(127, 4096)
    group = {"trainable": 4 * 512 * 512, "frozen": 0}
    assert splits.measured(group, [large, rank_8, flat]) == [large | {"share": 0.25}]
    assert splits.measured(group, []) == []


def test_a_rank_that_does_not_report_is_named(tmp_path):
    from fcdp_plan.failure import Error

    (tmp_path / "job" / "probe").mkdir(parents=True)
    (tmp_path / "rank0.json").write_text("{}")
    with pytest.raises(Error, match="rank 1 did not report: was the script run with -I or -E"):
        measure._reports(str(tmp_path), 2)


def test_a_machine_without_iproute2_is_told(monkeypatch):
    monkeypatch.setattr(measure.network, "missing_tools", lambda: ["ip", "tc"])
    said = plan("profile -- -c pass", status=1)
    assert "cannot find ip and tc: install iproute2 (apt-get install iproute2)" in said, said


def test_what_is_no_script_and_no_trace_is_said(tmp_path):
    assert "give a script behind --, or --trace FILE" in plan("profile", status=1)
    assert "give a script behind --, or --trace FILE" in plan("profile --trace x.trace -- train.py", status=1)
    assert "no such script: nowhere.py" in plan("profile -- nowhere.py", status=1)
    path = tmp_path / "text"
    path.write_text("no trace")
    assert f"{path}" in plan("profile --trace", path, status=1)
    assert "--cluster measured: the profile has no machine" in plan(
        "compare", described(tmp_path), "--cluster measured", status=1
    )


def described(folder):
    path = folder / "described.json"
    plan("describe --layers 2 --hidden 64 --heads 4 -o", path)
    return path


# ---- marks to seconds ----


def marks_of(steps, layer_s=0.25):
    """Of a root (0) and a layer (1): each unshard takes 2 s, of them 1 s of a collective."""
    now, marks = 0.0, []

    def mark(kind, group, seconds, collective=0.0):
        nonlocal now
        marks.append((kind, group, now, now + seconds, collective))
        now += seconds

    for _ in range(steps):
        mark("forward", 0, 2, 1)
        now += 0.5
        mark("forward", 1, 2, 1)
        now += layer_s
        mark("end", 1, 0.125)
        now += 0.0625
        mark("backward", 1, 2, 1)
        now += 1
        mark("reduce", 1, 3, 2)
        now += 4  # the root's backward
        mark("reduce", 0, 3, 2)
        now += 8  # clips gradients
        mark("optimizer", -1, 16)
        now += 32  # the next batch
    return marks


def test_seconds_between_marks_belong_to_the_last_unshard():
    """The digests of the lab's probe, of 0.25 s, are no part of what was measured."""
    marks = marks_of(6)
    away = [(mark[3] + 1, mark[3] + 1.25) for mark in marks if mark[0] == "optimizer"]
    seconds = measure.seconds_of([measure.steps_of(marks, away), measure.steps_of(marks_of(6, layer_s=0.75), [])])
    assert seconds[("compute", "forward", 0)] == 0.5
    assert seconds[("compute", "forward", 1)] == 0.75 + 0.125 + 0.0625  # the slower rank's
    assert seconds[("compute", "backward", 1)] == 1 + 4
    assert seconds[("unshard", 1)] == 2 and seconds[("reduce", 1)] == 1
    assert seconds[("optimizer",)] == 16 and seconds[("other",)] == 8 + 32
    assert measure.steps_of(marks, away)[0].other == 8 + 31.75


def test_a_small_piece_that_took_as_long_says_nothing_of_latency():
    names = ("copy", "gather", "scatter", "node_gather", "lane_gather")
    links = {"size": 1 << 20, "small": 1 << 12, "seconds": {name: [0.01, 0.01] for name in names}}
    assert measure.machine_of(links, 2, 2)["links"] == {"unlimited": f"{(1 << 19) / 0.01 / 1e6:.1f}mbyte"}


def a_calibrated_job(folder):
    """Its machine has no rates: all that is not computed is in the calibration."""
    path = described(folder)
    job = json.loads(path.read_text())
    job["machine"] = {"gpus_per_node": 2, "node_link": "100mbyte", "latency": "1ms", "links": {"unlimited": "1gbyte"}}
    one = {"step_seconds": 3.0, "gather_seconds": 1.0, "reduce_seconds": 0.5}
    keys = ("gather_times", "reduce_times", "lane_gather_times", "lane_reduce_times")
    wire = {"10mbit": dict.fromkeys(keys, 2), "1000mbit": dict.fromkeys(keys, 1)}
    job["calibration"] = {"nodes": 2, "wire": wire, "modes": {"FSDP2": one, "FCDP": one}}
    path.write_text(json.dumps(job))
    return path


def test_a_calibration_is_of_jobs_on_cpus_and_holds_for_modes_that_are_alike(tmp_path):
    path, own = a_calibrated_job(tmp_path), "--json --cluster measured --link unlimited"
    found = {name: one["step"] for name, one in json.loads(plan("compare", path, own, "--on-cpus"))["modes"].items()}
    assert found["FSDP2"]["seconds"] == pytest.approx(3, abs=1e-3)
    assert found["FSDP2"]["gather_core_seconds"] == pytest.approx(1)
    assert found["FSDP2"]["reduce_core_seconds"] == pytest.approx(0.5)
    assert found["FCDP"]["seconds"] == found["FCDP whole"]["seconds"] == pytest.approx(3, abs=1e-3)
    assert found["FSDP2 keep"]["seconds"] < 3  # it gathers once
    assert json.loads(plan("compare", path, own))["modes"]["FSDP2"]["step"]["seconds"] < 1
    faster = json.loads(plan("compare", path, own, "--on-cpus --speed 10"))["modes"]["FSDP2"]["step"]
    assert faster["compute_seconds"] == pytest.approx(found["FSDP2"]["compute_seconds"] / 10, rel=0.01)


def test_a_profile_without_a_calibration_is_of_the_first_schema(tmp_path):
    path = described(tmp_path)
    job = json.loads(path.read_text())
    path.write_text(json.dumps(job | {"schema": "fcdp-plan-profile/1"}))
    assert read(path)["schema"] == "fcdp-plan-profile/1"


def test_links_of_the_lab_pass_what_their_buckets_hold(tmp_path):
    path = a_calibrated_job(tmp_path)
    own = "--json --cluster measured --on-cpus --link 100mbit"
    plain, shaped = (json.loads(plan("compare", path, own, option)) for option in ("", "--shaped"))
    assert shaped["cluster"]["burst_bytes"] == 256 * 1024 and shaped["cluster"]["gather_times"] == pytest.approx(1.5)
    assert plain["cluster"]["burst_bytes"] == 0 and "gather_times" not in plain["cluster"]
    assert shaped["cluster"]["message_bytes"] == 276 and "message_bytes" not in plain["cluster"]
    sent = [one["modes"]["FSDP2"]["step"]["forward_inter"] for one in (plain, shaped)]
    assert sent[0] < sent[1]
    assert shaped["cluster"]["inter_rate"] == pytest.approx(100e6 / 8 * 1448 / 1514)
    at = [
        json.loads(plan("compare", path, f"--json --shaped --link {rate}"))["cluster"] for rate in ("1mbit", "10gbit")
    ]
    assert [cluster["lane_reduce_times"] for cluster in at] == [2, 1]
    assert "--shaped: 'rdma' is no rate of fcdp-lab" in plan("compare", path, "--shaped --link rdma", status=1)


def test_a_mode_to_calibrate_has_arguments():
    from fcdp_plan.profile import mode_and_arguments

    assert mode_and_arguments("FSDP2 hpZ: --reshard-after-forward 2") == ("FSDP2 hpZ", ("--reshard-after-forward", "2"))
    for text in ("HSDP", "ZeRO-3: --hsdp", "FCDP file: "):
        with pytest.raises(argparse.ArgumentTypeError, match="write 'MODE: ARGUMENTS', with a mode of FSDP2, "):
            mode_and_arguments(text)
    assert "2 nodes or more are needed" in plan("profile --nodes 1 --calibrate --", __file__, status=1)


def test_of_a_collective_the_rank_counts_that_came_last():
    """Two ranks, steps of one gather and one reduction; the first two steps do not count, nor what follows the last."""
    quick, slow = ([], [])
    for i in range(5):
        for rank, first in ((quick, 1 + i), (slow, 0.25)):
            rank.append(("all_gather_into_tensor", -1, 0, first, 0.0))
            rank.append(("reduce_scatter_tensor", -1, 0, 3.25 - first / 4, 0.0))
            rank.append(("optimizer", -1, 0, 1, 0.0))
    found = measure.collectives_of([quick, slow])
    assert found == {"gather_seconds": 0.25, "reduce_seconds": 3.25 - 1 - 1 / 8}


def test_modes_are_calibrated_by_turns(monkeypatch):
    """The machine is slow in the second turn: the medians do not have it, and no mode alone does."""
    ran = []

    def calibrated(job, nodes, ranks, steps, timeout_s, mode, folder):
        ran.append((mode, job[-1], folder))
        turn = (len(ran) - 1) // 2
        return {"step_seconds": (1.0, 7.0, 2.0)[turn], "gather_seconds": (0.3, 0.2, 0.1)[turn]}

    monkeypatch.setattr(measure.network, "missing_tools", list)
    monkeypatch.setattr(measure.lab, "stop_on_signals", lambda: None)
    monkeypatch.setattr(measure, "_run", lambda *words: None)
    monkeypatch.setattr(measure, "_reports", lambda folder, n: [{"device": "cpu", "groups": []}] * n)
    monkeypatch.setattr(measure, "_links", lambda *words: len(ran))
    monkeypatch.setattr(measure, "wire_of", lambda links, nodes, ranks, rate: {"gather_times": 1 + links % 4})
    monkeypatch.setattr(measure, "_calibrate", calibrated)
    _, _, found = measure.run(["train.py"], 2, 2, 5, 60.0, {"FSDP2": (), "HSDP": ("--hsdp",)})
    assert [(mode, word) for mode, word, _ in ran] == [("FSDP2", "train.py"), ("HSDP", "--hsdp")] * 3
    assert len({folder for _, _, folder in ran}) == 3
    assert found["modes"]["HSDP"] == {"step_seconds": 2.0, "gather_seconds": 0.2} == found["modes"]["FSDP2"]
    assert found["wire"]["200mbit"] == {"gather_times": 1} and found["nodes"] == 2


def test_a_collective_that_takes_what_its_bytes_need_holds_the_link_once():
    from fcdp_lab import network

    rate, burst, size = 25e6 * network.PAYLOAD, (1 << 18) * network.PAYLOAD, 1 << 22
    sent = {"gather": 0.75 * size, "scatter": 1.5 * size, "lane_gather": 0.5 * size, "lane_reduce": size}
    seconds = {name: [0.0, (n - burst) / rate] for name, n in sent.items()}
    seconds["scatter"][1] += sent["scatter"] / rate / 10
    seconds["lane_reduce"][1] /= 2
    times = measure.wire_of({"size": size, "seconds": seconds}, 2, 2, "200mbit")
    assert times == pytest.approx(
        {"gather_times": 1, "reduce_times": 1.1, "lane_gather_times": 1, "lane_reduce_times": 1}
    )
