"""Turns FCDP on: an import hook patches FSDP2 once it has been imported. The same hook watches the modules by
which a job without FSDP2 is recognised (unserved.py).

The wheel's fcdp.pth imports this module at interpreter start when FCDP is set and not 0; unset, nothing of
FCDP is imported. A malformed option must stop the job before its first step, but may not break `import site`;
so options are read when FSDP2 is imported, where an exception reaches the script.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from collections.abc import Callable
from types import ModuleType

# The last of FSDP2's modules to load that FCDP enters; it imports the others.
_TARGET = "torch.distributed.fsdp._fully_shard._fsdp_state"


class _AfterImport(importlib.abc.MetaPathFinder):
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


def _patch(module: ModuleType) -> None:
    try:
        from fcdp import fsdp2
    except ImportError as error:  # a wheel of another platform, say
        print(
            f"fcdp: plain FSDP2 runs: FCDP's core cannot be loaded ({error}); install the fcdp wheel again",
            file=sys.stderr,
            flush=True,
        )
        return
    fsdp2.install(module)


def _watch_optimizers(module: ModuleType) -> None:
    from fcdp import unserved

    unserved.watch_optimizers(module)


def _watch_process_groups(module: ModuleType) -> None:
    from fcdp import unserved

    unserved.watch_process_groups(module)


_ACTIONS = {
    _TARGET: _patch,
    "torch.optim.optimizer": _watch_optimizers,
    "torch.distributed.distributed_c10d": _watch_process_groups,
}


def install() -> None:
    """Idempotent. Acts now on what is loaded, and on the rest as soon as it is."""
    loaded = [name for name in _ACTIONS if name in sys.modules]
    if not any(isinstance(finder, _AfterImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterImport({name: action for name, action in _ACTIONS.items() if name not in loaded}))
        for name in loaded:
            _ACTIONS[name](sys.modules[name])
    elif _TARGET in loaded:
        _patch(sys.modules[_TARGET])


install()
