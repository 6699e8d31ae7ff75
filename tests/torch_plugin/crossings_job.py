"""One rank: trains blocks of nine parameters, and counts the calls into the extension in each block's unshard, wait and
reshard of a backward, where all of it is cached. argv: the folder of a file for each rank."""

import json
import os
import pathlib
import sys

import torch
import torch.distributed as dist

import compat

N_STEPS = 3
n_calls, by_block, is_inside = 0, {}, False


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8, bias=False) for _ in range(9))

    def forward(self, x):
        return x + sum(layer(x) for layer in self.layers)


def count_calls(module):
    def counting(function):
        def counted(*args, **kwargs):
            global n_calls
            n_calls += 1
            return function(*args, **kwargs)

        return counted

    types = [kind for kind in vars(module).values() if isinstance(kind, type) and kind.__module__ == module.__name__]
    for owner in (module, *types):
        for name, function in list(vars(owner).items()):
            if callable(function) and not isinstance(function, type) and not name.startswith("__"):
                setattr(owner, name, counting(function))


def count_in(cls, name):
    original = getattr(cls, name)

    def counted(param_group, *args, **kwargs):
        global is_inside
        if is_inside or torch._C._current_graph_task_id() == -1 or not param_group._module_fqn:
            return original(param_group, *args, **kwargs)
        is_inside, before = True, n_calls
        try:
            return original(param_group, *args, **kwargs)
        finally:
            is_inside = False
            mine = by_block.setdefault(param_group._module_fqn, {})
            mine[name] = mine.get(name, 0) + n_calls - before

    setattr(cls, name, counted)


def main():
    compat.prepare()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

    from fcdp import _fcdp

    model = torch.nn.Sequential(*(Block() for _ in range(4)), torch.nn.Linear(8, 1))
    for block in model[:-1]:
        fully_shard(block)
    fully_shard(model)
    count_calls(_fcdp)
    for name in ("unshard", "wait_for_unshard", "reshard"):
        count_in(FSDPParamGroup, name)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    pairs = []
    for _ in range(N_STEPS):
        by_block.clear()
        model(torch.ones(2, 8)).sum().backward()
        # The first of a backward asks for all.
        pairs += [dict(calls) for name, calls in by_block.items() if name != "3"]
        optimizer.step()
        optimizer.zero_grad()
    pathlib.Path(sys.argv[1], f"rank{os.environ['RANK']}.json").write_text(json.dumps(pairs))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
