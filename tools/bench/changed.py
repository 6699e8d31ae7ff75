"""Measures fcdp.changed(): how many bytes a step has changed of the weights, and what asking after each step takes.

The demo's GPT trains in bfloat16 as 2 nodes x 2 ranks, at several learning rates. W is the bytes of all weights in
bfloat16; "changed" is what all ranks together would send after a step, of W, as the median of the steps behind the first
ones. "of a step" is the time of the call, on all ranks at once, by that of the step before it, as the median of pairs. A
second process, this one, rebuilds the weights from what was sent and compares them with the job's, bit for bit.
"""

import argparse
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

import torch

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools" / "demo"))
WORLD, WARM_UP_STEPS = 4, 5


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--steps", type=int, default=20, help="measured steps, after five others")
    add("--lr", type=float, nargs="+", default=[3e-4, 1e-4, 1e-5])
    add("--layers", type=int, default=4)
    add("--dim", type=int, default=252)
    add("--batch", type=int, default=8, help="sequences per rank")
    add("--rank", metavar="FOLDER", help=argparse.SUPPRESS)
    return parser.parse_args()


def timed(function):
    """Its result, and seconds until every rank has come to its end."""
    torch.distributed.barrier()
    began = time.perf_counter()
    result = function()
    torch.distributed.barrier()
    return result, time.perf_counter() - began


def rank(args):
    import gpt
    import torch.distributed as dist

    import fcdp

    sys.argv[1:] = ["--bf16", f"--layers={args.layers}", f"--dim={args.dim}", f"--batch={args.batch}"]
    settings, folder = gpt.arguments(), pathlib.Path(args.rank)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = gpt.GPT(settings)
    gpt.shard(model, settings, torch.device("cpu"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr[0])
    data = gpt.batches(gpt.load_text(None), settings, torch.device("cpu"))
    changes, times = fcdp.changed(model), []
    for step in range(WARM_UP_STEPS + args.steps):
        torch.save(list(changes), folder / f"step{step}-rank{dist.get_rank()}.pt")
        _, step_s = timed(lambda: gpt.train_step(model, optimizer, data, settings))
        version = changes.version
        changes, changed_s = timed(lambda: fcdp.changed(version))
        times.append(changed_s / step_s)
    torch.save(list(changes), folder / f"step{WARM_UP_STEPS + args.steps}-rank{dist.get_rank()}.pt")
    weights = {name: parameter.full_tensor().to(torch.bfloat16) for name, parameter in model.named_parameters()}
    if dist.get_rank() == 0:
        torch.save({"weights": weights, "times": times[WARM_UP_STEPS:]}, folder / "job.pt")
    dist.destroy_process_group()


def measure(args, lr, folder):
    """Bytes changed by W, and seconds by the step's."""
    import fcdp
    from fcdp_lab.port import free_port

    env = os.environ | {"WORLD_SIZE": str(WORLD), "LOCAL_WORLD_SIZE": str(WORLD), "MASTER_ADDR": "127.0.0.1"}
    env |= {
        "MASTER_PORT": str(free_port()),
        "OMP_NUM_THREADS": "1",
        "FCDP": "1",
        "FCDP_LOCAL_SIZE": "2",
        "FCDP_LOG": "quiet",
    }
    options = [f"--{name}={getattr(args, name)}" for name in ("steps", "layers", "dim", "batch")] + ["--lr", str(lr)]
    command = [sys.executable, __file__, "--rank", folder, *options]
    ranks = [subprocess.Popen(command, env=env | {"RANK": str(i), "LOCAL_RANK": str(i)}) for i in range(WORLD)]
    ended = [process.wait() for process in ranks]
    if any(ended):
        sys.exit(f"the ranks ended with {ended}")
    job = torch.load(folder / "job.pt")
    weights, n_bytes = {name: torch.zeros_like(tensor) for name, tensor in job["weights"].items()}, []
    for step in range(WARM_UP_STEPS + args.steps + 1):
        changes = [one for path in folder.glob(f"step{step}-*.pt") for one in torch.load(path)]
        fcdp.apply(weights, changes)
        n_bytes.append(sum(len(blocks) for _, blocks in changes))
    if not all(torch.equal(weights[name], tensor) for name, tensor in job["weights"].items()):
        sys.exit("the weights that were rebuilt are not the job's")
    w = sum(tensor.nbytes for tensor in weights.values())
    return statistics.median(n_bytes[WARM_UP_STEPS + 1 :]) / w, statistics.median(job["times"])


def main():
    args = arguments()
    if args.rank:
        return rank(args)
    print("| learning rate | changed, of W | the call, of a step |\n| --- | --- | --- |")
    for lr in args.lr:
        with tempfile.TemporaryDirectory() as folder:
            changed, seconds = measure(args, lr, pathlib.Path(folder))
        print(f"| {lr:g} | {changed:.3f} | {seconds:.3f} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
