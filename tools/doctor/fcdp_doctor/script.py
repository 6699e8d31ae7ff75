"""The groups of a script: runs it for a few steps, each rank of the emulated nodes as a process of this machine."""

from __future__ import annotations

import contextlib
import dataclasses
import glob
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Hashable, Iterator
from typing import Any

import fcdp_lab
from fcdp import _fcdp
from fcdp_doctor import Failed
from fcdp_doctor.groups import Document, Group, alike
from fcdp_lab.failure import tail
from fcdp_lab.namespaces import die_with_parent
from fcdp_lab.port import free_port

POLL_S = 0.2
GRACE_S = 5.0  # once a rank has failed, for the others to say why they fail too
TAIL_LINES = 30
STOPS = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
INJECT = os.path.join(os.path.dirname(fcdp_lab.__file__), "inject")


@dataclasses.dataclass
class Rank:
    number: int
    name: str
    process: subprocess.Popen
    log: str  # its files, without their endings

    @property
    def is_waiting(self) -> bool:
        """It has made its steps, and waits to be ended."""
        report = self.report()
        return report is not None and report["is_complete"]

    def report(self) -> dict[str, Any] | None:
        with contextlib.suppress(FileNotFoundError), open(f"{self.log}.json") as file:
            return json.load(file)
        return None

    def ended_at(self) -> float:
        """When it raised, or ran its last functions."""
        said = self.error() or self.report()
        return said["t"] if said else math.inf

    def error(self) -> dict[str, Any] | None:
        with contextlib.suppress(FileNotFoundError, ValueError), open(f"{self.log}.error") as file:
            return json.load(file)
        return None


def look(job: list[str], nodes: int, ranks_per_node: int, steps: int, timeout_s: float) -> Document:
    """No process of the job is left when this returns or raises."""
    _check_options(ranks_per_node)
    folder = tempfile.mkdtemp(prefix="fcdp-doctor-")
    keep = False
    try:
        with _ranks(job, nodes, ranks_per_node, steps, folder) as ranks, _progress():
            _wait(ranks, timeout_s)
            reports = [rank.report() for rank in ranks]
        return _document(job, nodes, ranks_per_node, reports, tail(f"{folder}/rank0.err", 1000))
    except Failed as error:
        keep = True
        raise Failed(f"{error}\noutput of every rank: {folder}") from None
    finally:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)


def _check_options(ranks_per_node: int) -> None:
    """Check what would stop each rank, or make the job differ from a run elsewhere."""
    try:
        asked = _fcdp.options_load()["local_size"]
    except _fcdp.Error as error:
        raise Failed(str(error.args[0])) from None
    if asked not in (0, ranks_per_node):
        raise Failed(
            f"FCDP_LOCAL_SIZE={asked}, but the emulated nodes have {ranks_per_node} ranks: unset it, or give --ranks {asked}"
        )


# ---- the ranks ----


def _devices() -> list[str]:
    """Of CUDA, as CUDA_VISIBLE_DEVICES names them."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return [name for name in chosen.split(",") if name]
    return [str(i) for i in range(len(glob.glob("/dev/nvidia[0-9]*")))]


def _environment(node: int, local: int, nodes: int, ranks_per_node: int) -> dict[str, str]:
    """torchrun's environment for this rank, as on a node of its own. With as many GPUs as ranks, each node has its
    own."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("TORCHELASTIC", "PET_")) and k != "FCDP_LOCAL_SIZE"}
    threads = max(1, len(os.sched_getaffinity(0)) // (nodes * ranks_per_node))
    devices = _devices()
    if len(devices) >= nodes * ranks_per_node:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(devices[node * ranks_per_node : (node + 1) * ranks_per_node])
    return {
        "OMP_NUM_THREADS": str(threads),
        "GLOO_SOCKET_IFNAME": "lo",
        "FCDP_CODEC": "none",  # what few steps send otherwise depends on how fast they ran
        **env,
        "FCDP": "1",
        "PYTHONUNBUFFERED": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, [INJECT, env.get("PYTHONPATH")])),
        "RANK": str(node * ranks_per_node + local),
        "LOCAL_RANK": str(local),
        "GROUP_RANK": str(node),
        "WORLD_SIZE": str(nodes * ranks_per_node),
        "LOCAL_WORLD_SIZE": str(ranks_per_node),
        "GROUP_WORLD_SIZE": str(nodes),
        "MASTER_ADDR": "127.0.0.1",
    }


def _in_child(mask: set[int]) -> None:
    die_with_parent()
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)


@contextlib.contextmanager
def _ranks(job: list[str], nodes: int, ranks_per_node: int, steps: int, folder: str) -> Iterator[list[Rank]]:
    """Starts the ranks, and kills them at the end with their children. No signal cuts either short."""
    own = {"MASTER_PORT": str(free_port()), "DOCTOR_FOLDER": folder, "DOCTOR_STEPS": str(steps)}
    ranks: list[Rank] = []
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD, *STOPS})
    try:
        for number in range(nodes * ranks_per_node):
            node, local = divmod(number, ranks_per_node)
            log = f"{folder}/rank{number}"
            with open(f"{log}.out", "wb") as out, open(f"{log}.err", "wb") as err:
                process = subprocess.Popen(
                    [sys.executable, *job],
                    env=_environment(node, local, nodes, ranks_per_node) | own,
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=err,
                    start_new_session=True,
                    preexec_fn=lambda: _in_child(mask),
                )
            ranks.append(Rank(number, f"rank {number} (node {node}, local rank {local})", process, log))
        signal.pthread_sigmask(signal.SIG_SETMASK, {*mask, signal.SIGCHLD})
        yield ranks
    finally:
        signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(rank.process.pid, signal.SIGKILL)
            rank.process.wait()
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


@contextlib.contextmanager
def _progress() -> Iterator[None]:
    if not sys.stderr.isatty():
        yield
        return
    try:
        from rich.console import Console
    except ImportError:
        yield
        return
    with Console(stderr=True).status("the script runs"):
        yield


def _wait(ranks: list[Rank], timeout_s: float) -> None:
    """Waits until each rank has reported or ended well. Raises Failed if one does not."""
    deadline = time.monotonic() + timeout_s
    failed_at = None
    while True:
        codes = [rank.process.poll() for rank in ranks]
        now = time.monotonic()
        if any(codes):
            failed_at = failed_at or now
            if None not in codes or now > failed_at + GRACE_S:
                raise Failed(_cause(ranks, codes))
        elif all(code == 0 or rank.is_waiting for rank, code in zip(ranks, codes)):
            return
        if now > deadline:
            last = tail(f"{ranks[0].log}.out", 1) or tail(f"{ranks[0].log}.err", 1) or "none"
            raise Failed(f"the script did not get as far in {timeout_s:g} s (--timeout); last words of rank 0: {last}")
        signal.sigtimedwait({signal.SIGCHLD}, POLL_S)


def _cause(ranks: list[Rank], codes: list[int | None]) -> str:
    """The rank that failed first, and its own message. A rank that fails makes its peers fail too; of those that were
    killed there is no time, and mostly one."""
    failed = [rank for rank, code in zip(ranks, codes) if code]
    killed = [rank for rank in failed if codes[rank.number] in (-signal.SIGKILL, -signal.SIGSEGV, -signal.SIGBUS)]
    first = min(killed or failed, key=Rank.ended_at)
    error, code = first.error(), codes[first.number] or 0
    if error and not killed:
        return f"{first.name} failed:\n{error['traceback'].rstrip()}"
    ended = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
    words = tail(f"{first.log}.err", TAIL_LINES)
    return f"{first.name} {ended}" + (f":\n{words}" if words else " and said nothing on stderr")


# ---- what they reported ----


def _per_step(before: dict[str, Any], entry: dict[str, Any], n: int) -> tuple[float, ...]:
    """(unshards, bytes by FSDP, bytes by FCDP) of a group, per step behind the first."""

    def grown(*keys: str) -> float:
        return sum(entry[key] - before.get(key, 0) for key in keys) / n

    return grown("gathers_made", "gathers_avoided"), grown("plain_bytes"), grown("gather_bytes")


def _groups(report: dict[str, Any]) -> Iterator[Group]:
    first, last, steps = report["first"], report["last"], report["steps"]
    if steps <= 1:
        first = None
    n = max(1, steps - 1 if first else steps)
    before = {entry["id"]: entry for entry in first["groups"]} if first else {}
    for entry in last["groups"]:
        per_step = _per_step(before.get(entry["id"], {}), entry, n)
        places = {"in_file": entry["in_file"], "mapped": entry["tier"] == "mapped", "on_disk": entry["on_disk"]}
        yield Group(entry["name"], None, entry["bytes"], entry["trainable_bytes"], *per_step, **places)
    for entry in last["bypassed"]:
        yield Group(entry["group"], entry["reason"], entry.get("bytes"), entry.get("trainable_bytes"))


def _measured(steps: int) -> str:
    if steps == 0:
        return "the whole run, in which no optimizer stepped"
    return "step 1" if steps == 1 else "step 2" if steps == 2 else f"the mean of steps 2 to {steps}"


def _document(job: list[str], nodes: int, ranks_per_node: int, reports: list[Any], said: str) -> Document:
    """The groups of all ranks, since a pipeline's ranks have groups of their own."""
    reports = [report for report in reports if report]
    if not reports:
        raise Failed("the script has ended, and no rank reported: was it run with -I or -E?")
    found: dict[Hashable, Group] = {}
    for report in reports:
        for at, group in alike(_groups(report), lambda group: (group.name, group.bytes)):
            found.setdefault(at, group)
    steps = min(report["steps"] for report in reports)
    told = re.compile(r"fcdp: (?!saved |cost |served |serving |FCDP=1, but )")
    return Document(
        job=" ".join(job),
        nodes=nodes,
        ranks_per_node=ranks_per_node,
        steps=steps,
        measured=_measured(steps),
        groups=list(found.values()),
        host_bytes=max(report["last"]["host_bytes"]["peak"] for report in reports if report["last"]["groups"])
        if any(report["last"]["groups"] for report in reports)
        else None,  # what was tried for groups that are not served has been given back
        notes=[line for line in said.splitlines() if told.match(line)],
    )
