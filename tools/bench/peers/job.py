"""Trains the demo's GPT with another library in FSDP2's place: job.py [ARGUMENTS OF gpt.py] [--peer MODULE:FUNCTION]

Model, seed, data and optimizer are gpt.py's in every case, and without --peer, all is. The function of a peer takes the
model and gpt.py's arguments. It returns another function, which trains one step on a list of micro-batches and
returns their mean loss.
"""

import importlib
import os
import pathlib
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F

sys.path.append(str(pathlib.Path(__file__).resolve().parents[2] / "demo"))
import gpt


def loss_of(model, x, y):
    return F.cross_entropy(model(x).flatten(0, 1).float(), y.flatten())


def mesh_shape():
    """Nodes, and the ranks of each."""
    ranks = int(os.environ["LOCAL_WORLD_SIZE"])
    return dist.get_world_size() // ranks, ranks


def train(peer, args):
    module, function = peer.split(":")
    dist.init_process_group("gloo")
    torch.manual_seed(args.seed)
    train_step = getattr(importlib.import_module(module), function)(gpt.GPT(args), args)
    data = gpt.batches(gpt.load_text(args.text), args, torch.device("cpu"))
    for step in range(1, args.steps + 1):
        loss = train_step([next(data) for _ in range(args.micro_batches)])
        if dist.get_rank() == 0:
            print(f"step {step} loss {loss.item()!r}", flush=True)
    dist.destroy_process_group()


def main():
    if "--peer" not in sys.argv:
        return gpt.main()
    at = sys.argv.index("--peer")
    peer = sys.argv[at + 1]
    del sys.argv[at : at + 2]
    train(peer, gpt.arguments())


if __name__ == "__main__":
    main()
