"""Jobs of 4 ranks on one device, as 2 nodes x 2 ranks, plain and with FCDP, and what they came to side by side."""

from __future__ import annotations

import json
import os
import pathlib
import shlex
import signal
import statistics
import subprocess
import sys
import time
from typing import Any

from fcdp_lab.port import free_port
from section import Failed, Section, ended

WORLD = 4
JOB = pathlib.Path(__file__).resolve().parent / "job.py"
# Four processes share a device; each gets this much of it at most. Each waits while the others compile, load and
# compute on it, and a peer that has died is found without the timeout.
FCDP = {
    "FCDP": "1",
    "FCDP_TRANSPORT": "torch",
    "FCDP_DEVICE_BUDGET": "4G",
    "FCDP_TIMEOUT": "120",
    "FCDP_SUMMARY": "0",
}
# The ranks of a node meet in its host memory alone, so collectives go between nodes only. Over gloo a host function
# waits for each, and CUDA may
# run the host functions of all streams one after another: with collectives of two lanes that could be a circle of
# ranks, with one lane it is none.
ONE_LANE = FCDP | {"FCDP_ALLOC": "native", "FCDP_RESTORE": "whole"}
# Deterministic matrix products.
CUBLAS = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
# NCCL takes each rank for a machine of its own, so that it does not refuse a device that two ranks share; they meet
# over sockets.
ONE_DEVICE_NCCL = {
    "NCCL_NET": "Socket",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_IB_DISABLE": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_MNNVL_ENABLE": "0",
    "NCCL_CUMEM_ENABLE": "0",
    "NCCL_MULTI_RANK_GPU_ENABLE": "1",
    "NCCL_DEBUG": "WARN",
}


def _environment(rank: int, world: int, port: int, settings: dict[str, str], nccl: bool) -> dict[str, str]:
    own = {
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }
    hosts = ONE_DEVICE_NCCL | {"NCCL_HOSTID": f"rank-{rank}"} if nccl else {}
    return os.environ | own | CUBLAS | hosts | settings


def _end_all(processes: list[subprocess.Popen]) -> None:
    for process in processes:
        process.kill()
        process.wait()


def _wait(name: str, processes: list[subprocess.Popen], limit_s: float) -> None:
    """Until all have ended. Once one has failed, the others get a moment to say why they end too."""
    deadline, failed_at = time.monotonic() + limit_s, None
    while any(process.poll() is None for process in processes):
        now = time.monotonic()
        if failed_at is None and any(process.returncode for process in processes):
            failed_at = now
        if now > deadline or (failed_at and now > failed_at + 15):
            break
        time.sleep(0.05)
    late = [rank for rank, process in enumerate(processes) if process.poll() is None]
    for rank in late:
        processes[rank].send_signal(signal.SIGABRT)  # faulthandler says where each thread stands
    if late:
        time.sleep(1)
    codes = {rank: process.returncode for rank, process in enumerate(processes) if process.returncode}
    if late and failed_at is None:
        raise Failed(f"{name}: ranks {late} had not ended after {limit_s:.0f} s")
    if codes:
        rank, code = next(iter(codes.items()))
        raise Failed(f"{name}: rank {rank}: {ended(code)}")


def launch(
    section: Section,
    name: str,
    arguments: list[str],
    settings: dict[str, str],
    limit_s: float,
    nccl: bool = False,
    world: int = WORLD,
) -> list[dict[str, Any]]:
    """Every rank's result. Failed: with the last that a rank said."""
    folder = section.out / f"{section.name}-{name.replace(' ', '-')}"
    folder.mkdir(parents=True, exist_ok=True)
    device = "cpu" if section.simulated else "cuda"
    command = [
        sys.executable,
        str(JOB),
        "--out",
        str(folder),
        "--device",
        device,
        "--backend",
        "nccl" if nccl else "gloo",
        *arguments,
    ]
    print("$", " ".join(f"{k}={v}" for k, v in settings.items()), shlex.join(command), flush=True)
    processes, port = [], free_port()
    try:
        for rank in range(world):
            with open(folder / f"rank{rank}.log", "wb") as log:
                processes.append(
                    subprocess.Popen(
                        command,
                        env=_environment(rank, world, port, settings, nccl),
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                    )
                )
        _wait(name, processes, min(limit_s, section.left()))
    except Failed as error:
        raise Failed(f"{error}{_said(folder)}") from None
    finally:
        _end_all(processes)
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(world)]


def _said(folder: pathlib.Path) -> str:
    """The end of each rank's output goes to the section's log; the line that looks like the cause, to the report."""
    cause = ""
    for path in sorted(folder.glob("rank*.log")):
        lines = [line for line in path.read_text(errors="replace").splitlines() if line.strip()]
        print(f"--- {path.name}", *lines[-40:], sep="\n", flush=True)
        errors = [line for line in lines if "Error" in line or "fcdp:" in line]
        cause = cause or (errors[-1][:400] if errors else "")
    return f": {cause}" if cause else ""


# ---- side by side ----


def first_difference(one: list[dict], other: list[dict]) -> str:
    """ "": equal bit for bit."""
    for rank, (a, b) in enumerate(zip(one, other)):
        for step, (x, y) in enumerate(zip(a["losses"], b["losses"])):
            if x != y and not (x != x and y != y):
                return f"rank {rank}, step {step + 1}: loss {x!r} and {y!r}"
        if a["digest"] != b["digest"]:
            return f"rank {rank}: a parameter or a loss, in its bytes"
    return ""


def median(results: list[dict], key: str) -> float:
    return statistics.median(result[key] for result in results)


def times(section: Section, name: str, results: list[dict], plain: list[dict] | None) -> None:
    for key, what in (
        ("step_median_s", "a step, the device waited for at its end"),
        ("ahead_step_s", "a step, the host running ahead"),
    ):
        mine = median(results, key)
        of = {"of_plain": round(mine / median(plain, key), 3)} if plain else {}
        section.figure(f"{name}: {what}", round(1e3 * mine, 2), "ms", "job.py", **of)
    section.figure(
        f"{name}: of that, until the host had enqueued it",
        round(median(results, "ahead_host_share"), 3),
        "share",
        "job.py",
    )
    if results[0]["device_peak_bytes"]:
        section.figure(
            f"{name}: peak of reserved device memory of a rank",
            round(max(r["device_peak_bytes"] for r in results) / 2**20, 1),
            "MiB",
            "job.py",
        )
    profile = results[0]["profile"]
    if isinstance(profile, dict):
        section.figure(
            f"{name}: share of rank 0's steps without a kernel of its own",
            round(profile["no_kernel"], 3),
            "share",
            "torch.profiler",
        )
        section.figure(
            f"{name}: share of rank 0's steps with nothing of its own on the device",
            round(profile["nothing"], 3),
            "share",
            "torch.profiler",
        )
    elif profile:
        section.reason(f"{name}: no share of idle: {profile}")


def gained(results: list[dict], group: str, key: str, until: str = "after") -> list[float]:
    return [r[until][group][key] - r["before"][group][key] for r in results]


def caching(section: Section, name: str, results: list[dict]) -> None:
    """FCDP's counters over the measured steps, from `before` to `after`."""
    steps = results[0]["steps"]
    if not results[0]["after"] or not results[0]["after"]["groups"]:
        bypassed = results[0]["after"]["bypassed"] if results[0]["after"] else "FCDP was not on"
        section.check(f"{name}: FCDP serves the model", False, str(bypassed)[:400])
        return
    section.check(
        f"{name}: FCDP serves the model",
        True,
        f"driver {results[0]['after']['driver']}, collectives over {results[0]['after']['transport']}",
    )
    made, avoided = (sum(gained(results, "gathers", key)) / len(results) / steps for key in ("made", "avoided"))
    section.figure(
        f"{name}: gathers between nodes a step", round(made, 2), "gathers", "fcdp.stats()", avoided=round(avoided, 2)
    )
    # Each rank counts what it sends; `saved` is of a node.
    sent = gained(results, "saved", "gather_bytes")[0] / steps
    trained = results[0]["trained_bytes"]
    section.figure(
        f"{name}: gathers send over the trainable bytes, a step and node",
        round(sent / trained, 3),
        "W",
        "fcdp.stats()",
        plain_fsdp2=round(gained(results, "saved", "plain_bytes")[0] / steps / trained, 3),
    )
    blocked(section, name, results)
    maps = sum(gained(results, "moves", "maps")) / len(results) / steps
    section.figure(
        f"{name}: pages mapped a step",
        round(maps, 2),
        "maps",
        "fcdp.stats()",
        memory_waits=sum(gained(results, "moves", "memory_waits")),
    )


def blocked(section: Section, name: str, results: list[dict]) -> None:
    """Where FCDP lets the host wait, in the steps in which it runs ahead: with a device that is waited for at each
    step's end, pages are always there."""

    def a_step(get) -> float:
        gained = [get(result["last"]) - get(result["after"]) for result in results]
        return sum(gained) / len(gained) / results[0]["steps"]

    of = {  # what it waits for: (seconds, how often)
        "in gathers": ("seconds", "gathers"),  # on CPUs alone
        "for pages": ("page_seconds", "pages"),
    }
    for what, (seconds, waits) in of.items():
        section.figure(
            f"{name}: host blocked {what}, a step, running ahead",
            round(1e3 * a_step(lambda stats: stats["waits"][seconds]), 3),
            "ms",
            "fcdp.stats()",
            waits=round(a_step(lambda stats: stats["waits"][waits]), 2),
        )
    section.figure(
        f"{name}: host blocked in agreements, a step, running ahead",
        round(1e3 * a_step(lambda stats: stats["agreement_s"]), 3),
        "ms",
        "job.py",
        waits=round(a_step(lambda stats: stats["waits"]["agreements"]), 2),
    )


def compare(
    section: Section, arguments: list[str], runs: dict[str, dict[str, str]], nccl: bool = False, node_size: int = 2
) -> dict[str, list[dict]]:
    """`runs`: name -> FCDP's settings. Plain FSDP2 first, and again where something differs from it. On two nodes.
    Every rank's result of each run that ended."""
    share, world = section.left() / (len(runs) + 2), 2 * node_size
    plain = launch(section, "plain FSDP2", arguments, {}, 2 * share, nccl, world)
    if plain[0]["reduced_by"]:
        section.reason(f"gradients are reduced by {plain[0]['reduced_by']}; in every run")
    section.figure(
        "parameters",
        round(plain[0]["parameter_bytes"] / 1e6, 2),
        "MB",
        "job.py",
        trained_mb=round(plain[0]["trained_bytes"] / 1e6, 3),
    )
    times(section, "plain FSDP2", plain, None)
    different, results = False, {}
    for i, (name, settings) in enumerate(runs.items()):
        what = f"{name}: losses and parameters are bit for bit plain FSDP2's"
        try:
            settings = settings | {"FCDP_LOCAL_SIZE": str(node_size)}
            got = launch(section, name, arguments, settings, section.left() / (len(runs) - i), nccl, world)
        except Failed as error:
            section.check(what, False, str(error))
            continue
        difference = first_difference(plain, got)
        different = different or bool(difference)
        section.check(what, not difference, difference or f"{len(got[0]['losses'])} steps on {world} ranks", "job.py")
        results[name] = got
        times(section, name, got, plain)
        caching(section, name, got)
    if different:
        again = first_difference(
            plain, launch(section, "plain FSDP2 again", arguments, {}, section.left(), nccl, world)
        )
        section.check("plain FSDP2 is bit for bit itself", not again, again or "so the differences above are FCDP's")
    return results
