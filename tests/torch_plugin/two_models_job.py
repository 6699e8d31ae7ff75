"""One rank: two models, each on a process group of its own and on a thread of its own, of which one is ahead on the
even ranks and the other one on the odd ranks. two_models_job.py FOLDER cold|warm [plain]. cold: the threads meet
their process groups first; warm: each model has made a step on the main thread before. The losses and a digest of
the parameters go to rank<RANK>.json in FOLDER."""

import hashlib
import json
import os
import sys
import threading

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import compat
from models import Net, shard
from run import raw_bytes

PATIENCE_S = 60
local = threading.local()  # .model: which one this thread trains
begun = [threading.Event(), threading.Event()]  # the model has begun what its thread then waits for


def go_ahead(ahead, owner, method):
    """Of `ahead`, from its first call of the method on; the other model's first call comes behind that."""
    original = getattr(owner, method)

    def call(self, *args):
        model = getattr(local, "model", None)
        if model is not None and model != ahead:
            assert begun[ahead].wait(PATIENCE_S)
        result = None
        if model is not None and method == "__init__":  # it waits for peers inside
            begun[model].set()
        result = original(self, *args)
        if model is not None:
            begun[model].set()
        return result

    setattr(owner, method, call)


class Trained:
    def __init__(self, number):
        group = dist.new_group(list(range(dist.get_world_size())))
        torch.manual_seed(1234 + number)
        self.number = number
        self.model = shard(Net(n_blocks=4), mesh=DeviceMesh.from_group(group, "cpu"))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.losses, self.error = [], None

    def step(self):
        loss = (self.model(torch.full((3, 11), 1.0 + dist.get_rank())) ** 2).mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.item())

    def run(self):
        local.model = self.number
        try:
            for _ in range(4):
                self.step()
        except Exception as error:
            self.error = f"{type(error).__name__}: {error}"
            print(self.error, file=sys.stderr, flush=True)

    def digest(self):
        digest = hashlib.blake2b()
        for parameter in self.optimizer.param_groups[0]["params"]:
            digest.update(raw_bytes(parameter))
        return digest.hexdigest()


def main():
    folder, start = sys.argv[1:3]
    compat.prepare()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    models = [Trained(number) for number in range(2)]
    for model in models if start == "warm" else ():
        model.step()
    if "plain" not in sys.argv:
        from fcdp import c10d, group

        owner, method = (c10d.Lane, "__init__") if start == "cold" else (group.Group, "make_inputs")
        go_ahead(rank % 2, owner, method)
    threads = [threading.Thread(target=model.run) for model in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    fcdp = sys.modules.get("fcdp")
    result = {
        "losses": [model.losses for model in models],
        "digests": [model.digest() for model in models],
        "errors": [model.error for model in models],
        "stats": fcdp.stats() if fcdp else None,
    }
    with open(os.path.join(folder, f"rank{rank}.json"), "w") as f:
        json.dump(result, f)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
