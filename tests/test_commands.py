"""Every command of the installed wheel is run, and every snippet of the README, of CONTRIBUTING and of docs/. The
lists are read from pyproject.toml, from each command's own --help and from those documents, so what is new there
fails here until it has a test."""

import contextlib
import importlib.metadata
import json
import os
import pathlib
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import venv

import pytest

sys.path.append(str(pathlib.Path(__file__).with_name("torch_plugin")))
import launch
from described import describe

ROOT = pathlib.Path(__file__).resolve().parent.parent
SCRIPTS = pathlib.Path(sysconfig.get_path("scripts"))
TRAIN = """\
import os
import torch
import torch.nn as nn
from torch.distributed.fsdp import fully_shard

torch.manual_seed(0)
torch.distributed.init_process_group("gloo")
model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))
for module in [*model, model]:
    fully_shard(module)
    if hasattr(module, "set_force_sum_reduction_for_comms"):  # gloo has no average
        module.set_force_sum_reduction_for_comms(True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(4):
    model(torch.ones(2, 64)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
torch.distributed.destroy_process_group()
"""


def commands():
    """The names under [project.scripts]; Python 3.10 has no tomllib."""
    section = re.search(r"^\[project\.scripts\]\n(.*?)(?=^\[|\Z)", (ROOT / "pyproject.toml").read_text(), re.M | re.S)
    return re.findall(r"^([\w.-]+)\s*=", section.group(1), re.M)


def snippets():
    """(language, text) of every fenced block of the documents, each text once."""
    documents = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/*.md"))]
    documents.remove(ROOT / "docs" / "clusters.md")  # tests/test_clusters.py runs what is in it
    found = [re.findall(r"^```(\w*)\n(.*?)^```$", path.read_text(), re.M | re.S) for path in documents]
    return list(dict.fromkeys(block for blocks in found for block in blocks))


@pytest.fixture(scope="module", autouse=True)
def installed():
    try:
        importlib.metadata.distribution("fcdp")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("fcdp is not installed here (tools/setup.sh does it)")


def environment(**settings):
    """The caller's, without its options of FCDP and what its launcher says, and with this interpreter's commands first."""
    others = ("FCDP", "LOCAL_WORLD", "MPI_", "OMPI_", "PET_", "SLURM_", "TORCHELASTIC")
    env = {k: v for k, v in os.environ.items() if not k.startswith(others)}
    return (
        env
        | {"PATH": f"{SCRIPTS}{os.pathsep}{env['PATH']}", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        | settings
    )


@contextlib.contextmanager
def started(command, env, tag=None, **options):
    """A process that lives no longer than the block, with all that comes of it, whatever session that is in. An interrupt
    may come before Popen has returned."""
    tag = tag or launch.new_tag()
    words = [str(part) for part in command]
    try:
        with subprocess.Popen(words, env={**env, launch.TAG_NAME: tag}, text=True, **options) as process:
            try:
                yield process
            finally:
                launch.end(tag, process)
    finally:
        launch.end(tag)


def run(*command, cwd=None, **settings):
    """`left`: the processes that it has started and not ended."""
    tag = launch.new_tag()
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with started(command, environment(**settings), tag, cwd=cwd, **pipes) as process:
        out, err = process.communicate(timeout=300)
        done = subprocess.CompletedProcess(process.args, process.returncode, out, err)
        done.left = launch.lives_on(tag)
    return done


def command(name, *arguments, **settings):
    return run(SCRIPTS / name, *arguments, **settings)


def tiny_job(folder):
    """Arguments that make fcdp-lab run next to nothing on one emulated node."""
    script = folder / "script.py"
    script.write_text("print('loss 1.5')\n")
    return ["--nodes", "1", "--ranks", "1", "--rate", "unlimited", "--modes", "fsdp", "--launcher", "direct"], [
        "--",
        str(script),
    ]


# Of each command: what of its options a run with them must show. Those of fcdp-lab are all given in one run (below);
# its --svg needs a step, and what the simulated device needs is in tests/lab/test_on_device.py.
DOCTOR = {
    (): (0, ["options", "all FCDP_* variables are valid", "torch", "device", "would be served here"]),
    ("--options",): (0, ["| `FCDP_TAU` | 0..1 | 0 |"]),
    ("--help",): (0, ["usage: fcdp-doctor", "--options", "exit status"]),
}
HELP = {"-h", "--help"}
# Of fcdp-plan.
SHAPE = {
    *("--config", "--layers", "--hidden", "--heads", "--vocab", "--sequence"),
    *("--untied", "--lora-rank", "--recompute", "--scores", "--dtype"),
}
CLUSTER = {
    *("--cluster", "--nodes", "--gpus", "--link", "--latency", "--gpu-memory", "--host-memory"),
    *("--pcie", "--node-link", "--disk", "--teraflops", "--trees", "--speed"),
    "--shaped",
}
SCHEDULE = {
    *("--prefetch", "--micro-batches", "--jitter", "--transport", "--no-overlap", "--differences"),
    "--on-cpus",
}
OPTIONS = {
    "fcdp-doctor": {
        *HELP,
        *("--version", "--options", "--json", "--nodes", "--ranks", "--steps", "--timeout"),
        *("--cache", "--clear"),  # tests/torch_plugin/test_cache.py
        *("--link", "--gpus", "--cluster", "--compute"),
    },
    "fcdp-memtrace": {*HELP, "--version"},
    "fcdp-memtrace top": {*HELP, "--json", "--pid", "--interval"},
    "fcdp-memtrace record": {*HELP, "-o", "--output", "-f", "--force", "--pid", "-q", "--quiet"},
    "fcdp-memtrace report": {*HELP, "--json", "--html", "--steps", "--regions"},
    "fcdp-memtrace diff": {*HELP, "--json", "--skip-steps"},
    "fcdp-memtrace export": {*HELP, "--chrome", "-o", "--output", "--beside"},
    "fcdp-memtrace plot": {*HELP, "-o", "--output", "--rank", "--width"},
    "fcdp-memtrace serve": {*HELP, "--port", "--address", "--pid"},
    "fcdp-memtrace check": {*HELP, "--max-stall", "--max-peak", "--max-inter", "--skip-steps", "--json"},
    "fcdp-plan": {*HELP, "--version"},
    "fcdp-plan batch": {*HELP, *SHAPE, *CLUSTER, "--json"},
    "fcdp-plan describe": {*HELP, *SHAPE, "--batch", "-o", "--output", "--schema"},
    "fcdp-plan profile": {
        *HELP,
        *("-o", "--output", "--trace", "--dtype"),
        # tests/plan/test_profile.py
        *("--nodes", "--ranks", "--steps", "--timeout", "--batch", "--calibrate", "--mode"),
    },
    "fcdp-plan compare": {*HELP, *CLUSTER, *SCHEDULE, "--over", "--json", "--svg", "--html"},
    "fcdp-plan search": {*HELP, *CLUSTER, *SCHEDULE, "--device-budget", "--batches", "--json", "-o", "--output"},
    "fcdp-plan paper": {*HELP, "--json"},
    "fcdp-lab": {
        "-h",
        "--help",
        "--version",
        "--nodes",
        "--ranks",
        "--rate",
        "--delay",
        "--device",
        "--device-memory",
        "--gflops",
        "--gbytes",
        "--modes",
        "--mode",
        "--env",
        "--repeat",
        "--warmup",
        "--timeout",
        "--grace",
        "--json",
        "--svg",
        "--logs",
        "--require-equal",
        "--python",
        "--launcher",
    },
}
WRONG = {
    "fcdp-memtrace": [
        ([], "required: COMMAND"),
        (["watch"], "invalid choice: 'watch'"),
        (["report"], "required: FILE"),
        (["top", "--pid", "mine"], "'mine' is no whole number"),
        (["top", "--interval", "often"], "invalid float value: 'often'"),
        (["report", "--bogus", "x"], "unrecognized arguments: --bogus"),
        (["record", "--", "true"], "required: -o/--output"),
        (["record", "-o", "x"], "give a command behind --"),
        (["record", "-o", "x", "--pid", "me"], "'me' is no whole number"),
        (["plot", "x", "-o", "x.pdf"], "must end with .svg or .png"),
        (["check", "x", "--max-peak", "much"], "--max-peak: much: expected bytes, such as 512M, 1.5GiB or 8GB"),
        (["diff", "x"], "required: B"),
        (["serve", "--port", "http"], "invalid int value: 'http'"),
    ],
    "fcdp-plan": [
        ([], "required: COMMAND"),
        (["buy"], "invalid choice: 'buy'"),
        (["batch", "--nodes", "0"], "'0' is no whole number that is 1 or larger"),
        (["batch", "--dtype", "int8"], "invalid choice: 'int8'"),
        (["compare"], "required: PROFILE"),
        (["compare", "x", "--speed", "0"], "'0' is no number of times that is 0.001 or larger"),
        (["profile", "--steps", "3", "--", "train.py"], "'3' is no whole number that is 5 or larger"),
        (["profile", "--dtype", "int8"], "invalid choice: 'int8'"),
        (["compare", "x", "--over", "time"], "invalid choice: 'time'"),
        (["search", "x", "--prefetch", "9"], "invalid choice: 9"),
        (["search", "x", "--device-budget", "much"], "much: expected bytes"),
        (["compare", "x", "--jitter", "-1"], "'-1' is no number of percent"),
    ],
    "fcdp-doctor": [
        (["--optoins"], "unrecognized arguments: --optoins"),
        (["now.py"], "no such script: now.py"),
        (["torchrun", "train.py"], "give the script itself, without torchrun"),
        (["--nodes", "0", "train.py"], "must be 1 to 64, not 0 and 2"),
        (["--steps", "0", "train.py"], "--steps must be at least 1"),
        (["--steps", "two", "train.py"], "invalid int value: 'two'"),
        (["--timeout", "soon", "train.py"], "invalid float value: 'soon'"),
        (["--json"], "--json needs a script, the id of a process or --cache"),
        (["--clear"], "--clear needs --cache"),
        (["--link", "25gbit"], "--link needs a script or the id of a process"),
        (["--gpus", "0"], "--gpus must be at least 1"),
        (["--cache=/tmp", "4711"], "--cache looks at no script and no process: 4711"),
        (["--options=yes"], "ignored explicit argument 'yes'"),
    ],
    "fcdp-lab": [
        ([], "no script given"),
        (["--bogus"], "unrecognized arguments: --bogus"),
        (["train.py"], "put -- before the script"),
        (["--nodes", "two", "--", "train.py"], "argument --nodes: invalid int value: 'two'"),
        (["--launcher", "slurm", "--", "train.py"], "argument --launcher: invalid choice: 'slurm'"),
        (["--", "no/such/script.py"], "no such script: no/such/script.py"),
    ],
}


def test_every_command_has_tests():
    assert set(commands()) == {name.split()[0] for name in OPTIONS} == WRONG.keys()
    installed = {
        entry.name for entry in importlib.metadata.distribution("fcdp").entry_points if entry.group == "console_scripts"
    }
    assert installed == set(commands()), "the wheel that is installed is not of this tree"


@pytest.mark.parametrize("name", WRONG)
def test_every_command_says_its_version(name):
    done = command(name, "--version")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"{name} {importlib.metadata.version('fcdp')}\n"


def test_the_version_that_is_asked_of_a_script_is_the_script_s(tmp_path):
    """Where a script follows, the option is the script's. What its ranks said is kept, as it fails."""
    script = tmp_path / "script.py"
    script.write_text("import sys\nsys.exit(sys.argv[1:] == ['--version'] and 'of the script')\n")
    done = command("fcdp-doctor", "--ranks", "1", script, "--version", TMPDIR=str(tmp_path))
    assert "of the script" in done.stdout + done.stderr, done.stderr


@pytest.mark.parametrize("script", sorted(ROOT.glob("tools/*.sh")), ids=lambda path: path.name)
def test_every_script_says_the_version_of_its_checkout(script, tmp_path):
    """And sets nothing up for that."""
    done = run(script, "--version", cwd=tmp_path)
    version = re.search(r'^version = "(.*?)"', (ROOT / "pyproject.toml").read_text(), re.M)[1]
    assert (done.returncode, done.stdout, done.stderr) == (0, f"tools/{script.name} {version}\n", "")
    assert "--version" in run(script, "--help").stdout


@pytest.mark.parametrize("name", OPTIONS)
def test_help_names_the_options_that_are_tested(name):
    done = command(*name.split(), "--help")
    assert done.returncode == 0 and done.stdout.startswith(f"usage: {name}") and not done.stderr, done.stderr
    text = done.stdout.split("\noptions:\n")[1].split("\n\n")[0]
    listed = re.findall(r"^  (-[^ ].*)", text, re.M)
    assert {
        option for line in listed for option in re.findall(r"(?<![\w-])--?[a-z][\w-]*", line.split("  ")[0])
    } == OPTIONS[name]
    subcommands = {f"{name} {found}" for found in re.findall(r"^    (\w+) ", done.stdout.split("\noptions:")[0], re.M)}
    if " " not in name:
        assert subcommands == {other for other in OPTIONS if other.startswith(f"{name} ")}, "no test runs a subcommand"


@pytest.mark.parametrize(("name", "arguments", "said"), [(n, a, s) for n, cases in WRONG.items() for a, s in cases])
def test_bad_arguments_are_named(name, arguments, said):
    done = command(name, *arguments)
    assert done.returncode == 2, done.stderr
    assert said in done.stderr and name in done.stderr and "Traceback" not in done.stderr, done.stderr


@pytest.mark.parametrize("arguments", DOCTOR, ids=lambda a: " ".join(a) or "none")
@pytest.mark.parametrize("settings", [{}, {"FCDP": "1"}], ids=["FCDP unset", "FCDP=1"])
def test_the_doctor(arguments, settings):
    status, words = DOCTOR[arguments]
    done = command("fcdp-doctor", *arguments, **settings)
    assert done.returncode == status and not done.stderr, done.stdout + done.stderr
    assert all(word in done.stdout for word in words), done.stdout


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"FCDP_TAU": "9"}, "FCDP_TAU=9"),
        ({"FCDP_TAUU": "1"}, "FCDP_TAU?"),
        ({"FCDP_DRIVER": "cuda", "CUDA_VISIBLE_DEVICES": ""}, "cuda"),
        ({"FCDP_HOST_BUDGET": "99999G"}, "host memory     host tier: cannot reserve 429 TB of addresses"),
        ({"FCDP_LOCAL_SIZE": "3", "LOCAL_WORLD_SIZE": "2"}, "FCDP_LOCAL_SIZE=3 does not divide the node's 2 ranks (LO"),
        ({"LOCAL_WORLD_SIZE": "two"}, "ranks per node  LOCAL_WORLD_SIZE=two does not say"),
    ],
)
def test_the_doctor_says_what_is_wrong(settings, said):
    done = command("fcdp-doctor", **settings)
    assert done.returncode == 1 and not done.stderr, done.stderr
    assert said in done.stdout and "would leave jobs here to plain FSDP2, or stop them" in done.stdout, done.stdout


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"FCDP_HOST_BUDGET": "3G"}, "host memory     3.22 GB for parameters: FCDP_HOST_BUDGET; "),
        ({"LOCAL_WORLD_SIZE": "8", "SLURM_NTASKS_PER_NODE": "1"}, "ranks per node  8 (LOCAL_WORLD_SIZE)"),
        ({"SLURM_STEP_TASKS_PER_NODE": "4(x2)"}, "ranks per node  4 (SLURM_STEP_TASKS_PER_NODE; torchrun's own"),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "8", "FCDP_LOCAL_SIZE": "4"}, "ranks per node  4 (FCDP_LOCAL_SIZE)"),
        ({}, "ranks per node  torchrun, mpirun or srun will say; with another launcher, set FCDP_LOCAL_SIZE\n"),
        (
            {"FCDP_DRIVER": "sim"},
            "device          no CUDA device answers, so FCDP simulates one for models on the CPU; ",
        ),
        ({"FCDP_HOST_COPIES": "numa"}, ", with a copy in each that has ranks, unless these restore by slice"),
        (
            {"FCDP_HOST_MAP": "x", "FCDP_DRIVER": "sim"},
            "mapped memory   none, so FCDP_HOST_MAP has no effect: models on",
        ),
    ],
)
def test_the_doctor_says_what_a_job_would_find(settings, said):
    done = command("fcdp-doctor", **settings)
    assert done.returncode == 0 and said in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("group", "files"),
    [
        ("0::/job", {"job/memory.max": 2**30, "job/memory.current": 0}),
        ("4:memory:/job", {"memory/job/memory.limit_in_bytes": 2**30, "memory/job/memory.usage_in_bytes": 0}),
    ],
    ids=["v2", "v1"],
)
def test_the_doctor_goes_by_the_limit_of_the_cgroup(tmp_path, group, files):
    """Read from a made-up /proc and /sys."""
    made_up = {f"sys/fs/cgroup/{name}": f"{value}\n" for name, value in files.items()}
    made_up["proc/self/cgroup"] = f"{group}\n"
    made_up["proc/meminfo"] = "MemTotal: 16777216 kB\nMemAvailable: 8388608 kB\n"
    for name, text in made_up.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    code = "import sys; from fcdp import _fcdp; from fcdp_doctor import machine; _fcdp.options_load(); "
    done = run(sys.executable, "-c", f"{code}print(*machine.memory(sys.argv[1]))", tmp_path)
    assert re.match(
        r"940 MB for parameters: 7/8 of what the cgroup's limit of 1\.07 GB leaves \(.*\).* True$", done.stdout
    ), done.stdout + done.stderr


@pytest.mark.parametrize(
    ("nodes", "settings", "said"),
    [
        (([4096], "all"), {}, "NUMA node 1 of 2; threads stay on CPUs "),  # not all of the machine's
        (([], "all"), {}, "which are on node 1\n"),
        (("first", "others"), {}, "NUMA node 1 of 2; threads are bound to its CPUs "),
        (("first", "others"), {"FCDP_PIN_CPU": "off"}, "NUMA node 1 of 2; FCDP_PIN_CPU=off: threads run on "),
        (("first", "others"), {"FCDP_DRIVER": "sim"}, "2 NUMA nodes; the model computes on CPUs: nothing is bound\n"),
    ],
    ids=["narrower", "all there", "bound", "off", "on CPUs"],
)
def test_the_doctor_says_where_threads_would_run(tmp_path, nodes, settings, said):
    """On a machine with two NUMA nodes, which FCDP_SIM_ROOT describes."""
    cpus = sorted(os.sched_getaffinity(0))
    if len(cpus) < 2 and "others" in nodes:
        pytest.skip("needs 2 CPUs")
    named = {"all": cpus, "first": cpus[:1], "others": cpus[1:]}
    root = describe(tmp_path, *(named[node] if isinstance(node, str) else node for node in nodes))
    here = {"CUDA_VISIBLE_DEVICES": "", "FCDP_SIM_ROOT": str(root), "FCDP_SIM_NUMA": "1"}
    done = command("fcdp-doctor", **here | settings)
    assert done.returncode == 0 and said in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("always within_size advise [never] deny force\n", "none for shared memory: .* is never; with advise"),
        (
            "always within_size [advise] never deny force\n",
            "for shared memory, where it has room for them: .* is advise",
        ),
        (None, "this kernel has none for shared memory"),
    ],
    ids=["never", "advise", "no such file"],
)
def test_the_doctor_says_whether_there_are_huge_pages(tmp_path, text, said):
    if text:
        path = tmp_path / "sys/kernel/mm/transparent_hugepage/shmem_enabled"
        path.parent.mkdir(parents=True)
        path.write_text(text)
    code = "import sys; from fcdp_doctor import machine; print(machine.huge_pages(sys.argv[1]))"
    done = run(sys.executable, "-c", code, tmp_path)
    assert re.match(said, done.stdout), done.stdout + done.stderr


@pytest.mark.slow
def test_the_lab_with_every_option(tmp_path):
    options, job = tiny_job(tmp_path)
    more = [
        "--delay",
        "0ms",
        "--device",
        "cpu",
        "--mode",
        "mine: X=1 -- --flag",
        "--env",
        "A=B",
        "--repeat",
        "1",
        "--warmup",
        "1",
        "--timeout",
        "200",
        "--grace",
        "1",
        "--json",
        tmp_path / "out.json",
        "--logs",
        tmp_path / "logs",
        "--python",
        sys.executable,
    ]
    done = command("fcdp-lab", *options, *more, *job)
    if "namespace" in done.stderr:
        pytest.skip(done.stderr.strip().splitlines()[-1])
    assert done.returncode == 0, done.stderr
    given = {str(part) for part in [*options, *more]}
    of_the_device = {"--device-memory", "--gflops", "--gbytes"}
    assert OPTIONS["fcdp-lab"] - given == {*HELP, "--version", "--svg", "--require-equal", *of_the_device}
    assert [mode["name"] for mode in json.loads((tmp_path / "out.json").read_text())["modes"]] == ["fsdp", "mine"]
    assert any((tmp_path / "logs").iterdir())


@pytest.mark.slow
@pytest.mark.parametrize(
    "script", ["import fcdp\n", "import torch\nimport fcdp\n"], ids=["without torch", "with torch"]
)
def test_the_lab_runs_a_script_that_imports_fcdp_and_uses_none(tmp_path, script):
    options, job = tiny_job(tmp_path)
    pathlib.Path(job[-1]).write_text(script)
    done = command("fcdp-lab", *options, *job)
    if "namespace" in done.stderr:
        pytest.skip(done.stderr.strip().splitlines()[-1])
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr


@pytest.mark.slow
def test_require_equal_asks_for_equal_training(tmp_path):
    options, job = tiny_job(tmp_path)
    done = command("fcdp-lab", *options, "--mode", "again: X=1", "--require-equal", *job)
    if "namespace" in done.stderr:
        pytest.skip(done.stderr.strip().splitlines()[-1])
    assert done.returncode == 1 and "mode fsdp did not train as fsdp" in done.stderr, done.stderr


# ---- fcdp-memtrace ----


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    """Of a small FSDP2 job under FCDP, recorded."""
    folder = tmp_path_factory.mktemp("memtrace")
    (folder / "train.py").write_text(TRAIN)
    path = folder / "run.trace"
    torchrun = "--nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint 127.0.0.1:0 --local-addr 127.0.0.1".split()
    job = [sys.executable, "-m", "torch.distributed.run", *torchrun, folder / "train.py"]
    done = command("fcdp-memtrace", "record", "-o", path, "--", *job, FCDP="1", FCDP_LOCAL_SIZE="1")
    assert done.returncode == 0 and "2 processes" in done.stderr, done.stderr
    return path


def memtrace_runs(trace, folder):
    """Of each subcommand that reads a file: arguments, and what they must show."""
    out = folder / "out"
    profile = folder / "profile.json"
    profile.write_text('{"traceEvents": []}')
    return {
        "report": [
            ([trace], "rank 1"),
            ([trace, "--steps", "1", "--regions", "1"], "rank 0"),
            ([trace, "--json"], "{"),
            ([trace, "--html", f"{out}.html"], ""),
        ],
        "diff": [([trace, trace], "a step took"), ([trace, trace, "--json", "--skip-steps", "0"], "{")],
        "export": [([trace, "--chrome", "-o", out], ""), ([trace, "--output", out, "--beside", profile], "")],
        "plot": [
            ([trace, "-o", f"{out}.png"], ""),
            ([trace, "--output", f"{out}.svg", "--rank", "1", "--width", "9"], ""),
        ],
        "check": [
            ([trace], "no violation"),
            ([trace, *"--max-stall 1e6 --max-peak 1T --max-inter 1TiB --skip-steps 1 --json".split()], "{"),
        ],
    }


@pytest.mark.slow
def test_memtrace_on_a_recorded_job(trace, tmp_path):
    for subcommand, runs in memtrace_runs(trace, tmp_path).items():
        for arguments, said in runs:
            done = command("fcdp-memtrace", subcommand, *arguments)
            assert done.returncode == 0 and said in done.stdout, (subcommand, arguments, done.stdout, done.stderr)
        given = {str(part) for arguments, _ in runs for part in arguments}
        assert OPTIONS[f"fcdp-memtrace {subcommand}"] - HELP <= given, subcommand


# ---- fcdp-plan ----

GPT = "--layers 40 --hidden 4800 --heads 40 --vocab 50257"


def plan_runs(folder, trace):
    """Of each subcommand: arguments, and what they must show. tests/plan/test_plan.py looks at the figures."""
    profile, config, out = folder / "gpt.json", folder / "config.json", folder / "out"
    config.write_text(json.dumps({"n_layer": 2, "n_embd": 64, "n_head": 4, "vocab_size": 100, "model_type": "gpt2"}))
    shape = f"{GPT} --untied --sequence 256 --lora-rank 4 --recompute --scores --dtype float32"
    cluster = (
        "--cluster h100 --nodes 4 --gpus 4 --link 25gbit --latency 80us --gpu-memory 80GB --host-memory 1TB "
        "--pcie 50gbyte --node-link 300gbyte --disk 5gbyte --teraflops 300 --trees --speed 2 --shaped"
    )
    schedule = "--prefetch 2 --micro-batches 2 --jitter 1 --transport gloo --no-overlap --differences 0.5 --on-cpus"
    return {
        "batch": [
            (f"{GPT} --cluster a40 --nodes 2 --json", '{"ZeRO-3": 256, "ZeRO++": 128, "FCDP": 256}\n'),
            (f"{shape} {cluster}", "16 GPUs"),
            (f"--config {config}", "FSDP2"),
        ],
        "describe": [
            (f"{GPT} --batch 8 -o {profile}", ""),
            (f"{shape} --output {out}", ""),
            (f"--config {config}", '"embedding"'),
            ("--schema", "json-schema.org"),
        ],
        "profile": [
            (f"--trace {trace} -o {out}", ""),
            (f"--trace {trace} --output {out} --dtype float32", ""),
        ],
        "compare": [
            (f"{profile} {cluster} {schedule} --over batch", "FCDP device"),
            (f"{profile} --json", '"FSDP2"'),
        ],
        "search": [
            (f"{profile} {cluster} {schedule} --device-budget 4GB -o {folder / 'plan.json'}", "FCDP_PLAN="),
            (f"{profile} --batches --json --output {out}", '"tiers"'),
        ],
        "paper": [("", "of 64 cells agree"), ("--json", "[")],
    }


@pytest.mark.slow  # 22 commands
def test_the_planner_with_every_option(trace, tmp_path):
    runs = plan_runs(tmp_path, trace)
    assert {f"fcdp-plan {name}" for name in runs} == {name for name in OPTIONS if name.startswith("fcdp-plan ")}
    for subcommand, cases in runs.items():
        for arguments, said in cases:
            done = command("fcdp-plan", subcommand, *arguments.split())
            assert done.returncode == 0 and said in done.stdout, (subcommand, arguments, done.stdout, done.stderr)
        given = {word for arguments, _ in cases for word in arguments.split()}
        elsewhere = {"--svg", "--html"}  # by a snippet of docs/plan.md
        if subcommand == "profile":  # by tests/plan/test_profile.py, of a job
            elsewhere |= {"--nodes", "--ranks", "--steps", "--timeout", "--batch", "--calibrate", "--mode"}
        assert OPTIONS[f"fcdp-plan {subcommand}"] - HELP - elsewhere <= given, subcommand


# ---- the documents ----


def shows_its_help(folder, line):
    """What the script does takes minutes; that it can be read, and knows its options, is seen from its help."""
    script, *arguments = line.split()
    done = run("bash", ROOT / script, *arguments, "--help")
    assert done.returncode == 0 and done.stdout.startswith(script), done.stderr


def refuses_what_it_does_not_know(folder, line):
    shows_its_help(folder, line)
    done = run("bash", ROOT / line, "--bogus")
    assert done.returncode == 2 and done.stderr.startswith(line), done.stderr


def makes_the_wheel_alone(folder, line):
    """The wheel takes minutes and 100 MB; .github/workflows/wheel.yml makes it with this line. On a machine that has
    nothing, what make would do says what is installed."""
    refuses_what_it_does_not_know(folder, line.split()[0])
    make = ("make", "-f", "tools/Makefile", "--dry-run", "--always-make", "BASE_TORCH=")
    would = {what: run(*make, what, cwd=ROOT) for what in ("wheel", "demo", "all")}
    assert not any(done.returncode for done in would.values()), would
    installs = {what: set(re.findall(r"-r tools/requirements/(\w+)\.txt", done.stdout)) for what, done in would.items()}
    assert installs == {
        "wheel": {"build", "wheel"},
        "demo": {"build", "demo", "torch"},  # what the demo waits for before its first rank starts
        "all": {"build", "wheel", "torch", "test", "lint", "frameworks"},
    }
    assert [" wheel . --no-deps" in would[what].stdout for what in would] == [True, False, True]
    assert [" install --progress-bar off --no-compile . " in would[what].stdout for what in would] == [
        False,
        True,
        False,
    ]
    if not list((ROOT / "dist").glob(f"fcdp-*_{platform.machine()}.whl")):
        pytest.skip("no wheel in dist/ (tools/setup.sh builds it)")
    told = run("bash", "-c", "source tools/setup.sh && how_to_install", cwd=ROOT).stdout
    assert os.path.exists(re.search(r"^  pip install (\S+\.whl)$", told, re.M)[1])


def installs_the_wheel(folder, line):
    """In a new virtual environment that has a torch, by its metadata."""
    wheels = list((ROOT / "dist").glob(f"fcdp-*_{platform.machine()}.whl"))
    if not wheels:
        pytest.skip("no wheel in dist/ (tools/setup.sh builds it)")
    (folder / "dist").mkdir()
    shutil.copy(wheels[0], folder / "dist")
    venv.create(folder / "inner", with_pip=False)
    inner = folder / "inner" / "bin" / "python"
    site = pathlib.Path(run(inner, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").stdout.strip())
    (site / "torch-2.6.0.dist-info").mkdir()
    (site / "torch-2.6.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.6.0\n")
    for name, words in (("pip", ""), ("python", "shift 2; ")):  # python: -m pip
        (folder / name).write_text(f'#!/bin/sh\n{words}exec {sys.executable} -m pip --python {inner} "$@" --no-index\n')
        (folder / name).chmod(0o755)
    done = run("bash", "-c", line, cwd=folder, PATH=f"{folder}{os.pathsep}{os.environ['PATH']}")
    assert done.returncode == 0, done.stdout + done.stderr
    loaded = run(inner, "-c", "import fcdp._fcdp; print(fcdp._fcdp.__file__)", cwd=folder)
    assert loaded.stdout.startswith(str(site)), loaded.stderr


def trains(folder, line):
    """With a train.py beside it, on two ranks that stand for two nodes."""
    (folder / "train.py").write_text(TRAIN)
    torchrun = folder / "torchrun"
    options = "--nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint 127.0.0.1:0 --local-addr 127.0.0.1"
    torchrun.write_text(f'#!/bin/sh\nexec {sys.executable} -m torch.distributed.run {options} "$@"\n')
    torchrun.chmod(0o755)
    path = f"{folder}{os.pathsep}{environment()['PATH']}"
    done = run("bash", "-c", line, cwd=folder, PATH=path, FCDP_LOCAL_SIZE="1")
    assert done.returncode == 0, done.stderr
    said = [text for text in done.stderr.splitlines() if text.startswith("fcdp:")]
    shown = next(text for language, text in snippets() if not language and text.startswith("fcdp: serving"))
    assert [shape(text) for text in said] == [shape(text) for text in shown.splitlines()]


def shape(line):
    """A line without its figures."""
    return re.sub(r"[\d.]+( [KMG]?B)?", "#", line)


def is_a_preset(folder, line):
    """Building takes a minute, and tools/test.sh builds the same preset."""
    step = (
        "workflow" if "--workflow" in line else {"cmake --build": "build", "ctest": "test"}[line.split(" --preset")[0]]
    )
    presets = json.loads((ROOT / "CMakePresets.json").read_text())[f"{step}Presets"]
    assert re.search(r"--preset (\w+)", line)[1] in {preset["name"] for preset in presets}


def selects_tests(folder, line):
    is_a_preset(folder, line)
    if not (ROOT / "build" / "dev" / "CTestTestfile.cmake").exists():
        pytest.skip("build/dev is not configured (cmake --preset dev)")
    done = run(*line.split(), "-N", cwd=ROOT)
    assert done.returncode == 0 and not done.stdout.endswith("Total Tests: 0\n"), done.stdout + done.stderr


def in_this_python(*more):
    """The line's .venv/bin/python is this interpreter; `more` keeps it from doing what takes long or writes."""

    def check(folder, line):
        done = run(sys.executable, *line.split()[1:], *more, cwd=ROOT)
        if "No module named pre_commit" in done.stderr:
            pytest.skip("pre-commit is not installed (tools/setup.sh)")
        assert done.returncode == 0, done.stdout + done.stderr

    return check


def is_not_tried(folder, line):
    """What makes the clone and the .venv in which this runs; or it writes a file that another test compares."""


def records(folder, line):
    """With a job in train.py's place that ends at once."""
    (folder / "train.py").write_text("print('trained')\n")
    job = line.replace("torchrun", sys.executable)
    done = run("bash", "-c", job, cwd=folder)
    assert done.returncode == 0 and "trained" in done.stdout and "no process with a trace" in done.stderr, done.stderr


def wants_a_terminal(folder, line):
    """tests/memtrace/test_top.py gives it one."""
    done = run(*line.split())
    assert done.returncode == 1 and "needs a terminal; --json prints what it shows" in done.stderr, done.stderr


def names_the_file(folder, line):
    """test_memtrace_on_a_recorded_job runs the subcommand on a file that is there."""
    done = run(*line.split(), cwd=folder)
    assert done.returncode == 1 and "cannot open run.trace" in done.stderr, done.stderr


def serves(folder, line):
    """tests/memtrace/test_serve.py reads what it serves; its port may be another's here."""
    with started(line.split(), environment(), stderr=subprocess.PIPE) as process:
        said = process.stderr.readline()
    assert "serving http://127.0.0.1:9464/metrics" in said or "cannot listen on 127.0.0.1:9464" in said, said


def is_for_bpftrace(folder, line):
    """As it stands, but without its end: what it would do is checked, and (tests/memtrace/test_usdt.py) done."""
    if not shutil.which("bpftrace") or os.geteuid() != 0:
        pytest.skip("bpftrace is not installed here, or this is not root")
    so = next(line for line in shell_lines() if line.startswith("so=$("))
    done = run("bash", "-c", f"{so}\n{line.replace('bpftrace -e', 'bpftrace -d -e')}")
    assert done.returncode == 0 and "fcdp:event" in done.stdout + done.stderr + line, done.stdout + done.stderr


def trains_an_example(folder, line):
    """On two ranks that stand for one node; tests/frameworks trains the examples on four."""
    torchrun = "-m torch.distributed.run --rdzv-backend c10d --rdzv-endpoint 127.0.0.1:0 --local-addr 127.0.0.1"
    words = line.replace("torchrun", torchrun).replace("examples/", f"{ROOT}/examples/").split()
    done = run(sys.executable, *words, cwd=folder)
    assert done.returncode == 0 and done.stdout.startswith("loss "), done.stdout + done.stderr


def is_shown_to_the_lab(folder, line):
    """What it runs takes a minute; that its options can be read is seen from what it says of a job that is not there."""
    words = [word.replace("examples/", "nowhere/") for word in line.split()]
    done = command(*words)
    assert done.returncode == 2 and "no such script: nowhere/" in done.stderr, done.stderr


def is_shown_to_the_planner(folder, line):
    """tests/plan/test_profile.py measures a job; that these options can be read is seen from what is said of a file that is
    not there."""
    done = run(*line.split(), cwd=folder)
    assert done.returncode == 1 and re.search("no such script: train.py|job.json: No such file", done.stderr), (
        done.stderr
    )


def plans(folder, line):
    """Behind the line that describes the model."""
    describes = next(line for line in shell_lines() if line.startswith("fcdp-plan describe"))
    for each in dict.fromkeys([describes, line]):
        done = run("bash", "-c", each, cwd=folder)
        assert done.returncode == 0 and not done.stderr, done.stderr


def plans_a_split(folder, line):
    """Behind the line that describes a model with a large head; what is printed is what docs/plan.md shows."""
    describes = next(line for line in shell_lines() if "--untied" in line)
    for each in (describes, line):
        done = run("bash", "-c", each, cwd=folder)
        assert done.returncode == 0 and not done.stderr, done.stderr
    shown = re.findall(r"^    (in parts: .*)\n        (for .*)\n", (ROOT / "docs" / "plan.md").read_text(), re.M)
    assert len(shown) == 1 and "  {}\n      {}\n".format(*shown[0]) in done.stdout, done.stdout


SHELL = {
    "fcdp-plan batch --layers 40 --hidden 4800 --heads 40 --vocab 50257 --cluster a40 --nodes 2": plans,
    "fcdp-plan describe --layers 40 --hidden 4800 --heads 40 --batch 8 -o gpt.json": plans,
    "fcdp-plan compare gpt.json --link 25gbit --gpus 8 --nodes 2": plans,
    "fcdp-plan compare gpt.json --link 25gbit --over nodes": plans,
    "fcdp-plan compare gpt.json --link 25gbit --svg modes.svg --html modes.html": plans,
    "fcdp-plan search gpt.json --link 25gbit": plans,
    "fcdp-plan describe --layers 4 --hidden 4096 --heads 32 --vocab 250000 --untied -o large.json": plans,
    "fcdp-plan search large.json --link 100gbit --gpu-memory 7GB": plans_a_split,
    "fcdp-plan search gpt.json --link 25gbit -o plan.json": plans,
    "fcdp-plan profile -o job.json -- train.py --steps 20": is_shown_to_the_planner,
    "fcdp-plan compare job.json --cluster measured --on-cpus --link 1gbit": is_shown_to_the_planner,
    "fcdp-plan compare job.json --link 25gbit --gpus 8 --speed 10": is_shown_to_the_planner,
    "fcdp-plan paper": plans,
    "fcdp-memtrace serve": serves,
    "so=$(python -c 'from fcdp import _fcdp; print(_fcdp.__file__)')": is_not_tried,
    'bpftrace -l "usdt:$so:fcdp:*"': is_for_bpftrace,
    'bpftrace -e "usdt:$so:fcdp:event { @events[arg0] = count(); @bytes[arg0] = sum(arg2); }"': is_for_bpftrace,
    'bpftrace -e "usdt:$so:fcdp:event /arg0 == 70/ { @stall_us[pid] = hist(arg3 / 1000); }"': is_for_bpftrace,
    'bpftrace -e "usdt:$so:fcdp:event /arg0 == 37/ { time(); printf(\\"%d evicted %d bytes\\n\\", pid, arg2); }"': is_for_bpftrace,
    "torchrun --nproc-per-node 2 examples/fsdp2.py": trains_an_example,
    "fcdp-lab --rate 100mbit -- examples/fsdp2.py": is_shown_to_the_lab,
    "tools/test.sh --frameworks": shows_its_help,
    "fcdp-memtrace top": wants_a_terminal,
    "fcdp-memtrace record -o run.trace -- torchrun train.py": records,
    "fcdp-memtrace report run.trace": names_the_file,
    "fcdp-memtrace diff run.trace other.trace": names_the_file,
    "fcdp-memtrace check run.trace --max-stall 20 --skip-steps 2": names_the_file,
    "fcdp-memtrace plot run.trace -o run.svg": names_the_file,
    "fcdp-memtrace export --chrome run.trace -o run.json --beside profile.json": names_the_file,
    "tools/demo.sh": shows_its_help,
    "tools/gpu.sh --bundle": shows_its_help,
    "tools/gpu.sh": shows_its_help,
    "tools/setup.sh": refuses_what_it_does_not_know,
    "tools/setup.sh wheel": makes_the_wheel_alone,
    "pip install --no-deps dist/fcdp-*.whl": installs_the_wheel,
    "tools/test.sh": refuses_what_it_does_not_know,
    "FCDP=1 FCDP_ALLOC=native torchrun train.py": trains,
    "FCDP=1 torchrun train.py": trains,
    "git clone REPOSITORY fcdp": is_not_tried,
    "cd fcdp": is_not_tried,
    "source .venv/bin/activate": is_not_tried,
    "cmake --workflow --preset dev": is_a_preset,
    "cmake --build --preset dev": is_a_preset,
    "ctest --preset dev -R base_options": selects_tests,
    ".venv/bin/python -m pytest tests/test_readme.py": in_this_python("--collect-only"),
    ".venv/bin/python tests/test_readme.py": is_not_tried,
    ".venv/bin/python -m pre_commit install": in_this_python("--help"),
    ".venv/bin/python -m pre_commit run --all-files": in_this_python("--help"),
}
SHOWN = {"fcdp: serving": "trains"}  # output, by its beginning: the test that compares it


def shell_lines():
    blocks = [text for language, text in snippets() if language in ("sh", "bash", "shell", "console")]
    lines = [line.split("  #")[0] for text in blocks for line in text.splitlines()]
    return list(dict.fromkeys(part.strip() for line in lines for part in line.split("&&") if part.strip()))


def test_every_snippet_is_of_a_kind_that_is_run():
    for language, text in snippets():
        assert language in ("sh", "python") or any(text.startswith(begin) for begin in SHOWN), (
            f"no test looks at: {text}"
        )
    assert len(snippets()) >= 4


@pytest.mark.slow
@pytest.mark.parametrize("line", shell_lines())
def test_a_shell_snippet_of_the_documents(tmp_path, line):
    assert line in SHELL, f"a document tells users to run {line!r}, and no test does"
    SHELL[line](tmp_path, line)


# A job of several ranks, by its beginning: tests/torch_plugin/test_changed.py runs it.
OF_RANKS = "# train.py"


@pytest.mark.slow
@pytest.mark.parametrize(
    "text", [text for language, text in snippets() if language == "python" and not text.startswith(OF_RANKS)]
)
def test_a_python_snippet_of_the_documents(tmp_path, text):
    """As it stands, as a script. A torch without CUDA says that it cannot; with it, tensors are FCDP's from
    there on, GPU or none."""
    (tmp_path / "snippet.py").write_text(text)
    (tmp_path / "then.py").write_text(text + "print(torch._C._cuda_getAllocatorBackend(), fcdp.memory_allocated())\n")
    done = run(sys.executable, tmp_path / "snippet.py", cwd=tmp_path)
    if "fcdp_alloc" not in text:
        assert done.returncode == 0 and not done.stderr, done.stderr
        return
    has_cuda = (
        run(sys.executable, "-c", "import torch; print(hasattr(torch._C, '_cuda_customAllocator'))").stdout.strip()
        == "True"
    )
    if not has_cuda:
        assert done.returncode == 1 and "this torch is built without CUDA" in done.stderr.splitlines()[-1], done.stderr
        return
    assert done.returncode == 0 and not done.stderr, done.stderr
    assert run(sys.executable, tmp_path / "then.py", cwd=tmp_path).stdout == "pluggable 0\n"
