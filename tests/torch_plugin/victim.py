"""One rank of a job in which one rank kills itself, by SIGKILL, at a chosen place of the third step."""

import argparse
import datetime
import faulthandler
import os
import select
import signal
import sys
import threading

faulthandler.register(signal.SIGUSR1, all_threads=True)  # first: unregistered, the signal would end the process

import torch
import torch.distributed as dist

import compat
from models import Net, shard
from run import Run

PATIENCE_S = 60


def die():
    print("dies now", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


def watch_for_a_gather():
    """Kills this process once one of its other threads stands inside an all-gather, or waits for one of FCDP's,
    and does not leave it."""

    def is_gather(code):
        torchs = code.co_filename.endswith("distributed_c10d.py") and code.co_name.startswith("all_gather")
        return torchs or code.co_filename.endswith(os.path.join("fcdp", "c10d.py")) and code.co_name == "finish"

    def inside():
        me = threading.get_ident()
        for ident, frame in sys._current_frames().items():
            while ident != me and frame is not None:
                if is_gather(frame.f_code):
                    return ident, id(frame)
                frame = frame.f_back
        return None

    def watch():
        pause, same, last = threading.Event(), 0, None
        while same < 20:
            now = inside()
            same = same + 1 if now is not None and now == last else 0
            last = now
            pause.wait(0.01)
        die()

    threading.Thread(target=watch, daemon=True).start()


def wait_for_the_end_of(pid):
    descriptor = os.pidfd_open(pid)
    if not select.select([descriptor], [], [], PATIENCE_S)[0]:
        raise TimeoutError(f"process {pid} did not die")
    os.close(descriptor)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("where", choices=["forward", "backward", "gather", "optimizer"])
    parser.add_argument("--victim", type=int, default=2)
    parser.add_argument("--flight-timeout", type=float, default=10)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    compat.prepare()
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=arguments.flight_timeout))
    rank, world = dist.get_rank(), dist.get_world_size()
    store = dist.distributed_c10d._get_default_store()
    victim = rank == arguments.victim
    holder = rank == (arguments.victim + world // 2) % world  # the same place on the other node
    if victim:
        store.set("victim", str(os.getpid()))
    run = Run("victim", rank, world)
    model = shard(Net(dim=48, n_blocks=4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    armed = []

    def in_block_0(module, inputs, output):
        if not armed or arguments.where != "gather":
            return
        if holder:  # stays out of what comes next until the victim, waiting there for it, is dead
            wait_for_the_end_of(int(store.get("victim")))
        elif victim:
            watch_for_a_gather()

    def in_block_1(module, inputs):
        if armed and victim and arguments.where == "forward":
            die()

    def behind_block_1(module, inputs, output):
        if armed and victim and arguments.where == "backward":
            output.register_hook(lambda gradient: die())

    model.blocks[0].up.register_forward_hook(in_block_0)
    model.blocks[1].up.register_forward_pre_hook(in_block_1)
    model.blocks[1].register_forward_hook(behind_block_1)
    for step in range(5):
        if step == 2:
            armed.append(True)
        run.loss(model).backward()
        if armed and victim and arguments.where == "optimizer":
            die()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}", flush=True)


if __name__ == "__main__":
    main()
