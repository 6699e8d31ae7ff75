"""The modes that are compared, and calls of the model."""

from __future__ import annotations

import argparse

from fcdp_memtrace.arguments import at_least, within
from fcdp_plan import _plan

# name -> mode, tier of FCDP's regions
MODES = {
    "FSDP2": (_plan.FSDP2, _plan.GATHERED),
    "FSDP2 keep": (_plan.KEEP, _plan.GATHERED),
    "FSDP2 hpZ": (_plan.HPZ, _plan.GATHERED),
    "HSDP": (_plan.HSDP, _plan.GATHERED),
    "HFSDP": (_plan.HFSDP, _plan.GATHERED),
    "ZeRO-Offload": (_plan.OFFLOAD, _plan.GATHERED),
    "FCDP": (_plan.FCDP, _plan.BY_SLICE),
    "FCDP whole": (_plan.FCDP, _plan.WHOLE),
    "FCDP device": (_plan.FCDP, _plan.ON_DEVICE),
    "FCDP file": (_plan.FCDP, _plan.IN_FILE),
}
SETTINGS = {
    "FSDP2": "fully_shard(m); DeepSpeed: ZeRO-3",
    "FSDP2 keep": "reshard_after_forward=False",
    "FSDP2 hpZ": "reshard_after_forward=GPUs of a node; ZeRO++",
    "HSDP": "a mesh of nodes x GPUs; MiCS",
    "HFSDP": "Megatron-FSDP, sharded over nodes too",
    "ZeRO-Offload": "FSDP2 with CPUOffloadPolicy()",
    "FCDP": "FCDP=1",
    "FCDP whole": "FCDP=1 FCDP_RESTORE=whole",
    "FCDP device": "FCDP=1 FCDP_TAU=1",
    "FCDP file": "FCDP=1 FCDP_SPILL_DIR=DIR FCDP_HOST_BUDGET=small",
}
TIERS = {
    _plan.ON_DEVICE: "on the device",
    _plan.BY_SLICE: "host memory, by slice",
    _plan.WHOLE: "host memory, whole",
    _plan.IN_FILE: "in a file",
    _plan.GATHERED: "gathered again",
}
# A reduce-scatter's bytes, in those of a ring: gloo sends twice as many.
REDUCE_TIMES = {"nccl": 1, "gloo": 2}
COALESCE_BYTES = 1 << 20  # FCDP_COALESCE's default
SCHEDULE = {
    "prefetch": 1,
    "n_steps": 1,
    "micro_batches": 1,
    "no_overlap": False,
    "host_computes": False,
    "flat_gather": False,
    "reduce_times": 1,
    "differences": 1,
    "coalesce_bytes": 0,
    "host_seconds": 0,
    "gather_cores": 0,
    "reduce_cores": 0,
    "jitter": 0,
    "seed": 1,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Of the schedule."""
    parser.add_argument(
        "--prefetch", type=int, choices=range(9), default=1, metavar="N", help="groups ahead, 0 to 8 (default 1)"
    )
    parser.add_argument(
        "--micro-batches", type=at_least(1), metavar="N", help="per optimizer step; default 1, or as measured"
    )
    parser.add_argument(
        "--jitter",
        type=within(0, 100, "percent"),
        default=0.0,
        metavar="PERCENT",
        help="of a rank's computing time, from step to step: a step waits for the slowest rank",
    )
    parser.add_argument(
        "--transport", choices=REDUCE_TIMES, default="nccl", help="what carries reductions (default nccl)"
    )
    parser.add_argument(
        "--differences",
        type=within(0, 1, "shares"),
        default=1.0,
        metavar="SHARE",
        help="FCDP's gathers send this share of what has changed (FCDP_CODEC); default 1",
    )
    parser.add_argument("--no-overlap", action="store_true", help="nothing runs beside compute")
    parser.add_argument(
        "--on-cpus",
        action="store_true",
        help="a job on CPUs, over gloo: only FCDP's gathers run beside compute, and a node's ranks meet in host memory",
    )


def schedule_of(args: argparse.Namespace, job: dict) -> dict:
    """With enough steps for a mean, where they differ."""
    steps = 200 if args.jitter else 1
    given = {"prefetch": args.prefetch, "micro_batches": args.micro_batches or job.get("micro_batches", 1)}
    given |= {
        "differences": args.differences,
        "coalesce_bytes": COALESCE_BYTES,
        "reduce_times": REDUCE_TIMES["gloo" if args.on_cpus else args.transport],
        "no_overlap": args.no_overlap,
        "host_computes": args.on_cpus,
    }
    return SCHEDULE | given | {"jitter": args.jitter / 100, "n_steps": steps}


def is_served(name: str, cluster: dict) -> bool:
    """Whether the mode is one of its own on this cluster."""
    return not (name == "FCDP file" and cluster["file_rate"] <= 0) and (cluster["n_nodes"] > 1 or name == "FSDP2")


def tiers_of(name: str, regions: list[dict]) -> bytes:
    """A region that stays gathered needs no place, but FCDP keeps its host copy all the same."""
    return bytes([MODES[name][1]] * len(regions))


def simulate(
    name: str, costs: dict, regions: list[dict], cluster: dict, tiers: bytes | None = None, **schedule
) -> dict:
    tiers = tiers_of(name, regions) if tiers is None else tiers
    return _plan.simulate(costs, regions, cluster, MODES[name][0], tiers, SCHEDULE | schedule)


def memory(
    name: str, costs: dict, regions: list[dict], cluster: dict, constants: dict, tiers: bytes | None = None
) -> dict:
    tiers = tiers_of(name, regions) if tiers is None else tiers
    return _plan.memory(costs, regions, cluster, MODES[name][0], tiers, constants)


def largest_batch(name: str, shape: dict, costs: dict, cluster: dict, constants: dict) -> int:
    """Sequences per GPU, a power of two; 0: none fits."""
    mode, tier = MODES[name]
    return _plan.largest_batch(shape, costs, cluster, mode, tier, constants)
