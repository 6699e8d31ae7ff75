"""fcdp-doctor of a script and of a process: what it says is what the job did."""

import contextlib
import dataclasses
import json
import os
import pathlib
import re
import select
import signal
import subprocess
import sys

import pytest

from test_commands import SCRIPTS, command, environment, installed, launch, run, started

__all__ = ["installed"]  # a fixture of test_commands, used here too
pytestmark = pytest.mark.slow

# Four groups: of two kinds of layers, one of them frozen, one left to FSDP2 as KIND says; the root's. With "twins", the
# same of a second model, which is frozen and runs forward alone.
JOB = """\
import gc, os, sys
kind = sys.argv[1] if len(sys.argv) > 1 else "served"
if kind == "hangs":
    import threading
    print("about to hang", flush=True)
    threading.Event().wait()
rank = int(os.environ["RANK"])
# Before torch, whose import is most of a small job's time.
if kind == "raises" and rank == 1:
    raise ValueError("no data for rank 1")
if kind == "exits" and rank == 0:
    sys.exit("the file is missing")
if kind == "killed" and rank == 1:
    os.kill(os.getpid(), 9)
import torch
import torch.nn as nn
from torch.distributed.fsdp import fully_shard

torch.manual_seed(0)
torch.distributed.init_process_group("gloo")
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers, self.head = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3))), nn.Linear(64, 8)

    def forward(self, x):
        return self.head(self.layers(x))

model = Net()
model.layers[0].requires_grad_(False)
models = [model, Net().requires_grad_(False)] if "twins" in kind else [model]
def sharded(net):
    for layer in net.layers:
        fully_shard(layer)
    fully_shard(net)
    for module in net.modules():
        if hasattr(module, "set_force_sum_reduction_for_comms"):  # gloo has no average
            module.set_force_sum_reduction_for_comms(True)
    return net

for each in models:
    sharded(each)
if kind == "partly":
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather

    class OwnGather(DefaultAllGather):
        pass

    model.layers[1].set_custom_all_gather(OwnGather())
if kind == "evaluated":
    with torch.no_grad():
        model(torch.ones(2, 64))
    sys.exit()
optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
step = 0
while True:
    step += 1
    with torch.no_grad():
        for each in models[1:]:
            each(torch.ones(2, 64))
    if "replaced" in kind and step == 2:
        models[1] = each = None
        gc.collect()
        models[1] = sharded(Net().requires_grad_(False))
        with torch.no_grad():
            models[1](torch.ones(2, 64))
    model(torch.ones(2, 64)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    if "waits" in kind and step == 3:
        if rank == 0:
            print("ready", flush=True)
        sys.stdin.readline()
        break
torch.distributed.destroy_process_group()
"""
LAYER = (64 * 64 + 64) * 4
HEAD = (64 * 8 + 8) * 4


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(JOB)
    return path


def doctor(*arguments, **settings):
    return command("fcdp-doctor", *arguments, **settings)


def document(done):
    return json.loads(done.stdout)


def by_name(groups):
    return {group["name"]: group for group in groups}


def test_a_script_whose_groups_are_all_served(script):
    done = doctor("--json", "--steps", "3", *"--link 1gbit --gpus 4 --cluster h100 --compute 0.5".split(), script)
    assert done.returncode == 0 and not done.stderr, done.stderr
    said = document(done)
    assert (said["schema"], said["nodes"], said["ranks_per_node"], said["steps"]) == (1, 2, 2, 3)
    assert said["measured"] == "the mean of steps 2 to 3"
    groups = by_name(said["groups"])
    assert set(groups) == {"(root)", "layers.0", "layers.1", "layers.2"}
    for name, group in groups.items():
        size = HEAD if name == "(root)" else LAYER
        assert group["served"] and group["reason"] is None
        assert size <= group["bytes"] <= size + 2048  # padded to slices
        assert group["trainable_bytes"] == (0 if name == "layers.0" else group["bytes"])
        uses = 1 if name == "(root)" else 2  # FSDP2 keeps the root's between forward and backward
        assert group["gathers"] == uses
        assert group["plain_bytes"] == pytest.approx(uses * size * 3 / 4)
        # what is trained crosses the nodes once, of each block one half; what is frozen not at all
        assert group["fcdp_bytes"] == pytest.approx(0 if name == "layers.0" else size / 2)
    assert said["fcdp_bytes"] == pytest.approx(sum(group["fcdp_bytes"] for group in groups.values()))
    assert said["host_bytes"] >= said["bytes"]
    predicted = said["predicted"]
    assert predicted["where"] == "2 nodes x 4 GPUs (h100) at 1gbit" and predicted["use"] in predicted["modes"]
    fsdp2, fcdp = predicted["modes"]["FSDP2"], predicted["modes"]["FCDP"]
    assert 0.5 <= fcdp["seconds"] <= 0.51 and fcdp["sent_bytes"] < fsdp2["sent_bytes"]


def twins(said, name="layers.1"):
    """(is trained, gathers, bytes by FSDP, bytes by FCDP) of the two groups of the name."""
    of_name = [group for group in said["groups"] if group["name"] == name]
    return sorted(
        (group["trainable_bytes"] > 0, group["gathers"], group["plain_bytes"], group["fcdp_bytes"]) for group in of_name
    )


@pytest.mark.further
def test_groups_of_one_name_and_size_are_told_apart(script):
    said = document(doctor("--json", "--ranks", "1", "--steps", "3", script, "twins"))
    assert len(said["groups"]) == 8
    assert twins(said) == [(False, 1, LAYER / 2, 0), (True, 2, LAYER, LAYER / 2)]


@pytest.mark.further
def test_a_group_that_replaces_one_of_its_name_and_size_is_another(script):
    """Its figures are its own, and those of the groups that stay are theirs."""
    said = document(doctor("--json", "--ranks", "1", script, "twins replaced"))
    assert len(said["groups"]) == 8
    # the new one is gathered once, which is all that it does in step 2; what is trained goes on
    assert twins(said) == [(False, 1, LAYER / 2, LAYER / 2), (True, 2, LAYER, LAYER / 2)]


def test_the_table_folds_groups_that_are_alike_and_says_why_one_is_not_served(script):
    done = doctor("--ranks", "1", "--link", "25gbit", "--gpus", "8", script, "partly")
    assert done.returncode == 1 and not done.stderr, done.stderr
    words = re.sub(r"[\s│]+", " ", done.stdout)
    assert re.search(
        r"^FCDP leaves layers\.1 to FSDP: it has a custom all-gather \(OwnGather\)\.$", done.stdout, re.M
    ), done.stdout
    assert "FCDP serves 3 of 4 groups" in words and "2 nodes x 1 ranks" in words and ": step 2" in words
    assert re.search(r"instead of [\d.]+ KB \(\d+ % fewer\)", words), done.stdout
    assert "Predicted on 2 nodes x 8 GPUs (a40) at 25gbit" in words and " of FSDP2's step." in words, done.stdout


def test_a_link_that_is_not_known_is_named_before_any_rank_starts(script):
    done = doctor("--link", "fast", script)
    assert done.returncode == 1 and "no link 'fast': write rdma" in done.stderr, done.stderr


def test_a_module_is_run_as_python_does_and_options_behind_it_are_its_own(script):
    done = doctor("--nodes", "2", "--ranks", "1", "--", "-m", "train", "--nodes", "7", PYTHONPATH=str(script.parent))
    assert done.returncode == 0 and "2 nodes x 1 ranks" in done.stdout, done.stdout + done.stderr
    assert "FCDP serves 4 of 4 groups" in done.stdout, done.stdout
    assert re.search(r"layers\.1 \.\.\. layers\.2", done.stdout), done.stdout


def test_one_node_has_nothing_to_save(script):
    done = doctor("--nodes", "1", script)
    words = re.sub(r"[\s│]+", " ", done.stdout)
    assert done.returncode == 1 and "are on one node" in words and "FCDP serves 0 of 4 groups" in words, done.stdout
    assert "fcdp-lab emulates nodes on this machine" in words and "of host memory" not in words, done.stdout


@pytest.mark.further
def test_what_is_not_served_takes_no_host_memory(script):
    done = doctor("--ranks", "1", script, FCDP_DEVICE_BUDGET="2M")
    assert done.returncode == 1 and "FCDP serves 0 of 4 groups" in done.stdout, done.stdout + done.stderr
    assert "FCDP_DEVICE_BUDGET, 2.1 MB, is too small" in done.stdout, done.stdout
    assert "the largest group, 'the root', takes" in done.stdout, done.stdout  # of equal pages, the first
    assert "of host memory" not in done.stdout, done.stdout


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"FCDP_TAU": "9"}, "FCDP_TAU=9: expected a number from 0 to 1"),
        (
            {"FCDP_LOCAL_SIZE": "3"},
            "FCDP_LOCAL_SIZE=3, but the emulated nodes have 2 ranks: unset it, or give --ranks 3",
        ),
    ],
)
def test_options_that_no_rank_could_have_are_named_before_any_starts(script, settings, said):
    done = doctor(script, **settings)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", f"fcdp-doctor: {said}\n")


def test_a_script_without_optimizer_steps_is_seen_at_its_end(script):
    said = document(doctor("--json", "--ranks", "1", script, "evaluated"))
    assert said["steps"] == 0 and said["measured"] == "the whole run, in which no optimizer stepped"
    assert {group["gathers"] for group in said["groups"]} == {1}


def test_a_job_without_fsdp_is_told_so(script, tmp_path):
    plain = tmp_path / "plain.py"
    plain.write_text(
        "import torch\ntorch.distributed.init_process_group('gloo')\n"
        "model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "while True:\n    model(torch.ones(1, 2)).sum().backward()\n    optimizer.step()\n"
    )
    done = doctor("--ranks", "1", plain)
    assert done.returncode == 1 and "no FSDP modules (found: DDP)" in re.sub(r"[\s│]+", " ", done.stdout), done.stdout


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("raises", r"rank 1 \(node 1, local rank 0\) failed:(.|\n)*ValueError: no data for rank 1"),
        ("exits", r"rank 0 \(node 0, local rank 0\) exited with code 1:\n(.|\n)*the file is missing"),
        ("killed", r"rank 1 \(node 1, local rank 0\) was killed by SIGKILL"),
    ],
)
def test_the_rank_that_failed_first_is_named_in_its_own_words(script, tmp_path, kind, said):
    done = doctor("--ranks", "1", script, kind, TMPDIR=str(tmp_path))
    assert done.returncode == 1 and not done.stdout and re.search(said, done.stderr), done.stderr
    assert "doctor/fcdp_doctor" not in done.stderr and "fcdp_doctor/script.py" not in done.stderr
    logs = pathlib.Path(re.search(r"output of every rank: (.*)", done.stderr)[1])
    assert len(list(logs.glob("rank*.err"))) == 2


def test_a_script_that_hangs_is_ended(script, tmp_path):
    done = doctor("--timeout", "20", "--ranks", "1", script, "hangs", TMPDIR=str(tmp_path))
    assert done.returncode == 1 and "in 20 s (--timeout); last words of rank 0: about to hang" in done.stderr
    assert done.left == []


# Starts itself as a data loader's worker, as it were, which says that it is there. Both wait for what never comes.
WAIT_FOREVER = """\
import signal, subprocess, sys
if "worker" in sys.argv:
    with open(sys.argv[1], "w") as fifo:
        fifo.write("x")
else:
    subprocess.Popen([sys.executable, *sys.argv, "worker"])
signal.pause()
"""


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_what_ends_the_doctor_ends_the_ranks(tmp_path, signum):
    script, fifo, tag = tmp_path / "wait.py", tmp_path / "fifo", launch.new_tag()
    script.write_text(WAIT_FOREVER)
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    line = [SCRIPTS / "fcdp-doctor", "--nodes", "1", "--ranks", "1", script, fifo]
    options = {
        "stderr": subprocess.PIPE,
        "preexec_fn": lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # nohup, around the tests, ignores it
    }
    with started(line, environment(TMPDIR=str(tmp_path)), tag, **options) as process:
        assert select.select([reader], [], [], 100)[0] and len(launch.tagged(tag)) == 3
        assert list(tmp_path.glob("fcdp-doctor-*"))
        process.send_signal(signum)
        assert process.wait(60) == 128 + signum, process.stderr.read()
        assert launch.lives_on(tag) == [] and not list(tmp_path.glob("fcdp-doctor-*"))
    os.close(reader)


# ---- a process ----

WHOLE = {"FCDP": "1", "FCDP_LOCAL_SIZE": "1", "FCDP_CODEC": "none"}  # the same bytes in each run


@pytest.fixture
def job(script):
    """torchrun with two ranks that stand for two nodes; they wait behind their third step."""
    processes, stack = [], contextlib.ExitStack()

    def start(settings, kind="waits"):
        torchrun = "--nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint 127.0.0.1:0 --local-addr 127.0.0.1".split()
        line = [sys.executable, "-m", "torch.distributed.run", *torchrun, script, kind]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        processes.append(stack.enter_context(started(line, environment(**settings), **pipes)))
        assert processes[-1].stdout.readline() == "ready\n"
        return processes[-1]

    with stack:
        yield start
        for process in processes:
            if process.poll() is None:
                process.communicate("\n", timeout=60)


def test_a_job_that_runs(job):
    process = job(WHOLE)
    done = doctor("--json", process.pid)
    assert done.returncode == 0 and not done.stderr, done.stderr
    said = document(done)
    assert (said["nodes"], said["ranks_per_node"], said["steps"]) == (2, 1, 3)
    assert said["measured"] == "the mean of 3 steps so far" and "train.py" in said["job"]
    groups = by_name(said["groups"])
    assert set(groups) == {"(root)", "layers.0", "layers.1", "layers.2"}
    frozen, trained = groups["layers.0"], groups["layers.1"]
    assert frozen["trainable_bytes"] == 0 and trained["trainable_bytes"] == trained["bytes"] >= LAYER
    assert frozen["gathers"] == trained["gathers"] == 2
    assert frozen["fcdp_bytes"] == pytest.approx(LAYER / 2 / 3)  # gathered once, in the first of three steps
    assert trained["fcdp_bytes"] == pytest.approx(LAYER / 2) and trained["plain_bytes"] == pytest.approx(LAYER)
    words = " ".join(doctor(process.pid).stdout.split())
    assert "FCDP serves 4 of 4 groups" in words and "the mean of 3 steps so far" in words, words


def test_where_a_running_jobs_groups_are_kept(job, tmp_path):
    """For want of host memory in files; one was read from the node's disk when the job began."""
    env = {"FCDP": "1", "FCDP_LOCAL_SIZE": "1"}
    for directory in ("spill", "cache"):
        (tmp_path / directory).mkdir()
    spilled = job(env | {"FCDP_HOST_BUDGET": "4K", "FCDP_SPILL_DIR": str(tmp_path / "spill")})
    groups = by_name(document(doctor("--json", spilled.pid))["groups"])
    assert [groups[name]["in_file"] for name in ("layers.0", "layers.1")] == [True, True], groups
    assert "yes, file" in doctor(spilled.pid).stdout
    cached = env | {"FCDP_CACHE_DIR": str(tmp_path / "cache")}
    job(cached).communicate("\n", timeout=60)  # it writes
    cached = job(cached)
    groups = by_name(document(doctor("--json", cached.pid))["groups"])
    assert [groups[name]["on_disk"] for name in ("layers.0", "layers.1")] == [True, False], groups
    assert "yes, disk" in doctor(cached.pid).stdout


def test_a_job_whose_models_have_groups_of_one_name_and_size(job):
    said = document(doctor("--json", job(WHOLE, "waits twins").pid))
    frozen, trained = twins(said)
    assert len(said["groups"]) == 8 and frozen == (False, 1, LAYER / 2, pytest.approx(LAYER / 2 / 3))
    assert trained == (True, 2, LAYER, pytest.approx(LAYER / 2))


def test_why_a_running_job_is_not_served(job):
    process = job({"FCDP": "1", "FCDP_LOCAL_SIZE": "2"})
    done = doctor("--json", process.pid)
    assert done.returncode == 1, done.stderr
    groups = document(done)["groups"]
    why = "all 2 ranks of the shard group are on one node: no gather crosses nodes, nothing to save"
    why += "; fcdp-lab emulates nodes on this machine, and shows what FCDP saves between them"
    assert [group["reason"] for group in groups] == [why] * 4
    assert sorted(group["bytes"] for group in groups) == [HEAD, LAYER, LAYER, LAYER]
    assert sorted(group["trainable_bytes"] for group in groups) == [0, HEAD, LAYER, LAYER]  # one is frozen


@pytest.mark.parametrize("pid", [2**22 - 1, os.getpid()], ids=["of none", "of the tests"])
def test_a_process_without_a_trace_is_named(pid):
    done = doctor(pid)
    assert done.returncode == 1 and str(pid) in done.stderr and "Traceback" not in done.stderr, done.stderr


def test_a_process_that_ends_under_the_doctor_is_named(monkeypatch):
    from fcdp_doctor import Failed, live
    from fcdp_memtrace import _trace

    monkeypatch.setattr(_trace, "live_groups", lambda pid: [])
    with pytest.raises(Failed, match="^process 7 has just ended$"):
        live.look(7)


def test_nothing_to_show_or_to_predict_is_said():
    from fcdp_doctor import Failed, predict
    from fcdp_doctor.groups import Document, Group, summary
    from fcdp_doctor.script import _document

    with pytest.raises(Failed, match=r"no rank reported: was it run with -I or -E\?"):
        _document(["train.py"], 2, 1, [None, None], "")
    nothing = Document(job="train.py", nodes=2, ranks_per_node=1, steps=1, measured="step 1", groups=[])
    numbers = predict.cluster_of("a40", "rdma", 1, 2)
    with pytest.raises(Failed, match="^--link predicts nothing: no group's size is known$"):
        predict.predict(nothing, numbers, "", 0.0)
    assert [*summary(nothing)] == ["FCDP has seen no FSDP group: none was gathered."]
    too_large = Group(name="layer", reason=None, bytes=1 << 42, trainable_bytes=1 << 42)
    predicted = predict.predict(dataclasses.replace(nothing, groups=[too_large]), numbers, "", 0.0)
    assert predict.lines(predicted)[-1] == "No mode fits: more nodes, or larger GPUs."


@pytest.mark.parametrize(
    "version, said",
    [
        (None, "not installed: pip install 'torch>=2.6'"),
        ("2.5.1+cu124", "2.5.1+cu124: too old, FCDP needs 2.6 or later"),
        ("2.6.0", "2.6.0"),
    ],
)
def test_a_torch_that_does_not_serve_is_named(monkeypatch, version, said):
    from fcdp_doctor import machine

    def installed(name):
        if version is None:
            raise machine.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(machine.metadata, "version", installed)
    assert machine._torch() == (said, version == "2.6.0")


def test_a_reason_is_kept_whole_however_long():
    reason = " ".join(f"word{i}" for i in range(100))
    text = (
        "import os\nfrom fcdp import _fcdp\nfrom fcdp_memtrace import _trace\n_fcdp.options_load()\n"
        f"_fcdp.trace_bypass('a', {reason!r}, 7, 3)\n_fcdp.trace_bypass('', {reason!r}, 0, 0)\n_fcdp.trace_bypass('c', 'short', 0, 0)\n"
        "groups = _trace.live_groups(os.getpid())[0]['groups']\n"
        'print(*(f\'{g["name"]}|{g["bytes"]}|{g["trainable_bytes"]}|{g["served"]}|{g["reason"]}\' for g in groups), sep=\'\\n\')\n'
    )
    done = run(sys.executable, "-c", text)
    assert done.stdout.splitlines() == [f"a|7|3|False|{reason}", f"(root)|0|0|False|{reason}", "c|0|0|False|short"], (
        done.stderr
    )
