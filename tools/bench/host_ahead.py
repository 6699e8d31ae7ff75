"""Does the host run ahead under FCDP? tools/bench.sh host-ahead; --help says what it prints.

The ranks train on torch.device("sim"), whose operators end by a modelled clock: matrix products at a rate that makes
them slow, everything else as fast as the CPU. In turn, in one process, a rank trains
  - the model by FSDP2 (under FCDP=1 or without);
  - the bound: what this rank computes of that, alone. The same forward and backward of a replica, and AdamW on as
    many elements as its shards have; no gathers, no reductions, no agreements.
A ratio is of two neighbouring blocks of steps. What the host waits for is counted by the simulated driver, in every
call in which CUDA may block a thread.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

ROOT = pathlib.Path(__file__).resolve().parents[2]
SIM = ROOT / "sim" / "torch"
NODES, NODE_SIZE = 2, 2
N_RANKS = NODES * NODE_SIZE
AGREEMENT, UNSHARD = "an agreement", "an unshard"  # labels, up to 47 bytes


class Configuration(NamedTuple):
    name: str
    env: dict[str, str]
    most: float  # that a step may be over its bound
    may_wait_in: tuple[str, ...]


# With exact mapping an unshard of a host that is ahead by all slots waits for the device to be done with one
# (tiering/slot.h): to unmap is the host's.
CONFIGURATIONS = (
    Configuration("FSDP2", {"FCDP": "0"}, float("inf"), ()),
    Configuration("FCDP, slots", {"FCDP": "1", "FCDP_MAPPING": "slots"}, 1.05, (AGREEMENT,)),
    Configuration("FCDP, exact mapping", {"FCDP": "1", "FCDP_MAPPING": "exact"}, 1.10, (AGREEMENT, UNSHARD)),
)
# Small, so that gloo and what computes as fast as the CPU take little of it: the ranks share its cores. In 3 s of compute,
# plain FSDP2 is bound by it too (1.05; in 1.5 s, 1.11). FCDP_COALESCE=0 gathers each group by itself, as large ones are.
MODEL = {"dim": 56, "seq": 16, "heads": 7, "layers": 8, "batch": 1}
MAPPING_CALLS = ("cuMemCreate", "cuMemMap", "cuMemSetAccess", "cuMemUnmap")
N_ROWS = 256
MOST_OVER_MODEL = 1.25  # compute alone over its matrix products; what else it computes is as fast as the CPU
IN_A_RANK = "HOST_AHEAD_RANK"
FOLDER = ROOT / "build" / "host_ahead"  # what the ranks of the last configuration said


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tools/bench.sh host-ahead", description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--pairs", type=int, default=5, help="of blocks, FSDP2's and the bound's in turn (default %(default)s)")
    add("--steps", type=int, default=2, help="of a block (default %(default)s)")
    add("--seconds", type=float, default=3, help="that the matrix products of a step take (default %(default)s)")
    add("--only", metavar="WORD", default="", help="configurations whose name has it: FSDP2, slots, exact")
    args = parser.parse_args(argv)
    if args.pairs < 1 or args.steps < 1 or not 0 < args.seconds < 60:
        parser.error("--pairs and --steps must be at least 1, --seconds above 0 and below 60")
    if not any(args.only in configuration.name for configuration in CONFIGURATIONS):
        parser.error(f"--only {args.only}: no configuration is called so")
    return args


# ---- a rank ----


class Blocking(ctypes.Structure):
    """simgpu_blocking, of sim/gpu/simgpu.h."""

    _fields_ = [
        ("thread", ctypes.c_int),
        ("entry", ctypes.c_char_p),
        ("label", ctypes.c_char * 48),
        ("site", ctypes.c_char * 512),
        ("calls", ctypes.c_ulong),
        ("waits", ctypes.c_ulong),
        ("spins", ctypes.c_ulong),
        ("wait_ns", ctypes.c_uint64),
        ("longest_ns", ctypes.c_uint64),
    ]


class Watch:
    """What the host waits for in the driver's calls, in an agreement or anywhere else, while steps are enqueued."""

    def __init__(self) -> None:
        import torch_sim

        self._driver = ctypes.CDLL(torch_sim._library)
        self._driver.simgpu_blocking_list.restype = ctypes.c_size_t
        self._driver.simgpu_calls.restype = ctypes.c_ulong
        self.forget()

    def forget(self) -> None:
        self._calls: Counter[str] = Counter()
        self._seconds: Counter[str] = Counter()  # of the calls that have a label
        self._waits: Counter[str] = Counter()  # entry point | label, or where it was called
        self._waited_s: Counter[str] = Counter()
        self._is_on = True

    def label_fcdp(self) -> None:
        """An agreement is inside an unshard: from its first question to the ranks' answer."""
        from fcdp import _fcdp
        from fcdp.group import Group

        _fcdp.Group.unshard = self._labelled(_fcdp.Group.unshard, UNSHARD)
        settle, carry, began = Group.settle, Group.carry, []

        def settles(group: Group) -> None:
            if not began:
                began.append(time.perf_counter())
                self._driver.simgpu_annotate(AGREEMENT.encode())
            settle(group)

        def carries(group: Group, votes: bytes) -> bytes:
            try:
                return carry(group, votes)
            finally:
                self._driver.simgpu_annotate(UNSHARD.encode())
                self._calls[AGREEMENT] += self._is_on
                self._seconds[AGREEMENT] += self._is_on * (time.perf_counter() - began.pop())

        Group.settle, Group.carry = settles, carries

    def _labelled(self, function: Callable, label: str) -> Callable:
        def labelled(*args: Any) -> Any:
            began = time.perf_counter()
            self._driver.simgpu_annotate(label.encode())
            try:
                return function(*args)
            finally:
                self._driver.simgpu_annotate(None)
                self._calls[label] += self._is_on
                self._seconds[label] += self._is_on * (time.perf_counter() - began)

        return labelled

    def pause(self) -> None:
        self._is_on = False

    def resume(self) -> None:
        self._is_on = True

    def begin(self) -> None:
        self._driver.simgpu_blocking_reset()
        self._driver.simgpu_calls_reset()

    def end(self) -> None:
        if not self._is_on:
            return
        rows = (Blocking * N_ROWS)()
        for row in rows[: min(self._driver.simgpu_blocking_list(rows, ctypes.c_size_t(N_ROWS)), N_ROWS)]:
            kind = f"{row.entry.decode()}|{row.label.decode() or row.site.decode()}"
            self._waits[kind] += row.waits
            self._waited_s[kind] += row.wait_ns / 1e9
        for entry in MAPPING_CALLS:
            self._calls[entry] += self._driver.simgpu_calls(entry.encode())

    def found(self) -> dict[str, Any]:
        return {
            "calls": self._calls,
            "seconds": self._seconds,
            "waits": self._waits,
            "waited_s": self._waited_s,
        }


class Bound:
    """The replica: what a rank computes of the sharded model's training."""

    def __init__(self, model: Any, rank: int):
        import torch

        self.model = model
        self._pairs = []
        for parameter in model.parameters():
            cut = self._cut(parameter.detach(), rank)
            if cut is not None:
                self._pairs.append((parameter, torch.nn.Parameter(cut)))
        self._rank = rank
        self._optimizer = torch.optim.AdamW([shard for _, shard in self._pairs], lr=1e-3)

    @staticmethod
    def _cut(tensor: Any, rank: int) -> Any:
        chunks = tensor.chunk(N_RANKS)
        return chunks[rank] if rank < len(chunks) else None

    def update(self) -> None:
        for parameter, shard in self._pairs:
            shard.grad = self._cut(parameter.grad, self._rank)
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.model.zero_grad()


def flops_of_a_step(model: Any, x: Any, y: Any) -> int:
    """Of its matrix products, on the CPU."""
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        loss_of(model, x, y).backward()
    model.zero_grad()
    return counter.get_total_flops()


def loss_of(model: Any, x: Any, y: Any) -> Any:
    import torch.nn.functional as F

    return F.cross_entropy(model(x).flatten(0, 1), y.flatten())


def train(args: argparse.Namespace) -> None:
    sys.path[:0] = [str(SIM), str(ROOT / "tools" / "demo")]
    import gpt
    import torch
    import torch.distributed as dist

    import torch_sim  # noqa: F401

    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    torch.sim.set_device(rank)
    dist.init_process_group()
    device = torch.device("sim", rank)
    like = argparse.Namespace(
        **MODEL, lora=0, hsdp=False, reshard_after_forward=True, bf16=False, replicate_frozen=False
    )
    torch.manual_seed(0)
    replica = gpt.GPT(like)
    ids = torch.randint(gpt.VOCABULARY, (MODEL["batch"], MODEL["seq"] + 1))
    gflops = flops_of_a_step(replica, ids[:, :-1], ids[:, 1:]) / args.seconds / 1e9
    torch.manual_seed(0)
    sharded = gpt.GPT(like).to(device)
    gpt.shard(sharded, like, device)
    optimizer = torch.optim.AdamW(sharded.parameters(), lr=1e-3)
    bound = Bound(replica.to(device), rank)
    x, y = ids[:, :-1].to(device), ids[:, 1:].to(device)

    def step_sharded() -> None:
        loss_of(sharded, x, y).backward()
        optimizer.step()
        optimizer.zero_grad()

    def step_bound() -> None:
        loss_of(bound.model, x, y).backward()
        bound.update()

    watch = Watch()
    if os.environ["FCDP"] == "1":
        watch.label_fcdp()

    def block(step: Any) -> tuple[float, float]:
        """Seconds of a step until the device was done, and until the host had enqueued it."""
        torch.sim.synchronize()
        dist.barrier()
        watch.begin()
        began = time.perf_counter()
        for _ in range(args.steps):
            step()
        enqueued = time.perf_counter()
        watch.end()
        torch.sim.synchronize()
        return (time.perf_counter() - began) / args.steps, (enqueued - began) / args.steps

    for _ in range(2):  # what is made at first use, as fast as it can be
        block(step_sharded)
        block(step_bound)
    torch.sim.set_rates(gflops=gflops)
    block(step_sharded)
    watch.forget()
    pairs = []
    for _ in range(args.pairs):
        mine = block(step_sharded)
        watch.pause()
        pairs.append((mine, block(step_bound)))
        watch.resume()
    found = {"pairs": pairs, **watch.found()}
    (FOLDER / f"rank{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


# ---- all ranks, and what they found ----


def run(args: argparse.Namespace, setting: dict[str, str]) -> list[dict[str, Any]]:
    """What each rank found."""
    from fcdp_lab.port import free_port

    common = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "FCDP_LOCAL_SIZE": str(NODE_SIZE),
        "FCDP_TRANSPORT": "torch",
        "FCDP_COALESCE": "0",
        "FCDP_TAU": "0",
        "WORLD_SIZE": str(N_RANKS),
        "LOCAL_WORLD_SIZE": str(N_RANKS),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "TORCH_SIM_GFLOPS": "0",
        "TORCH_SIM_GBYTES": "0",
        IN_A_RANK: "1",
        **setting,
    }
    ranks = []
    for rank in range(N_RANKS):
        with open(FOLDER / f"rank{rank}.log", "w") as log:
            env = {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            command = [sys.executable, __file__, *sys.argv[1:]]
            ranks.append(subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT))
    try:
        for rank, process in enumerate(ranks):
            if process.wait(600 + 20 * args.pairs * args.steps * args.seconds):
                sys.exit(f"rank {rank} ended with {process.returncode}:\n" + (FOLDER / f"rank{rank}.log").read_text())
    finally:
        for process in ranks:
            process.kill()
    return [json.loads((FOLDER / f"rank{rank}.json").read_text()) for rank in range(N_RANKS)]


def per_step(ranks: list[dict[str, Any]], key: str, n_steps: int) -> dict[str, float]:
    """The mean over steps and ranks."""
    names = {name for rank in ranks for name in rank[key]}
    return {name: sum(rank[key].get(name, 0) for rank in ranks) / n_steps / len(ranks) for name in sorted(names)}


def report(configuration: Configuration, ranks: list[dict[str, Any]], args: argparse.Namespace) -> bool:
    """Prints; is all as it must be?"""
    n_steps = args.pairs * args.steps
    pairs = [pair for rank in ranks for pair in rank["pairs"]]
    ratios = sorted(mine / bound for (mine, _), (bound, _) in pairs)
    ratio = statistics.median(ratios)
    step, bound = (statistics.median(pair[i][0] for pair in pairs) for i in (0, 1))
    left = statistics.median(1 - enqueued / done for (done, enqueued), _ in pairs)
    calls, seconds, waits, waited_s = (
        per_step(ranks, key, n_steps) for key in ("calls", "seconds", "waits", "waited_s")
    )
    print(
        f"{configuration.name}: a step takes {step * 1e3:.0f} ms, compute alone {bound * 1e3:.0f}: {ratio:.3f} of its bound "
        f"(median of {len(pairs)} pairs; {ratios[0]:.3f} to {ratios[-1]:.3f})"
    )
    print(f"  when the host has enqueued a block of steps, {left:.0%} of the block's time is still to come")
    print("  per step and rank:")
    if AGREEMENT in seconds:
        print(f"    {calls[AGREEMENT]:.2f} agreements of {1e3 * seconds[AGREEMENT] / calls[AGREEMENT]:.0f} ms")
    blocked = {kind: n for kind, n in waits.items() if n}
    for kind, n in blocked.items():
        entry, where = kind.split("|")
        print(f"    {n:.2f} waits of the host, {1e3 * waited_s[kind]:.0f} ms in all, by {entry} in {where}")
    if not blocked:
        print("    no waits of the host")
    print("    " + ", ".join(f"{calls.get(entry, 0):.2f} {entry}" for entry in MAPPING_CALLS))
    elsewhere = [kind for kind in blocked if kind.split("|")[1] not in configuration.may_wait_in]
    if elsewhere:
        print(f"  the host must not wait in {', '.join(kind.split('|')[1] for kind in elsewhere)}")
    if ratio > configuration.most:
        print(f"  a step must not take more than {configuration.most:.2f} of its bound")
    is_modelled = bound <= MOST_OVER_MODEL * args.seconds
    if not is_modelled:
        print(
            "  not the modelled rate but this machine's CPUs bound these steps: run it on an idle one, or raise --seconds"
        )
    return not elsewhere and ratio <= configuration.most and is_modelled


def main() -> int:
    args = arguments()
    if IN_A_RANK in os.environ:
        train(args)
        return 0
    subprocess.run([sys.executable, SIM / "torch_sim" / "build.py"], check=True, stdout=subprocess.DEVNULL)
    good = True
    for configuration in CONFIGURATIONS:
        if args.only in configuration.name:
            shutil.rmtree(FOLDER, ignore_errors=True)
            FOLDER.mkdir(parents=True)
            good &= report(configuration, run(args, configuration.env), args)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
