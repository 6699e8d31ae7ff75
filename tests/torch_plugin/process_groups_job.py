"""One rank: makes a process group, trains a model over it and destroys it, again and again, and prints what the
process holds after each time, into a file for each rank. argv: how often, the folder."""

import gc
import json
import os
import sys

import torch
import torch.distributed as dist

import compat
from models import Net, shard


def held():
    with open("/proc/self/maps") as f:
        maps = len(f.readlines())
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "maps": maps,
    }


def once(store):
    dist.init_process_group("gloo", store=store, rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]))
    torch.manual_seed(1234)
    model = shard(Net(n_blocks=2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(2):
        loss = (model(torch.ones(3, 11)) ** 2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.barrier()
    dist.destroy_process_group()
    return loss.item()


def main():
    compat.prepare()
    torch.set_num_threads(1)
    gc.freeze()  # the collections look at what the loop makes
    losses, holds = [], []
    port = int(os.environ["MASTER_PORT"])
    outlives = dist.TCPStore(os.environ["MASTER_ADDR"], port, is_master=os.environ["RANK"] == "0")  # every group
    for i in range(int(sys.argv[1])):
        losses.append(once(dist.PrefixStore(f"again/{i}", outlives)))
        gc.collect()
        holds.append(held())
        with open(os.path.join(sys.argv[2], f"rank{os.environ['RANK']}.json"), "w") as f:
            json.dump({"losses": losses, "held": holds}, f)


if __name__ == "__main__":
    main()
