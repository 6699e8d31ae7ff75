"""fcdp-plan batch: the largest batch that fits."""

from __future__ import annotations

import argparse
import json

from fcdp_memtrace.units import human, table
from fcdp_plan import clusters, modes, shapes

ABOUT = """\
Say the largest batch that fits, by mode.

A GPU's batch is a power of two, as in the FCDP paper's Tables V and VI; the total is that of all GPUs, and 0 where not
even one sequence per GPU fits. --json prints the three modes of those tables.
"""
OF_THE_PAPER = {"ZeRO-3": "FSDP2", "ZeRO++": "FSDP2 hpZ", "FCDP": "FCDP"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    shapes.add_arguments(parser)
    clusters.add_arguments(parser)
    parser.add_argument("--json", action="store_true", help="total batches of ZeRO-3, ZeRO++ and FCDP, as JSON")


def run(args: argparse.Namespace) -> int:
    shape, costs = shapes.of(args), shapes.costs(args.dtype)
    cluster = clusters.numbers(clusters.described(args), args.nodes)
    gpus = int(cluster["n_nodes"] * cluster["gpus_per_node"])

    def largest(name: str) -> int:
        return modes.largest_batch(name, shape, costs, cluster, shapes.CONSTANTS)

    if args.json:
        print(json.dumps({name: gpus * largest(mode) for name, mode in OF_THE_PAPER.items()}))
        return 0
    rows = []
    for name in modes.MODES:
        if modes.is_served(name, cluster):
            batch = largest(name)
            priced, regions = shapes.describe(shape, max(batch, 1), args.dtype)
            used = modes.memory(name, priced, regions, cluster, shapes.CONSTANTS)
            parts = [human(used[key]) for key in ("state", "cache", "gathered", "activations", "other", "total")]
            rows.append([name, str(batch), str(gpus * batch), *parts, human(used["host"])])
    print(f"{gpus} GPUs with {human(used['limit'])} each; what does not fit is shown with a batch of 1")
    print(
        table(["mode", "per GPU", "total", "state", "cache", "gathered", "activations", "logits", "all", "host"], rows)
    )
    return 0
