"""The number of ranks per node, from the launcher's environment variables. Needs no torch, since fcdp-doctor uses it."""

from __future__ import annotations

import os
import re

# torchrun's, Open MPI's, MPICH's and Intel MPI's, srun's where it was told --ntasks-per-node, and srun's otherwise
# ("4(x2)": 4 on each of 2 nodes). The first that is set counts: srun may have started the launcher of the ranks.
VARIABLES = (
    "LOCAL_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "MPI_LOCALNRANKS",
    "SLURM_NTASKS_PER_NODE",
    "SLURM_STEP_TASKS_PER_NODE",
)
COUNT = r"(\d+)(?:\(x\d+\))?"


def _started_others(name: str, n_ranks: int) -> bool:
    """srun's tasks are not the ranks of this job but programs that started them, such as torch.multiprocessing.spawn."""
    tasks = os.environ.get("SLURM_STEP_NUM_TASKS", "")
    return name.startswith("SLURM") and n_ranks > 0 and tasks.isdigit() and int(tasks) != n_ranks


def ranks_per_node(n_ranks: int = 0) -> tuple[int, str]:
    """(ranks per node, the variable that says so). `n_ranks`: the job's, 0: not known. Raises ValueError if no variable
    does, with the reason and what to do."""
    set_ = [name for name in VARIABLES if os.environ.get(name)]
    name = next((name for name in set_ if not _started_others(name, n_ranks)), None)
    if name is None:
        raise ValueError("the launcher does not say how many ranks a node has (LOCAL_WORLD_SIZE); set FCDP_LOCAL_SIZE")
    text = os.environ[name].strip()
    if not re.fullmatch(f"{COUNT}(,{COUNT})*", text):
        raise ValueError(f"{name}={text} does not say how many ranks a node has; set FCDP_LOCAL_SIZE")
    counts = set(map(int, re.findall(COUNT, text)))
    if len(counts) > 1:
        raise ValueError(f"ranks per node differ ({name}={text}); FCDP needs the same number on every node")
    return counts.pop(), name
