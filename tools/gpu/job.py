"""One rank of a job: trains the demo's GPT with FSDP2, or its LoRA adapters with DPO, and writes what came out
as JSON. ranks.py starts it, with and without FCDP=1; nothing here knows of FCDP, except that its counters are
written too.

Losses and the final shards are written as digests of their bytes; every kernel that is used is deterministic,
so two runs of plain FSDP2 agree.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import json
import os
import pathlib
import statistics
import sys
import time
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "demo"))
import gpt

BETA = 0.1  # DPO's


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--out", type=pathlib.Path, required=True)
    add("--device", choices=("cpu", "cuda"), required=True)
    add("--backend", choices=("gloo", "nccl"), default="gloo")
    add("--layers", type=int, default=6)
    add("--dim", type=int, default=512)
    add("--heads", type=int, default=8)
    add("--seq", type=int, default=256)
    add("--batch", type=int, default=4)
    add("--warmup", type=int, default=2)
    add("--steps", type=int, default=6)
    add("--profile", type=int, default=0, metavar="STEPS", help="so many steps more, under torch's profiler on rank 0")
    add(
        "--dpo",
        action="store_true",
        help="train LoRA adapters with DPO: a no-grad reference forward between forward and backward",
    )
    args = parser.parse_args()
    args.lora, args.frozen = 8 if args.dpo else 0, 0  # the demo's
    return args


# ---- collectives of gloo on a device ----


def reduce_scatter_by_host(output, input, group=None, op=dist.ReduceOp.SUM, async_op=False):
    """Where gloo has none for device tensors: the sum of all on the host, of which this rank's part is taken."""
    total, size = input.cpu(), dist.get_world_size(group)
    dist.all_reduce(total, op=dist.ReduceOp.SUM, group=group)
    if op == dist.ReduceOp.AVG:
        total /= size
    output.copy_(total.view(size, -1)[dist.get_rank(group)].view_as(output))


def probe_reduce_scatter(device: torch.device) -> str:
    """What reduces gradients, alike with and without FCDP: "" is the backend itself."""
    size = dist.get_world_size()
    mine, out = torch.arange(2.0 * size, device=device), torch.empty(2, device=device)
    try:
        dist.reduce_scatter_tensor(out, mine)
        if torch.equal(out.cpu(), size * mine.cpu().view(size, 2)[dist.get_rank()]):
            return ""
        why = "it came to another sum"
    except (RuntimeError, ValueError, NotImplementedError) as error:
        why = str(error).splitlines()[0][:200]
    dist.reduce_scatter_tensor = reduce_scatter_by_host
    return f"the host, as gloo has no reduce-scatter for {device.type}: {why}"


# ---- the model ----

adapters_on = True


def adapted_forward(self, x):
    """gpt.Linear's, with adapters that can be left out, as DPO's reference does."""
    y = self.base(x)
    return y + self.up(self.down(x)) if self.down is not None and adapters_on else y


def build(args, device):
    gpt.Linear.forward = adapted_forward
    torch.manual_seed(0)
    model = gpt.GPT(args)
    gpt.freeze(model, args)
    if args.dpo:  # adapters that do something, or the first losses are all log 2
        for name, parameter in model.named_parameters():
            if ".up." in name:
                torch.nn.init.normal_(parameter, std=0.02)
    model.to(device)
    # Not init_device_mesh, which makes a group of NCCL's for devices where the job's is gloo's.
    mesh = DeviceMesh.from_group(dist.group.WORLD, device.type)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if args.backend == "gloo":  # which has no average
        for module in model.modules():
            if hasattr(module, "set_force_sum_reduction_for_comms"):
                module.set_force_sum_reduction_for_comms(True)
    return model


def log_likelihood(model, tokens):
    logits = model(tokens[:, :-1]).float()
    return -F.cross_entropy(logits.transpose(1, 2), tokens[:, 1:], reduction="none").sum(1)


def dpo_loss(model, tokens):
    """The batch's first half was preferred to its second."""
    global adapters_on
    policy = log_likelihood(model, tokens)
    adapters_on = False
    try:
        with torch.no_grad():
            reference = log_likelihood(model, tokens)
    finally:
        adapters_on = True
    chosen, rejected = (policy - reference).chunk(2)
    return -F.logsigmoid(BETA * (chosen - rejected)).mean()


def language_loss(model, tokens):
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())


class Training:
    def __init__(self, args, device):
        self.args, self.device = args, device
        self.model = build(args, device)
        self.trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(self.trained, lr=1e-3)
        self.data = torch.Generator().manual_seed(1000 + dist.get_rank())
        self.losses = []

    def step(self):
        batch = 2 * self.args.batch if self.args.dpo else self.args.batch
        tokens = torch.randint(gpt.VOCABULARY, (batch, self.args.seq + 1), generator=self.data).to(self.device)
        loss = (dpo_loss if self.args.dpo else language_loss)(self.model, tokens)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.detach())

    def synchronize(self):
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def steps(self, n):
        """Seconds of each, with the device's end of each."""
        took = []
        for _ in range(n):
            began = time.perf_counter()
            self.step()
            self.synchronize()
            took.append(time.perf_counter() - began)
        return took

    def run_ahead(self, n):
        """Seconds a step of n that nothing waits for in between, and the share of it that the host spent."""
        self.synchronize()
        began = time.perf_counter()
        for _ in range(n):
            self.step()
        host = time.perf_counter() - began
        self.synchronize()
        whole = time.perf_counter() - began
        return whole / n, host / whole

    def digest(self):
        """Of every loss and every shard, in their bytes."""
        sha = hashlib.sha256()
        for tensor in [*self.losses, *(p.to_local() for p in self.model.parameters())]:
            flat = tensor.detach().contiguous().cpu()
            sha.update(ctypes.string_at(flat.data_ptr(), flat.numel() * flat.element_size()) if flat.numel() else b"-")
        return sha.hexdigest()


# ---- what the device did ----


def idle_share(trace: pathlib.Path) -> dict[str, float] | None:
    """From a profiler's trace: how much of the steps no kernel, and nothing at all, of this rank ran on the
    device. None: the trace has no device."""
    events = [e for e in json.loads(trace.read_text())["traceEvents"] if e.get("ph") == "X"]
    spans = {
        kinds: sorted((e["ts"], e["ts"] + e["dur"]) for e in events if e.get("cat") in kinds)
        for kinds in (("kernel",), ("kernel", "gpu_memcpy", "gpu_memset"))
    }
    window = [
        (e["ts"], e["ts"] + e["dur"]) for e in events if e.get("name") == "steps" and e.get("cat") == "user_annotation"
    ]
    if not all(spans.values()) or not window:
        return None
    begin, end = min(w[0] for w in window), max(w[1] for w in window)
    shares = []
    for ranges in spans.values():
        busy, at = 0.0, begin
        for lower, upper in ranges:
            lower, upper = max(lower, at), min(upper, end)
            if upper > lower:
                busy, at = busy + upper - lower, upper
        shares.append(1 - busy / (end - begin))
    return {"no_kernel": shares[0], "nothing": shares[1]}


def profiled(training, n, folder):
    """The shares of rank 0, a reason why there are none, or None on the other ranks."""
    profiles = dist.get_rank() == 0 and training.device.type == "cuda"
    if not profiles:
        training.steps(n)
        return "torch's profiler sees no simulated device" if training.device.type == "cpu" else None
    from torch.profiler import ProfilerActivity, profile, record_function

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        with record_function("steps"):
            for _ in range(n):
                training.step()
            training.synchronize()
    trace = folder / "trace.json"
    profiler.export_chrome_trace(str(trace))
    shares = idle_share(trace)
    trace.unlink()  # tens of megabytes
    return shares or "the profiler's trace has no kernels: CUPTI cannot be used here"


agreement_s = 0.0  # of the host, so far


def watch_agreements():
    """Fingerprints and the meeting of the ranks, of which FCDP counts how many there are: from the core's first question
    to the ranks' answer."""
    from fcdp.group import Group

    settle, carry, began = Group.settle, Group.carry, []

    def settles(group):
        if not began:
            began.append(time.perf_counter())
        settle(group)

    def carries(group, votes):
        global agreement_s
        try:
            return carry(group, votes)
        finally:
            agreement_s += time.perf_counter() - began.pop()

    Group.settle, Group.carry = settles, carries


def counters():
    return sys.modules["fcdp"].stats() | {"agreement_s": agreement_s} if "fcdp" in sys.modules else None


def main():
    args = arguments()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    device = torch.device(args.device, 0) if args.device == "cuda" else torch.device("cpu")
    if args.device == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(args.backend)
    reduced_by = probe_reduce_scatter(device) if args.backend == "gloo" else ""
    if os.environ.get("FCDP") == "1":
        watch_agreements()
    training = Training(args, device)
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(SDPBackend.MATH) if args.device == "cuda" else nullcontext():
        training.steps(args.warmup)
        before = counters()
        took = training.steps(args.steps)
        after = counters()
        ahead = training.run_ahead(args.steps)
        last = counters()
        profile = profiled(training, args.profile, args.out) if args.profile else None
        result = {
            "losses": [float(loss) for loss in training.losses],
            "digest": training.digest(),
            "step_s": took,
            "step_median_s": statistics.median(took),
            "ahead_step_s": ahead[0],
            "ahead_host_share": ahead[1],
            "steps": args.steps,
            "before": before,
            "after": after,
            "last": last,
            "profile": profile,
            "reduced_by": reduced_by,
            "parameter_bytes": sum(p.numel() * p.element_size() for p in training.model.parameters()),
            "trained_bytes": sum(p.numel() * p.element_size() for p in training.trained),
            "device_peak_bytes": torch.cuda.max_memory_reserved() if device.type == "cuda" else 0,
            "allocator": torch._C._cuda_getAllocatorBackend() if device.type == "cuda" else "",
            "torch": torch.__version__,
        }
    path = args.out / f"rank{dist.get_rank()}.json"
    path.with_suffix(".new").write_text(json.dumps(result))
    os.replace(path.with_suffix(".new"), path)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
