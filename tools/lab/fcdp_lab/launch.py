"""Starts the ranks of one node: by torchrun, or directly with the environment that torchrun would give them.

Either way a rank's output goes to <logs>/node<k>/.../attempt_<a>/<local rank>/std{out,err}.log.
"""

import os
import signal
import subprocess
import time

from fcdp_lab import network

_TERM_PATIENCE_S = 5.0


def run(node, plan):
    """Returns the launcher's exit code."""
    logs = os.path.join(plan["logs"], f"node{node}")
    os.makedirs(logs, exist_ok=True)
    start = _direct if plan["launcher"] == "direct" else _torchrun
    return start(node, plan, logs, _node_env(plan))


def _node_env(plan):
    interface = network.NODE_INTERFACE
    return {
        **{f"{kind}_SOCKET_IFNAME": interface for kind in ("GLOO", "NCCL", "TP")},
        **plan["env"],
    }


def _torchrun(node, plan, logs, env):
    command = [
        plan["python"],
        "-m",
        "torch.distributed.run",
        f"--nnodes={plan['nodes']}",
        f"--node-rank={node}",
        f"--nproc-per-node={plan['ranks']}",
        f"--master-addr={network.node_address(0)}",
        f"--master-port={network.MASTER_PORT}",
        "--redirects=3",
        f"--log-dir={logs}",
        *plan["job"],
    ]
    with open(os.path.join(logs, "launcher.log"), "wb") as log:
        return subprocess.call(command, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log)


def _direct(node, plan, logs, env):
    ranks = {}
    for local_rank in range(plan["ranks"]):
        process = _direct_rank(node, local_rank, plan, logs, env)
        ranks[process.pid] = (local_rank, process)
    with open(os.path.join(logs, "launcher.log"), "w") as log:
        return _wait_direct(ranks, log, plan)


def _direct_rank(node, local_rank, plan, logs, env):
    n, g = plan["nodes"], plan["ranks"]
    folder = os.path.join(logs, "direct", "attempt_0", str(local_rank))
    os.makedirs(folder, exist_ok=True)
    values = {
        "RANK": node * g + local_rank,
        "LOCAL_RANK": local_rank,
        "GROUP_RANK": node,
        "WORLD_SIZE": n * g,
        "LOCAL_WORLD_SIZE": g,
        "GROUP_WORLD_SIZE": n,
        "MASTER_ADDR": network.node_address(0),
        "MASTER_PORT": network.MASTER_PORT,
    }
    with open(f"{folder}/stdout.log", "wb") as out, open(f"{folder}/stderr.log", "wb") as err:
        return subprocess.Popen(
            [plan["python"], "-u", *plan["job"]],
            env={**env, **{k: str(v) for k, v in values.items()}},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
        )


def _wait_direct(ranks, log, plan):
    """Waits for all ranks. The first failure ends the others, as under torchrun, and is reported in torchrun's
    format."""
    code = 0
    while ranks:
        pid, status = os.waitpid(-1, 0)
        if pid not in ranks:
            continue
        local_rank, _ = ranks.pop(pid)
        exit_code = os.waitstatus_to_exitcode(status)
        if exit_code != 0 and code == 0:
            code = exit_code
            log.write(
                f"failed (exitcode: {exit_code}) local_rank: {local_rank} (pid: {pid}) of binary: {plan['python']}\n"
            )
            log.flush()
            _terminate(ranks)
    return code


def _terminate(ranks):
    for pid in ranks:
        os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + _TERM_PATIENCE_S
    for _, process in ranks.values():
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    ranks.clear()
