"""A torch whose FSDP2 or FSDP1 differs from every one that FCDP knows, made from the one that is there: OTHER_SEAM
names the function that takes its arguments under other names.  FSDP itself works as before."""

import importlib.abc
import importlib.util
import os
import sys

MODULE = {
    "_reduce_grad": "torch.distributed.fsdp._runtime_utils",
}.get(os.environ.get("OTHER_SEAM"), "torch.distributed.fsdp._fully_shard._fsdp_collectives")


def change(module):
    name = os.environ["OTHER_SEAM"]
    inner = getattr(module, name)

    def foreach_all_gather(units, process_group, overlapped, *others, **more):
        return inner(units, process_group, overlapped, *others, **more)

    def foreach_all_gather_copy_out(gathered, units, *others, **more):
        return inner(gathered, units, *others, **more)

    def _reduce_grad(owner, flat):
        return inner(owner, flat)

    changed = (foreach_all_gather, foreach_all_gather_copy_out, _reduce_grad)
    setattr(module, name, {f.__name__: f for f in changed}[name])


class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            change(module)

        spec.loader.exec_module = exec_module
        return spec


if os.environ.get("OTHER_SEAM"):
    sys.meta_path.insert(0, Finder())
