"""One rank of a job that uses gathered memory after its reshard where no torch can see it: by a numpy array, or
with storages that do not raise, as on a torch before 2.15."""

import datetime
import faulthandler
import signal
import sys

faulthandler.register(signal.SIGUSR1, all_threads=True)  # first: unregistered, the signal would end the process

import torch
import torch.distributed as dist

import compat
from models import Net, shard
from run import Run


def main():
    what = sys.argv[1]
    torch.set_num_threads(1)
    compat.prepare()
    if what != "numpy":
        import fcdp.released

        fcdp.released.SUPPORTED = False
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    run = Run("outlive", dist.get_rank(), dist.get_world_size())
    model = shard(Net(dim=32))
    arrays = []
    if what == "numpy":
        model.blocks[1].down.register_forward_hook(lambda module, *_: arrays.append(module.weight.detach().numpy()))
    if what == "backward":
        model.blocks[1].set_unshard_in_backward(False)
    loss = run.loss(model)
    if arrays:
        print("a rank reads", arrays[0].sum(), flush=True)
    loss.backward()
    print("went on", flush=True)


if __name__ == "__main__":
    main()
