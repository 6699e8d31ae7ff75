"""Measures FCDP's own host time: what the training loop's thread spends in an unshard and a reshard of a group whose
parameters are all cached, beside what it spends in plain FSDP2's.

Two ranks, which stand for two nodes, train blocks of nine parameters on torch.device("sim"), where the host runs ahead
of the device as it does on a GPU. What is counted is the thread's CPU time in FSDPParamGroup's unshard, wait_for_unshard
and reshard of the blocks in backward: the collectives, the operators and the waits of other threads are in none of it.
Much of it is FSDP2's own, whoever gathers: how long a pair takes where nothing is gathered, nor freed, is measured as
well. The three kinds of run take turns; a figure is the median of rank 0's pairs in the median run. How many calls a pair makes into FCDP's
core is counted in a run of its own. The last line is for scripts:

    host per unshard and reshard: fcdp A us plain B us
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
WARM_UP_STEPS = 3


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--layers", type=int, default=12)
    add("--dim", type=int, default=32)
    add("--steps", type=int, default=20, help="measured steps of a run, after three others")
    add(
        "--rounds",
        type=int,
        default=5,
        help="runs with FCDP, and as many of plain FSDP2 and of one that gathers nothing",
    )
    add("--json", metavar="FILE", help="write the figures there too")
    add("--rank", choices=("time", "count", "bare"), help=argparse.SUPPRESS)
    return parser.parse_args()


def blocks(args):
    import torch

    class Block(torch.nn.Module):
        """Nine parameters, as a transformer's block has without biases (four of attention, three of a gated MLP, two norms)."""

        def __init__(self, dim):
            super().__init__()
            linear = torch.nn.Linear
            self.q, self.k, self.v, self.o = (linear(dim, dim, bias=False) for _ in range(4))
            self.gate, self.up, self.down = (linear(dim, dim, bias=False) for _ in range(3))
            self.norm1, self.norm2 = (torch.nn.RMSNorm(dim) for _ in range(2))

        def forward(self, x):
            y = self.norm1(x)
            x = x + self.o(self.q(y) + self.k(y) + self.v(y))
            y = self.norm2(x)
            return x + self.down(self.gate(y) * self.up(y))

    torch.manual_seed(0)
    return torch.nn.Sequential(*(Block(args.dim) for _ in range(args.layers)), torch.nn.Linear(args.dim, 1))


class Meter:
    """The thread's CPU time, or its calls into the core, in each block's unshard and reshard of one backward."""

    def __init__(self, read):
        self.read, self.inside, self.of = read, False, {}

    def around(self, cls, name):
        import torch

        original = getattr(cls, name)

        def measured(param_group, *args, **kwargs):
            if self.inside or torch._C._current_graph_task_id() == -1 or not param_group._module_fqn:
                return original(param_group, *args, **kwargs)
            self.inside, before = True, self.read()
            try:
                return original(param_group, *args, **kwargs)
            finally:
                spent = self.read() - before
                self.inside = False
                self.of[param_group._module_fqn] = self.of.get(param_group._module_fqn, 0) + spent

        setattr(cls, name, measured)

    def taken(self):
        values, self.of = list(self.of.values()), {}
        return values


def calls_counted(module):
    """Wraps each function of the core and each method of its types; returns how to read the number of calls."""
    n = 0

    def counting(function):
        def counted(*args, **kwargs):
            nonlocal n
            n += 1
            return function(*args, **kwargs)

        return counted

    types = [kind for kind in vars(module).values() if isinstance(kind, type) and kind.__module__ == module.__name__]
    for owner in (module, *types):
        for name, function in list(vars(owner).items()):
            if callable(function) and not isinstance(function, type) and not name.startswith("__"):
                setattr(owner, name, counting(function))
    return lambda: n


def gather_nothing():
    """FSDP2 takes what it has in its parameters' storages for gathered, and frees none: the rest of a pair is its own."""
    import torch
    from torch.distributed.fsdp._fully_shard import _fsdp_param, _fsdp_param_group

    nothing = _fsdp_param_group.AllGatherResult(torch.empty(0), None, None, [], [], [])

    def copy_out(result, fsdp_params, group, **kwargs):
        for p in fsdp_params:
            if not p.all_gather_outputs:
                shard = p._sharded_param_data
                p.init_all_gather_outputs([shard.numel()], [shard.dtype], group.size(), p.device)
                p.all_gather_outputs[0].zero_()

    _fsdp_param_group.foreach_all_gather = lambda *args: nothing
    _fsdp_param_group.foreach_all_gather_copy_out = copy_out
    _fsdp_param.free_storage = lambda tensor: None


def rank(args):
    """One rank; rank 0 prints the pairs' figures as JSON."""
    sys.path.insert(0, str(ROOT / "sim" / "torch"))
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    import torch_sim  # noqa: F401 (registers the device)

    torch.set_num_threads(1)
    dist.init_process_group()
    mesh = dist.init_device_mesh("sim", (dist.get_world_size(),))
    model = blocks(args).to("sim")
    for block in model[:-1]:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    read = time.thread_time_ns
    if args.rank == "count":
        from fcdp import _fcdp

        read = calls_counted(_fcdp)
    elif args.rank == "bare":
        gather_nothing()
    meter = Meter(read)
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

    for name in ("unshard", "wait_for_unshard", "reshard"):
        meter.around(FSDPParamGroup, name)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    pairs = []
    for step in range(WARM_UP_STEPS + args.steps):
        x = torch.ones(4, args.dim).to("sim")
        model(x).sum().backward()
        spent = meter.taken()
        optimizer.step()
        optimizer.zero_grad()
        torch.sim.synchronize()
        pairs += spent if step >= WARM_UP_STEPS else []
    if dist.get_rank() == 0:
        print(json.dumps(pairs))
    dist.destroy_process_group()


def run(args, fcdp, what="time"):
    """The figures of rank 0's pairs."""
    from fcdp_lab.port import free_port

    port, processes = free_port(), []
    for i in range(2):
        env = os.environ | {"RANK": str(i), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
        env |= {"FCDP": str(int(fcdp)), "FCDP_LOCAL_SIZE": "1", "FCDP_LOG": "quiet", "FCDP_TRANSPORT": "torch"}
        env["FCDP_TAU"] = "0"  # each use restores
        sizes = [f"--{name}={getattr(args, name)}" for name in ("layers", "dim", "steps")]
        command = [sys.executable, __file__, "--rank", what, *sizes]
        processes.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True))
    said = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        sys.exit(f"the ranks ended with {[process.returncode for process in processes]}")
    return json.loads(said[0].splitlines()[-1])


def main():
    args = arguments()
    if args.rank:
        return rank(args)
    kinds = {"FCDP=1": (True, "time"), "plain": (False, "time"), "bare": (False, "bare")}
    medians = {kind: [] for kind in kinds}
    for i in range(args.rounds):
        for kind in list(kinds)[:: -1 if i % 2 else 1]:
            medians[kind].append(statistics.median(run(args, *kinds[kind])) / 1e3)
            print(f"{kind:6} {medians[kind][-1]:7.1f} us", flush=True)
    calls = statistics.median(run(args, True, "count"))
    fcdp, plain, bare = (statistics.median(medians[kind]) for kind in kinds)
    print(f"calls into the core per unshard and reshard: {calls:g}")
    print(
        f"FSDP2 alone, without a gather: {bare:.1f} us; FCDP beside it {fcdp - bare:.1f} us, plain gathers {plain - bare:.1f} us"
    )
    print(f"host per unshard and reshard: fcdp {fcdp:.1f} us plain {plain:.1f} us")
    if args.json:
        figures = {"fcdp_us": fcdp, "plain_us": plain, "bare_us": bare, "calls": calls}
        pathlib.Path(args.json).write_text(json.dumps(figures) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
