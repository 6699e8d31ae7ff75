"""The script and the manifest of docs/clusters.md start a job that FCDP serves: they are run as they stand there, with
stand-ins for what a cluster brings, and one rank per node."""

import contextlib
import os
import pathlib
import re
import subprocess
import sys

import pytest

from fcdp_lab.port import free_port
from test_commands import ROOT, TRAIN, environment, installed, installs_the_wheel, started

__all__ = ["installed"]
TEXT = (ROOT / "docs" / "clusters.md").read_text()
SCONTROL = "#!/bin/sh\n[ \"$*\" = 'show hostnames a[1-2]' ] && printf '127.0.0.1\\nother\\n'\n"
# srun: its options, then the command, once on each node. Of CPUs it goes by what srun of Slurm 22.05 does.
SRUN = """\
#!/bin/bash
cpus=${SRUN_CPUS_PER_TASK:-1}
while [[ $1 == --* ]]; do case $1 in --cpus-per-task=*) cpus=${1#*=} ;; esac; shift; done
echo "$cpus" >cpus
pids=()
for ((node = 0; node < SLURM_NNODES; node++)); do SLURM_NODEID=$node "$@" & pids+=($!); done
for pid in "${pids[@]}"; do wait "$pid" || exit; done
"""


def block(language):
    (found,) = re.findall(rf"^```{language}\n(.*?)^```$", TEXT, re.M | re.S)
    return found


def manifest():
    yaml = pytest.importorskip("yaml", reason="needs PyYAML (tools/setup.sh brings it with pre-commit)")
    return list(yaml.safe_load_all(block("yaml")))


@pytest.fixture
def cluster(tmp_path):
    """A folder with train.py and the stand-ins, and the environment in which they are found."""
    programs = {"scontrol": SCONTROL, "srun": SRUN}
    programs["torchrun"] = f'#!/bin/sh\nexec {sys.executable} -m torch.distributed.run --local-addr 127.0.0.1 "$@"\n'
    for name, text in programs.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    (tmp_path / "train.py").write_text(TRAIN)
    slurm = {"SLURM_NNODES": "2", "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "a[1-2]", "SLURM_NTASKS_PER_NODE": "1"}
    slurm["SLURM_CPUS_PER_TASK"] = re.search(r"^#SBATCH --cpus-per-task=(\d+)", block("bash"), re.M)[1]
    path = f"{tmp_path}{os.pathsep}{environment()['PATH']}"
    return tmp_path, environment(PATH=path, **slurm)


def on_this_machine(text):
    """With one rank per node, and a port that is free."""
    port = str(free_port())
    changed = text.replace("--nproc-per-node=8", "--nproc-per-node=1").replace("29500", port)
    changed = changed.replace("train-0.train", "127.0.0.1")
    assert changed != text and port in changed
    return changed


def is_served(text):
    """By FCDP, on two nodes."""
    said = [line for line in text.splitlines() if line.startswith("fcdp:")]
    return len(said) == 3 and said[1].startswith("fcdp: saved") and "instead of" in said[1]


def run_all(text, folder, *environments):
    """The text as a script in each of them, side by side: what each has said."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with contextlib.ExitStack() as stack:
        jobs = [stack.enter_context(started(["bash", "-c", text], env, cwd=folder, **pipes)) for env in environments]
        said = [job.communicate(timeout=300)[0] for job in jobs]
    assert [job.returncode for job in jobs] == [0] * len(jobs), said
    return said


@pytest.mark.slow
def test_the_slurm_script_trains_under_fcdp(cluster):
    folder, env = cluster
    (said,) = run_all(on_this_machine(block("bash")), folder, env)
    assert is_served(said), said
    assert (folder / "cpus").read_text().strip() == env["SLURM_CPUS_PER_TASK"], (
        "torchrun has other CPUs than were asked for"
    )


@pytest.mark.slow
def test_srun_alone_says_how_many_ranks_a_node_has(cluster):
    folder, env = cluster
    env |= {"FCDP": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    line = f"srun --ntasks-per-node=1 --distribution=block bash -c 'RANK=$SLURM_NODEID exec {sys.executable} train.py'"
    (said,) = run_all(line, folder, env)
    assert is_served(said), said


@pytest.mark.slow
def test_the_manifest_s_command_trains_under_fcdp(cluster):
    folder, env = cluster
    spec = manifest()[1]["spec"]
    (container,) = spec["template"]["spec"]["containers"]
    assert container["command"] == ["bash", "-c"] and len(container["args"]) == 1
    env |= {entry["name"]: entry["value"] for entry in container["env"]}
    line = on_this_machine(container["args"][0])
    said = run_all(line, folder, *(env | {"JOB_COMPLETION_INDEX": str(k)} for k in range(spec["completions"])))
    assert [is_served(text) for text in said] == [True, False], said


def test_the_manifest_hangs_together():
    """What refers to a name refers to one that is there, and the pods are one per node."""
    service, job = manifest()
    assert (service["kind"], job["kind"]) == ("Service", "Job")
    spec = job["spec"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    assert service["spec"]["clusterIP"] == "None" and pod["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert spec["completionMode"] == "Indexed" and spec["completions"] == spec["parallelism"]
    options = dict(re.findall(r"--([\w-]+)=(\S+)", container["args"][0]))
    assert int(options["nnodes"]) == spec["completions"]
    assert options["master-addr"] == f"{job['metadata']['name']}-0.{pod['subdomain']}"
    assert int(options["nproc-per-node"]) == container["resources"]["limits"]["nvidia.com/gpu"]
    assert {m["name"] for m in container["volumeMounts"]} == {v["name"] for v in pod["volumes"]}
    (rule,) = pod["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert rule["labelSelector"]["matchLabels"] == service["spec"]["selector"]


def test_the_slurm_script_is_a_script(tmp_path):
    shellcheck = pathlib.Path(sys.executable).with_name("shellcheck")
    script = tmp_path / "train.sbatch"
    script.write_text(block("bash"))
    done = subprocess.run(["bash", "-n", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert set(re.findall(r"^#SBATCH --([\w-]+)=", script.read_text(), re.M)) >= {"nodes", "ntasks-per-node", "mem"}
    if not shellcheck.exists():
        pytest.skip("shellcheck is not installed (tools/setup.sh)")
    done = subprocess.run([shellcheck, script], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.slow
def test_the_image_has_the_wheel(tmp_path):
    """COPY and RUN as Docker carries them out, with this folder in the place of the image's root."""
    (tmp_path / "tmp").mkdir()
    _, copy, install = re.sub(r" /tmp/", f" {tmp_path}/tmp/", block("dockerfile")).splitlines()
    lines = [copy.replace("COPY", "cp"), install.removeprefix("RUN ")]
    installs_the_wheel(tmp_path, " && ".join(lines))
    assert not list((tmp_path / "tmp").iterdir()), "the wheel stays in the image"


def test_the_variables_that_the_page_names_are_read():
    from fcdp import launcher

    places = [TEXT.index(f"`{name}`") for name in launcher.VARIABLES]
    assert places == sorted(places), "another order"


@pytest.mark.parametrize(
    ("variables", "found"),  # of a job of 8 ranks
    [
        ({"LOCAL_WORLD_SIZE": "8", "SLURM_NTASKS_PER_NODE": "1"}, (8, "LOCAL_WORLD_SIZE")),
        ({"MPI_LOCALNRANKS": "4", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}, (4, "MPI_LOCALNRANKS")),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "4", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}, (4, "OMPI_COMM_WORLD_LOCAL_SIZE")),
        ({"SLURM_NTASKS_PER_NODE": "2", "SLURM_STEP_TASKS_PER_NODE": "4(x2)"}, (2, "SLURM_NTASKS_PER_NODE")),
        ({"SLURM_STEP_TASKS_PER_NODE": "4(x2)"}, (4, "SLURM_STEP_TASKS_PER_NODE")),
        ({"SLURM_STEP_TASKS_PER_NODE": "4(x2),4"}, (4, "SLURM_STEP_TASKS_PER_NODE")),
        ({"SLURM_STEP_TASKS_PER_NODE": "4(x2),3"}, "ranks per node differ"),
        ({"SLURM_STEP_TASKS_PER_NODE": "4(x2)", "SLURM_STEP_NUM_TASKS": "8"}, (4, "SLURM_STEP_TASKS_PER_NODE")),
        ({"SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_STEP_NUM_TASKS": "2"}, "the launcher does not say"),
        ({"SLURM_STEP_TASKS_PER_NODE": "many"}, "SLURM_STEP_TASKS_PER_NODE=many does not say"),
        ({}, "the launcher does not say"),
    ],
)
def test_ranks_per_node_are_what_the_launcher_says(monkeypatch, variables, found):
    from fcdp import launcher

    for name in (*launcher.VARIABLES, "SLURM_STEP_NUM_TASKS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    if isinstance(found, tuple):
        assert launcher.ranks_per_node(8) == found
    else:
        with pytest.raises(ValueError, match=found):
            launcher.ranks_per_node(8)
