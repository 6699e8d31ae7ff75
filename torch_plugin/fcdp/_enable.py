"""Turns FCDP on: an import hook patches FSDP1 and FSDP2 once they have been imported. The same hook watches the
modules by which a job with neither is recognised (unserved.py).

The wheel's fcdp.pth imports this module at interpreter start when FCDP is set and not 0; unset, nothing of
FCDP is imported. A malformed option must stop the job before its first step, but may not break `import site`;
so options are read when an FSDP is imported, where an exception reaches the script.
"""

from __future__ import annotations

import functools
import importlib
import importlib.abc
import importlib.util
import os
import sys
from collections.abc import Callable
from types import ModuleType

import fcdp.ending  # noqa: F401 (it is to be what ends last)
from fcdp import words

# The last of FSDP's modules to load that FCDP enters; each imports the others. By the file that enters them.
_TARGETS = {
    "fsdp2": "torch.distributed.fsdp._fully_shard._fsdp_state",
    "fsdp1": "torch.distributed.fsdp.fully_sharded_data_parallel",
}


class AfterImport(importlib.abc.MetaPathFinder):
    """Runs a module's action right after the module has been executed, once."""

    def __init__(self, actions: dict[str, Callable[[ModuleType], None]]):
        self.actions = actions

    def find_spec(self, name, path, target=None):
        action = self.actions.pop(name, None)
        if action is None:
            return None
        spec = importlib.util.find_spec(name)  # comes here again, and finds no action
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            action(module)

        spec.loader.exec_module = exec_module
        return spec


_failed = False


def _patch(file: str, module: ModuleType) -> None:
    global _failed
    try:
        entry = importlib.import_module(f"fcdp.{file}")
    except ImportError as error:  # a wheel of another platform, say
        if not _failed:
            words.write(f"plain FSDP runs: FCDP's core cannot be loaded ({error}); install the fcdp wheel again")
        _failed = True
        return
    entry.install(module)


def _watch_optimizers(module: ModuleType) -> None:
    from fcdp import unserved

    unserved.watch_optimizers(module)


def _watch_process_groups(module: ModuleType) -> None:
    from fcdp import unserved

    unserved.watch_process_groups(module)


def _hide_from_dynamo(module: ModuleType) -> None:
    """FSDP1 calls its hooks from where dynamo compiles what is called; plain FSDP1's are in a file that it skips."""
    if hasattr(module, "add"):
        module.add("fcdp")


_ACTIONS = {
    **{target: functools.partial(_patch, file) for file, target in _TARGETS.items()},
    "torch.optim.optimizer": _watch_optimizers,
    "torch.distributed.distributed_c10d": _watch_process_groups,
    "torch._dynamo.trace_rules": _hide_from_dynamo,
}


def _order_communicators() -> None:
    """NCCL orders the collectives of several communicators on a device, torch's and FCDP's, where this variable is
    set before its first one. comm/nccl.c refuses NCCL where it is not."""
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    if c10d is None or not c10d.is_initialized():
        os.environ.setdefault("NCCL_LAUNCH_ORDER_IMPLICIT", "1")


def install() -> None:
    """Idempotent. Acts now on what is loaded, and on the rest as soon as it is."""
    _order_communicators()
    loaded = [name for name in _ACTIONS if name in sys.modules]
    if not any(isinstance(finder, AfterImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, AfterImport({name: action for name, action in _ACTIONS.items() if name not in loaded}))
        for name in loaded:
            _ACTIONS[name](sys.modules[name])
    else:
        for target in _TARGETS.values():
            if target in loaded:
                _ACTIONS[target](sys.modules[target])


install()
