"""Trains the demo's GPT with another library in FSDP2's place:

job.py [ARGUMENTS OF gpt.py] [--peer MODULE:FUNCTION] [--memory FILE]

Model, seed, data and optimizer are gpt.py's in every case, and without --peer, all is. The function of a peer takes the
model and gpt.py's arguments. It returns another function, which trains one step on a list of micro-batches and
returns their mean loss. --memory adds a line to the file, with how much device memory this rank took (memory.py).
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
import memory


def loss_of(model, x, y):
    return F.cross_entropy(model(x).flatten(0, 1).float(), y.flatten())


def block_elements(model):
    """Where memory is measured, peers begin this much ahead: by default a constant that is more than such a model."""
    return sum(p.numel() for p in model.blocks[0].parameters())


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


def taken(option):
    """Its value, which is no longer among the arguments; None: it is not given."""
    if option not in sys.argv:
        return None
    at = sys.argv.index(option)
    value = sys.argv[at + 1]
    del sys.argv[at : at + 2]
    return value


def main():
    peer, path = taken("--peer"), taken("--memory")
    watch = memory.Watch(gpt) if path else None
    if peer:
        args = gpt.arguments()
        args.measures_memory = watch is not None
        train(peer, args)
    else:
        gpt.main()
    if watch:
        watch.write(path)


if __name__ == "__main__":
    main()
