"""One rank of a job of tools/bench/pressure: trains the demo's GPT on the simulated device, and writes what it found:

    torchrun --nproc-per-node N job.py OUT [OPTIONS OF tools/demo/gpt.py]

OUT/rankN.json has the losses and the parameters' bytes as a hash, the memory of tensors and of gathered parameters, and
each step's seconds; where memory was out, that and nothing of training. Memory that is out ends the job on every rank.
With PRESSURE_TRACE set, rank 0 records the trace of its last steps there.
"""

import contextlib
import hashlib
import json
import os
import pathlib
import sys
import time

import torch
import torch.distributed as dist

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[3] / "sim" / "torch"))
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "demo"))
import gpt

import torch_sim  # noqa: F401

LAST_STEPS = 3  # that are recorded, beside what the ring holds of before


def hashed(model):
    whole = hashlib.sha256()
    for parameter in model.parameters():
        whole.update(parameter.to_local().detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    return whole.hexdigest()


def train(args, device, traced, stack):
    torch.manual_seed(args.seed)
    model = gpt.GPT(args)
    gpt.freeze(model, args)
    model.to(device)
    gpt.shard(model, args, device)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=args.lr)
    data = gpt.batches(gpt.load_text(args.text), args, device)
    losses, seconds = [], []
    for i in range(args.steps):
        if traced and i == args.steps - LAST_STEPS:
            import fcdp

            stack.enter_context(fcdp.trace(traced))
        began = time.perf_counter()
        losses.append(gpt.train_step(model, optimizer, data, args).item().hex())
        torch.sim.synchronize()
        seconds.append(time.perf_counter() - began)
    return {"losses": losses, "parameters": hashed(model), "seconds": seconds}


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
        found |= {name: stats[name] for name in ("gathers", "moves", "device_bytes", "host_bytes")}
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
