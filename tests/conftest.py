"""What all Python tests share."""

import contextlib
import os
import pathlib
import signal

import pytest

HERE = pathlib.Path(__file__).resolve().parent


def interrupted(signum, frame):
    """However the tests are ended, they end what they have started; another signal would keep them from that."""
    for other in ENDS:
        signal.signal(other, signal.SIG_IGN)
    raise KeyboardInterrupt


# A shell starts what it runs in the background with SIGINT ignored, and every child inherits that. Tests interrupt theirs.
# Under nohup, SIGHUP stays ignored.
ENDS = [signal.SIGINT] + [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) != signal.SIG_IGN]
for signum in ENDS:
    signal.signal(signum, interrupted)

# All that tests start inherits this: who is woken waits for a core, and takes none from who runs. Ranks outnumber the cores, and
# a thread of gloo's that takes the core from the one that holds its lock spins until its time is up: that was a fifth of all.
with contextlib.suppress(OSError):
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))

STARTS_RANKS = (
    "torch_plugin",
    "torch_sim",
    "lab",
    "frameworks",
)  # folders whose tests start processes that import torch
# One test waits for the job of all training cases, which is ended when it stalls (torch_plugin/launch.py).
LAUNCH_S = 3600
# The files that take longest, so that none of them runs alone at the end; test_matrix.py, whose launches serve others, first.
LONGEST = [
    f"test_{name}.py"
    for name in "matrix on_sim doctor commands frameworks on_device clusters gpu_report bench probe words kills install".split()
]


def pytest_collection_modifyitems(items):
    begins = {name: i for i, name in enumerate(LONGEST)}
    items.sort(key=lambda item: begins.get(item.path.name, len(begins)))
    for item in items:
        if item.path.is_relative_to(HERE) and item.path.relative_to(HERE).parts[0] in STARTS_RANKS:
            item.add_marker(pytest.mark.slow)
        if "launches" in item.fixturenames:
            item.add_marker(pytest.mark.cases)
            if not item.get_closest_marker("timeout"):
                item.add_marker(pytest.mark.timeout(LAUNCH_S))
