"""Trains a GPT on one GPU under PyTorch's own allocator, under its expandable segments, and under fcdp_alloc,
and prints how they compare: steps per second (medians of interleaved runs), peak reserved over peak
allocated, and the largest batch that fits a share of the device.

Every run is a process of its own. Sequence lengths vary from step to step, the same in every run, since equal
steps fragment nothing.
"""

import argparse
import json
import os
import pathlib
import random
import statistics
import subprocess
import sys
import time

import torch
import torch.nn.functional as F

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "demo"))
from gpt import GPT, VOCABULARY

ALLOCATORS = {
    "PyTorch native": {"PYTORCH_CUDA_ALLOC_CONF": ""},
    "expandable segments": {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
    "FCDP": {"PYTORCH_CUDA_ALLOC_CONF": "", "FCDP_BENCH_ALLOC": "1"},
}


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--layers", type=int, default=12)
    add("--dim", type=int, default=1024)
    add("--heads", type=int, default=16)
    add("--seq", type=int, default=1024, help="the longest sequence; steps take half of it to all of it")
    add("--batch", type=int, default=8)
    add("--steps", type=int, default=30, help="measured steps of a run, after five others")
    add("--rounds", type=int, default=3, help="runs under each allocator")
    add("--memory", type=float, default=16.0, metavar="GIB", help="device memory in which the largest batch is sought")
    add("--most", type=int, default=1 << 16, help="the largest batch that is tried; 0: none is sought")
    add(
        "--seconds",
        type=float,
        default=float("inf"),
        help="begin nothing new after so long: what is not found by then is left out",
    )
    add("--json", metavar="FILE", help="write the figures there too")
    add("--one", choices=("speed", "batch"), help=argparse.SUPPRESS)
    add("--device", default="cuda", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.lora = 0
    return args


def step(model, optimizer, args, batch, length):
    tokens = torch.randint(VOCABULARY, (batch, length + 1), device=args.device)
    with torch.autocast(args.device, torch.bfloat16):
        logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def lengths(args, n):
    draw = random.Random(1)
    return [draw.randrange(args.seq // 2, args.seq + 1) for _ in range(n)]


def build(args):
    torch.manual_seed(0)
    model = GPT(args).to(args.device)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=args.device == "cuda")


def synchronize(args):
    if args.device == "cuda":
        torch.cuda.synchronize()


def speed(args, stats):
    model, optimizer = build(args)
    for length in lengths(args, 5):
        step(model, optimizer, args, args.batch, length)
    synchronize(args)
    began = time.perf_counter()
    for length in lengths(args, args.steps):
        step(model, optimizer, args, args.batch, length)
    synchronize(args)
    seconds = time.perf_counter() - began
    now = stats()
    states = 4 * sum(p.numel() * p.element_size() for p in model.parameters())  # parameters, gradients, AdamW's two
    return {
        "steps_per_s": args.steps / seconds,
        "reserved": now.get("reserved_bytes.all.peak", 0),
        "allocated": now.get("allocated_bytes.all.peak", 0),
        "states": states,
    }


def fits(args, batch):
    model, optimizer = build(args)
    try:
        for length in lengths(args, 8):
            step(model, optimizer, args, batch, length)
        synchronize(args)
        return True
    except torch.OutOfMemoryError:
        return False


def one(args):
    """A run in this process, as JSON on stdout."""
    stats = dict
    if args.device == "cuda":
        stats = torch.cuda.memory_stats
        if os.environ.pop("FCDP_BENCH_ALLOC", ""):
            import fcdp

            torch.cuda.memory.change_current_allocator(fcdp.fcdp_alloc)
        if args.one == "batch":
            total = torch.cuda.get_device_properties(0).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, args.memory * 2**30 / total))
    print(json.dumps(speed(args, stats) if args.one == "speed" else {"fits": fits(args, args.batch)}))


class Failed(Exception):
    """A run ended badly; the text says how."""


class OutOfTime(Exception):
    """--seconds have passed."""


def run(name, args, kind, batch):
    left = args.deadline - time.monotonic()
    if left <= 0:
        raise OutOfTime
    command = [sys.executable, __file__, "--one", kind, "--device", args.device, "--batch", str(batch)]
    for option in ("layers", "dim", "heads", "seq", "steps", "memory"):
        command += [f"--{option}", str(getattr(args, option))]
    try:
        job = subprocess.run(
            command, env={**os.environ, **ALLOCATORS[name]}, stdout=subprocess.PIPE, text=True, timeout=min(left, 1e6)
        )
    except subprocess.TimeoutExpired:
        raise OutOfTime from None
    if job.returncode:
        raise Failed(f"the run under {name} ended with {job.returncode}")
    return json.loads(job.stdout.splitlines()[-1])


def progress(text):
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def largest_batch(name, args, guess):
    """From `guess` (1, or what fitted under another allocator) up or down in growing steps, then by halves."""

    def fits(batch):
        progress(f"{name}: does a batch of {batch} fit?")
        return run(name, args, "batch", batch)["fits"]

    good, bad, reach = 0, args.most + 1, 1
    while bad - good > 1 and reach:
        if fits(guess):
            good, reach, guess = guess, 2 * reach, min(guess + reach, bad - 1)
        else:
            bad, reach, guess = guess, 2 * reach, max(guess - reach, good + 1)
        reach = reach if good == 0 or bad == args.most + 1 else 0
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if fits(middle) else (good, middle)
    return good


def likely_batch(args, results):
    """What should fit, by what a run took: what is there for any batch, and so much for each sequence."""
    if not results or results[0]["allocated"] <= results[0]["states"]:
        return 1
    each = (results[0]["allocated"] - results[0]["states"]) / args.batch
    return max(1, min(args.most, int((args.memory * 2**30 - results[0]["states"]) / each)))


def measure(args):
    """Figures of each allocator. One that fails has that said among its figures, and the others are measured."""
    runs, figures = {name: [] for name in ALLOCATORS}, {name: {"largest_batch": None} for name in ALLOCATORS}
    try:
        for round_ in range(args.rounds):
            for name in ALLOCATORS:
                progress(f"round {round_ + 1} of {args.rounds}: {name}")
                if "failed" not in figures[name]:
                    attempt(figures[name], lambda: runs[name].append(run(name, args, "speed", args.batch)))
    except OutOfTime:
        pass
    for name, results in runs.items():
        if results:
            figures[name] |= {key: statistics.median(result[key] for result in results) for key in results[0]}
    guess = likely_batch(args, next((results for results in runs.values() if results), []))
    for name in ALLOCATORS:
        try:
            if "failed" not in figures[name] and args.most:
                attempt(figures[name], lambda: figures[name].update(largest_batch=largest_batch(name, args, guess)))
        except OutOfTime:
            break
        guess = figures[name]["largest_batch"] or guess
    return figures


def attempt(figures, measure_one):
    try:
        measure_one()
    except Failed as error:
        figures["failed"] = str(error)


def row(name, f, better):
    if "steps_per_s" not in f:
        return f"| {name} | {f.get('failed', 'not measured')} | | | | |"
    over = f["reserved"] / f["allocated"] if f["allocated"] else float("nan")
    batch = f.get("failed", "not found") if f["largest_batch"] is None else f["largest_batch"]
    return f"| {name} | {f['steps_per_s']:.2f} | {f['steps_per_s'] / better:.3f} | {f['reserved'] / 2**20:.0f} | {over:.3f} | {batch} |"


def main():
    args = arguments()
    args.deadline = time.monotonic() + args.seconds
    if args.device == "cuda" and not torch.cuda.is_available():
        print("No CUDA device can be reached: training under PyTorch's allocators and FCDP's was not measured.")
        return
    if args.one:
        one(args)
        return
    figures = measure(args)
    progress("")
    better = max((figures[name].get("steps_per_s", 0) for name in list(ALLOCATORS)[:2]), default=0) or float("nan")
    print(
        f"| allocator | steps/s | of PyTorch's better | peak reserved, MiB | over allocated | largest batch in {args.memory:g} GiB |"
    )
    print("| --- | --- | --- | --- | --- | --- |")
    for name, f in figures.items():
        print(row(name, f, better))
    if args.json:
        pathlib.Path(args.json).write_text(json.dumps(figures, indent=1))
    failed = [f["failed"] for f in figures.values() if "failed" in f]
    if failed and not args.json:
        sys.exit(failed[0])


if __name__ == "__main__":
    main()
