"""One rank of a job of tools/bench/pressure: trains the demo's GPT on the simulated device, and writes what it found:

    torchrun --nproc-per-node N job.py OUT [OPTIONS OF tools/demo/gpt.py]

OUT/rankN.json has the losses and the parameters' bytes as a hash, the memory of tensors and of gathered parameters, and
each step's seconds; where memory was out, that and nothing of training. Memory that is out ends the job on every rank.
With PRESSURE_BURSTS=SEED, tensors of random sizes come and go beside those of the training, drawn from SEED and the
rank. With PRESSURE_TRACE set, rank 0 records the trace of its last steps there.
"""

import contextlib
import hashlib
import itertools
import json
import os
import pathlib
import random
import sys
import time

import torch
import torch.distributed as dist

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[3] / "sim" / "torch"))
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "demo"))
import gpt

import torch_sim  # noqa: F401

BURST_BYTES, BURST_LIFE = 6 << 20, 8  # at most, and in hooks of blocks
LAST_STEPS = 3  # that are recorded, beside what the ring holds of before


def hashed(model):
    whole = hashlib.sha256()
    for parameter in model.parameters():
        whole.update(parameter.to_local().detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    return whole.hexdigest()


class Bursts:
    """Before and behind each block, in forward and in backward, maybe a tensor, which lives for some such moments."""

    def __init__(self, seed, rank, model, device):
        self.random, self.device, self.now, self.held = random.Random(f"{seed} {rank}"), device, 0, []
        for block in model.blocks:
            block.register_forward_pre_hook(self.moment)
            block.register_forward_hook(self.moment)
            block.register_full_backward_pre_hook(self.moment)

    def moment(self, *_):
        self.now += 1
        self.held = [(until, tensor) for until, tensor in self.held if until > self.now]
        if self.random.random() < 0.4:
            life, n = self.random.randint(1, BURST_LIFE), self.random.randint(1, BURST_BYTES)
            self.held.append((self.now + life, torch.empty(n, dtype=torch.uint8, device=self.device)))


def n_evictions():
    if os.environ.get("FCDP") != "1":
        return 0
    import fcdp

    return fcdp.stats()["moves"].get("evictions", 0)


def train(args, device, traced, stack):
    torch.manual_seed(args.seed)
    model = gpt.GPT(args)
    gpt.freeze(model, args)
    model.to(device)
    gpt.shard(model, args, device)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=args.lr)
    data = gpt.batches(gpt.load_text(args.text), args, device)
    losses, seconds, evictions, bursts = [], [], [0], None
    if os.environ.get("PRESSURE_BURSTS"):
        bursts = Bursts(os.environ["PRESSURE_BURSTS"], dist.get_rank(), model, device)
    for i in range(args.steps):
        if traced and i == args.steps - LAST_STEPS:
            import fcdp

            stack.enter_context(fcdp.trace(traced))
        began = time.perf_counter()
        losses.append(gpt.train_step(model, optimizer, data, args).item().hex())
        torch.sim.synchronize()
        seconds.append(time.perf_counter() - began)
        evictions.append(n_evictions())
        if bursts:
            bursts.held.clear()
    by_step = [after - before for before, after in itertools.pairwise(evictions)]
    return {"losses": losses, "parameters": hashed(model), "seconds": seconds, "evictions": by_step}


def memory():
    stats = torch.sim.memory_stats()
    found = {
        "tensors_peak_bytes": stats["allocated_bytes.all.peak"],
        "reserved_peak_bytes": stats["reserved_bytes.all.peak"],
        "n_retries": stats["num_alloc_retries"],
    }
    if os.environ.get("FCDP") == "1":
        import fcdp

        stats = fcdp.stats()
        found |= {name: stats[name] for name in ("policy", "gathers", "moves", "device_bytes", "host_bytes")}
        found["served"] = len(stats["groups"])
        found["bypassed"] = stats["bypassed"]
    return found


def main():
    out = pathlib.Path(sys.argv.pop(1))
    args = gpt.arguments()
    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    torch.sim.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group()
    traced = os.environ.get("PRESSURE_TRACE") if rank == 0 else None
    try:
        with contextlib.ExitStack() as stack:
            found = train(args, torch.device("sim", int(os.environ["LOCAL_RANK"])), traced, stack)
    except torch.OutOfMemoryError as error:
        found = {"out_of_memory": str(error)}
    path = out / f"rank{rank}.json"
    path.with_suffix(".part").write_text(json.dumps(found | memory()))
    path.with_suffix(".part").rename(path)
    if "out_of_memory" in found:
        print(f"rank {rank}: {found['out_of_memory']}", file=sys.stderr, flush=True)
        os._exit(3)  # peers may wait in a collective
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
