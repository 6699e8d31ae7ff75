"""Prints the table of planted faults of order in sim/torch/README.md: how the simulated device finds each, and how a job
on CPU tensors does. python tests/torch_sim/faults.py"""

import os
import pathlib
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
sys.path.append(str(HERE.parent / "torch_plugin"))
import pytest

import conftest
import launch

JOB = {"FCDP": "1", "FCDP_LOCAL_SIZE": "2", "FCDP_TAU": "0", "FCDP_TRANSPORT": "torch", "FCDP_TIMEOUT": "60"}
SLICES = {"FCDP_RESTORE": "slice"}
JOBS = {  # faults_job.py's sets of faults, and the options of each
    "all": {},
    "slices": SLICES,
    "differences": SLICES | {"FCDP_CODEC": "delta", "FCDP_PREFETCH": "4"},
}


def found(which, kind):
    """By fault: the first word of the finding of any rank."""
    tmp = pathlib.Path(tempfile.mkdtemp())
    env = JOB | JOBS[which]
    if "FCDP_RESTORE" in env and kind == "sim":  # on a device slices are NCCL's
        env["FCDP_TRANSPORT"] = "nccl"
    env = conftest.with_fabric(env, tmp, 4)
    job = launch.Spawned(HERE / "faults_job.py", [which, tmp, kind], tmp, env, n_ranks=4, warm=True)
    assert job.wait(600), job.report()
    words = {}
    for rank in launch.ranks_in(tmp):
        del rank["left"]
        for name, said in rank.items():
            words.setdefault(name, []).append(said.split(":")[0])
    return {name: min(said, key=["race", "bytes", "error", "nothing"].index) for name, said in words.items()}


def main():
    print("| fault | on sim, found by | on CPU tensors |\n| --- | --- | --- |")
    for which in JOBS:
        on_sim, on_cpu = found(which, "sim"), found(which, "cpu")
        for name, how in on_sim.items():
            print(f"| {name} | {how} | {on_cpu.get(name, 'the job has ended')} |")
    sys.stdout.flush()
    os._exit(0)  # launch.py keeps a process that has imported torch


if __name__ == "__main__":
    try:
        main()
    except pytest.skip.Exception as missing:
        sys.exit(f"{missing}: cmake --preset dev && cmake --build --preset dev")
