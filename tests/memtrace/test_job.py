"""A real job, recorded: what the trace says is what fcdp.stats() says."""

import json
import os
import subprocess
import sys

import pytest

from traces import _trace, memtrace_run

pytestmark = pytest.mark.slow
RANKS = 2
TRAIN = """\
import json, os, subprocess, sys
import torch
import torch.nn as nn
from torch.distributed.fsdp import fully_shard
import fcdp

torch.manual_seed(0)
torch.distributed.init_process_group("gloo")
model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))
for module in [*model, model]:
    fully_shard(module)
    if hasattr(module, "set_force_sum_reduction_for_comms"):  # gloo has no average
        module.set_force_sum_reduction_for_comms(True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def step():
    model(torch.ones(2, 256)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


for _ in range(3):
    step()
with fcdp.trace(sys.argv[1] + "/own%r.trace") as path:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        step()
profile.export_chrome_trace(f"{sys.argv[1]}/profile{torch.distributed.get_rank()}.json")
assert path.endswith(f"own{os.environ['RANK']}.trace"), path
with open(f"{sys.argv[1]}/stats{torch.distributed.get_rank()}.json", "w") as out:
    json.dump(fcdp.stats(), out)
torch.distributed.barrier()
if torch.distributed.get_rank() == 0:  # of all ranks, by the launcher's number
    top = [sys.executable, "-m", "fcdp_memtrace", "top", "--json", "--pid", str(os.getppid())]
    with open(sys.argv[1] + "/top.json", "w") as out:
        subprocess.run(top, stdout=out, check=True, env=os.environ | {"FCDP": "0"})
    report = [sys.executable, "-m", "fcdp_memtrace", "report", "--json", sys.argv[1] + "/job.trace"]
    while not os.path.exists(report[-1]):  # the recorder has read no ring yet
        os.sched_yield()
    named = set()
    while not named >= {"0", "1", "2", "3"}:  # the recorder has looked at regions that live: it knows their names
        done = subprocess.run(report, stdout=subprocess.PIPE, check=True, env=os.environ | {"FCDP": "0"})
        named = {region["name"] for region in json.loads(done.stdout)["regions"]}
torch.distributed.barrier()
torch.distributed.destroy_process_group()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """With job.trace, a rank's own trace and its stats for each rank."""
    folder = tmp_path_factory.mktemp("job")
    (folder / "train.py").write_text(TRAIN)
    env = {k: v for k, v in os.environ.items() if not k.startswith(("FCDP", "TORCHELASTIC", "PET_"))}
    env |= {"FCDP": "1", "FCDP_LOCAL_SIZE": "1", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    env["FCDP_CODEC"] = "delta"  # whole in the first step, as differences in the others
    env["FCDP_SIM_PCIE"] = "0.05"  # so that the host waits for each group
    env["FCDP_SIM_TIMELINE"] = str(folder / "timeline%p.json")
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(RANKS), "--local-addr", "127.0.0.1"]
    launcher += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]
    record = [sys.executable, "-m", "fcdp_memtrace", "record", "-o", str(folder / "job.trace"), "--"]
    done = subprocess.run(
        [*record, sys.executable, *launcher, str(folder / "train.py"), str(folder)],
        env=env,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert f"{RANKS} processes" in done.stderr, done.stderr
    return folder


def processes(path):
    return _trace.file_processes(_trace.file_open(str(path)))


def stats_of(stats, counter):
    """fcdp.stats()["a"]["b"] for a.b; None: it has none of that name."""
    for part in counter.split("."):
        stats = stats.get(part) if isinstance(stats, dict) else None
    return stats


def test_counters_equal_fcdp_stats(folder):
    found = {p["rank"]: p for p in processes(folder / "job.trace")}
    assert found.keys() == set(range(RANKS))
    for rank, process in found.items():
        assert process["end"] == "ended" and process["lost"] == 0 and process["step"] == 4
        stats = json.loads((folder / f"stats{rank}.json").read_text())
        both = {name: (value, stats_of(stats, name)) for name, value in process["counters"].items()}
        both = {name: pair for name, pair in both.items() if isinstance(pair[1], int)}
        for name in ("host.unpins", "host.pinned_bytes"):  # the trace goes on while the job's end unlocks
            del both[name]
        assert len(both) > 20, both
        assert {name: pair for name, pair in both.items() if pair[0] != pair[1]} == {}


def test_a_profile_of_it_has_its_groups_in_order(folder):
    """As fcdp-plan profile --trace writes it: bytes are those of regions, which are padded."""
    traces = pytest.importorskip("fcdp_plan.traces")
    profile = traces.profile_of(str(folder / "job.trace"), 4, "float32", 1)
    stats = json.loads((folder / "stats0.json").read_text())
    groups = {group["name"]: group for group in stats["groups"]}
    assert [region["name"] for region in profile["regions"]] == ["0", "1", "2", "3"]
    for region in profile["regions"]:
        group = groups[region["name"]]
        assert region["trainable"] * 4 == group["trainable_bytes"]
        assert (region["trainable"] + region["frozen"]) * 4 == group["bytes"]
        assert region["forward_seconds"] > 0 < region["backward_seconds"] and not region["stays"]
    assert profile["costs"]["optimizer_seconds"] > 0 and profile["micro_batches"] == 1


def test_the_report_says_what_the_exit_line_says(folder):
    """Per node, as every rank counts it."""
    report = json.loads(memtrace_run("report", folder / "job.trace", "--json").stdout)
    saved = json.loads((folder / "stats0.json").read_text())["saved"]
    for name in ("plain_bytes", "gather_bytes"):
        assert report["counters"][f"saved.{name}"] == saved[name] > 0


def test_a_reduce_scatter_of_cpu_tensors_has_a_duration(folder):
    """The program waits for it. So the rate of its link is known, and it is no moment in which all was sent."""
    file = _trace.file_open(str(folder / "job.trace"))
    for index, process in enumerate(_trace.file_processes(file)):
        series = _trace.series(file, index, 100)
        sent = process["counters"]["collectives.reduce_scatter.inter_bytes_sent"]
        gathered = process["counters"]["collectives.gather.inter_bytes_sent"]
        assert not [mark for mark in series["marks"] if mark[1] == "reduce_scatter"]
        between = sum(memoryview(series["columns"][0]["between nodes"]).cast("d"))
        assert sent > 0 and between == pytest.approx(sent + gathered)


def test_the_simulated_device_s_timeline_says_the_regions(folder):
    """What moves a region's bytes, and the program's wait for them; in each of the ranks."""
    regions = {"0", "1", "2", "3"}
    for process in processes(folder / "job.trace"):
        events = json.loads((folder / f"timeline{process['pid']}.json").read_text())
        slices = [event for event in events if event["ph"] == "X"]
        copies = [event["name"] for event in slices if event["cat"].startswith("copy to")]
        waits = [e["args"].get("label", "") for e in slices if e["cat"] == "wait" and e["name"] == "cuEventSynchronize"]
        assert regions <= set(copies) and regions <= set(waits), (set(copies), set(waits))


def test_the_live_view_equals_fcdp_stats(folder):
    frame = json.loads((folder / "top.json").read_text())
    assert frame["running"] == RANKS and [rank["rank"] for rank in frame["ranks"]] == list(range(RANKS))
    for rank in frame["ranks"]:
        stats = json.loads((folder / f"stats{rank['rank']}.json").read_text())
        both = {name: (value, stats_of(stats, name)) for name, value in rank["counters"].items()}
        both = {name: pair for name, pair in both.items() if isinstance(pair[1], int)}
        assert len(both) > 20, both
        assert {name: pair for name, pair in both.items() if pair[0] != pair[1]} == {}
        assert frame["saved_bytes"] == stats["saved"]["plain_bytes"] - stats["saved"]["gather_bytes"]
        assert rank["step"] == 4 and rank["waits_ms"]["agreement"] > 0
    assert {row["name"] for row in frame["regions"]} >= {"0", "1", "2", "3"}
    assert frame["events_lost"] + frame["events_dropped"] == 0


def test_the_events_add_up_to_the_counters(folder):
    report = json.loads(memtrace_run("report", folder / "job.trace", "--json").stdout)
    total, counters = report["total"], report["counters"]
    assert total["inter_bytes"] == counters["collectives.gather.inter_bytes_sent"] > 0
    assert total["d2h_bytes"] == counters["moves.d2h_bytes"] > 0
    assert total["h2d_bytes"] == counters["moves.h2d_bytes"]
    assert (total["made"], total["hits"]) == (counters["gathers.made"], counters["gathers.avoided"])
    assert {r["name"] for r in report["regions"]} >= {"0", "1", "2", "3"}
    assert [s["step"] for s in report["steps"] if s["timed"]] == [1, 2, 3]


def test_every_rule_is_kept(folder):
    done = memtrace_run("check", folder / "job.trace")
    assert done.returncode == 0, done.stdout


def test_a_rank_records_itself(folder):
    for rank in range(RANKS):
        (process,) = processes(folder / f"own{rank}.trace")
        assert process["rank"] == rank and process["end"] == "running" and process["events"] > 10
        done = memtrace_run("check", folder / f"own{rank}.trace")
        assert done.returncode == 0, done.stdout


def test_the_export_is_on_the_profiler_s_clock(folder):
    """The step that was profiled: its gathers lie between the profile's first operation and its last."""
    profile = json.loads((folder / "profile0.json").read_text())
    done = memtrace_run(
        "export", folder / "own0.trace", "--beside", folder / "profile0.json", "-o", folder / "both.json"
    )
    assert done.returncode == 0, done.stderr
    both = json.loads((folder / "both.json").read_text())
    assert both["baseTimeNanoseconds"] == profile["baseTimeNanoseconds"]
    operations = [e for e in both["traceEvents"] if e.get("ph") == "X" and e["name"].startswith("aten::")]
    gathers = [e for e in both["traceEvents"] if e.get("args", {}).get("kind") == "gather" and e["args"]["step"] == 3]
    first, last = min(e["ts"] for e in operations), max(e["ts"] + e["dur"] for e in operations)
    assert len(operations) > 20 and gathers
    assert all(first < e["ts"] and e["ts"] + e["dur"] < last for e in gathers), (first, last, gathers)


def test_the_views_of_it(folder):
    pytest.importorskip("matplotlib")
    assert memtrace_run("report", folder / "job.trace").returncode == 0
    assert memtrace_run("plot", folder / "job.trace", "-o", folder / "x.svg").returncode == 0
    assert memtrace_run("export", folder / "job.trace").returncode == 0
    trace = json.loads((folder / "job.trace.json").read_text())
    assert sum(e.get("args", {}).get("kind") == "gather" for e in trace["traceEvents"]) > 0
