"""Turning FCDP on: a hook that waits for FSDP2 to be imported, and patches it then.

The wheel's fcdp.pth imports this module at interpreter start when FCDP is set and not 0; unset, nothing of FCDP is imported.
A malformed option must stop the job before its first step, but may not break `import site`; so options are read
when FSDP2 is imported, where an exception reaches the script.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from types import ModuleType

# The last of FSDP2's modules to load that FCDP enters; it imports the others.
_TARGET = "torch.distributed.fsdp._fully_shard._fsdp_state"


class _AfterImport(importlib.abc.MetaPathFinder):
    """Runs `_patch` right after `_TARGET` has been executed, once."""

    def find_spec(self, name, path, target=None):
        if name != _TARGET:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            _patch(module)

        spec.loader.exec_module = exec_module
        return spec


def _patch(module: ModuleType) -> None:
    try:
        from fcdp import fsdp2
    except ImportError as error:  # a wheel of another platform, say
        print(f"fcdp: plain FSDP2 runs: FCDP's core cannot be loaded ({error}); install the fcdp wheel again", file=sys.stderr, flush=True)
        return
    fsdp2.install(module)


def install() -> None:
    """Idempotent. Patches now if FSDP2 is loaded, else as soon as it is."""
    if _TARGET in sys.modules:
        _patch(sys.modules[_TARGET])
    elif not any(isinstance(finder, _AfterImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterImport())


install()
