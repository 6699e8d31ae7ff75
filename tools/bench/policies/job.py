"""A rank of tools/bench.sh policies: trains a small GPT by FSDP2 under FCDP, and writes the order in which its last step
used the groups. `job.py KIND OUT`; KIND is one of KINDS."""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import sys
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "demo"))

import gpt
import torch
import torch.distributed as dist
import torch.nn.functional as F

from fcdp import _fcdp

KINDS = {
    "full fine-tuning": {},
    "4 micro-batches": {"micro": 4},
    "LoRA": {"lora": 2},
    "LoRA, evaluation between": {"lora": 2, "evaluated": 2},
    "evaluation between": {"evaluated": 2},
    "two models": {"reference": True},
}
MODEL = {"dim": 112, "heads": 7, "layers": 12, "seq": 16, "lora": 0, "hsdp": False, "reshard_after_forward": True}
N_STEPS = 4

uses: list[dict[str, Any]] = []


def record() -> None:
    """Every unshard: of which group, and what of it was gathered anew."""
    unshard = _fcdp.Group.unshard

    def recorded(group: Any, *args: Any) -> Any:
        made = group.stats()["gathers_made"]
        answer = unshard(group, *args)
        now = group.stats()
        fills = now["trainable_bytes"] if now["gathers_made"] > made else 0
        uses.append({"group": id(group), "bytes": now["bytes"], "load": now["bytes"] - fills, "store": fills})
        return answer

    _fcdp.Group.unshard = recorded


def made(lora: int) -> torch.nn.Module:
    args = argparse.Namespace(**MODEL | {"lora": lora, "bf16": False, "replicate_frozen": False, "frozen": 0})
    model = gpt.GPT(args)
    gpt.freeze(model, args)
    gpt.shard(model, args, torch.device("cpu"))
    return model


def main() -> None:
    kind, out = sys.argv[1:]
    how = KINDS[kind]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = made(how.get("lora", 0))
    reference = made(0).requires_grad_(False) if how.get("reference") else None
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    ids = torch.randint(gpt.VOCABULARY, (1, MODEL["seq"] + 1))

    def loss(of: torch.nn.Module) -> torch.Tensor:
        return F.cross_entropy(of(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())

    record()
    for _ in range(N_STEPS):
        uses.clear()
        for _ in range(how.get("micro", 1)):
            if reference is not None:
                with torch.no_grad():
                    loss(reference)
            loss(model).backward()
        optimizer.step()
        optimizer.zero_grad()
        for _ in range(how.get("evaluated", 0)):
            with torch.no_grad():
                loss(model)
    if os.environ["RANK"] == "0":
        numbers = {group: number for number, group in enumerate(dict.fromkeys(use["group"] for use in uses))}
        pathlib.Path(out).write_text(json.dumps([use | {"group": numbers[use["group"]]} for use in uses]))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
