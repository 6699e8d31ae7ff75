"""How many ranks a node has, as their launcher says in its environment. Needs no torch: fcdp-doctor asks, too."""

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


def ranks_per_node() -> tuple[int, str]:
    """(their number, the variable that says so). Raises ValueError where none does, with the reason and what to do."""
    name = next((name for name in VARIABLES if os.environ.get(name)), None)
    if name is None:
        raise ValueError("the launcher does not say how many ranks a node has (LOCAL_WORLD_SIZE); set FCDP_LOCAL_SIZE")
    text = os.environ[name].strip()
    if not re.fullmatch(f"{COUNT}(,{COUNT})*", text):
        raise ValueError(f"{name}={text} does not say how many ranks a node has; set FCDP_LOCAL_SIZE")
    counts = set(map(int, re.findall(COUNT, text)))
    if len(counts) > 1:
        raise ValueError(f"ranks per node differ ({name}={text}); FCDP needs the same number on every node")
    return counts.pop(), name
