"""Reports that a job under FCDP=1 has no FSDP modules: once, on rank 0, at the first optimizer step or else at exit.

FCDP begins when FSDP is imported, which DDP and hand-written loops may never do. So _enable.py calls the two
functions below when torch's own modules have been imported; nothing here imports torch. A process that joined
no process group (torchrun's agent, a data loader's child, a helper that only imports torch) reports nothing.
"""

from __future__ import annotations

import atexit
import functools
import gc
import os
import sys
from types import ModuleType
from typing import Any

from fcdp import words

# (module, class, what to call it): looked for among living objects, where the module is loaded.
_WRAPPERS = (
    ("torch.distributed.fsdp", "FSDPModule", "FSDP2"),
    ("torch.distributed.fsdp", "FullyShardedDataParallel", "FSDP1"),
    ("torch.nn.parallel", "DistributedDataParallel", "DDP"),
    ("torch.nn.parallel", "DataParallel", "DataParallel"),
    ("deepspeed", "DeepSpeedEngine", "DeepSpeed"),
)


class _Process:
    """What this process has been seen to do."""

    stepped = False  # an optimizer
    joined: int | None = None  # its pid when it joined a process group: a forked child has not
    rank = 0
    reported = False


_process = _Process()


def watch_optimizers(module: ModuleType) -> None:
    """`module`: torch.optim.optimizer, just imported."""
    module.register_optimizer_step_post_hook(_after_step)


def watch_process_groups(module: ModuleType) -> None:
    """`module`: torch.distributed.distributed_c10d, just imported or (fcdp.enable()) long since. The process notes that
    it joined a group, since the group may be destroyed at exit."""
    original = module.init_process_group

    @functools.wraps(original)
    def init_process_group(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        _join(module.get_rank())
        return result

    for holder in (module, sys.modules["torch.distributed"]):  # the second has taken its names from the first, or will
        if getattr(holder, "init_process_group", None) is original:
            holder.init_process_group = init_process_group
    if module.is_initialized():
        _join(module.get_rank())
    atexit.register(_report)


def _join(rank: int) -> None:
    _process.joined, _process.rank = os.getpid(), rank
    if "fcdp.presence" in sys.modules:  # by what has patched FSDP; that announces itself where it comes later
        sys.modules["fcdp.presence"].begin()


def _after_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    if not _process.stepped:
        _process.stepped = True
        _report()


def _wrappers() -> set[str]:
    """How this process wraps its models. Looks at every object that Python tracks: a few tenths of a second in a
    large process."""
    classes = {
        found: label
        for module, name, label in _WRAPPERS
        if (found := getattr(sys.modules.get(module), name, None)) is not None
    }
    labels = {}  # by type, None: none
    for thing in gc.get_objects() if classes else ():
        kind = type(thing)
        if kind not in labels:
            labels[kind] = next((classes[base] for base in kind.__mro__ if base in classes), None)
    return {label for label in labels.values() if label}


def _uses_fsdp() -> bool:
    runtime, bypassed = (sys.modules.get(f"fcdp.{name}") for name in ("runtime", "bypassed"))
    return runtime is not None and runtime.runtime.engine is not None or bypassed is not None and bool(bypassed.groups)


def reason(trained: bool) -> str | None:
    """Why FCDP serves nothing here. None: it does, or FSDP may still come. `trained`: the job has made all of its
    models by now."""
    if _uses_fsdp():
        return None
    found = _wrappers()
    fsdp1 = sys.modules.get("fcdp.fsdp1")
    if "FSDP1" in found and fsdp1 is not None and fsdp1.unknown:
        return fsdp1.unknown
    if found & {"FSDP1", "FSDP2"} or not found and not trained:
        return None
    return f"this job has no FSDP modules (found: {', '.join(sorted(found)) or 'no wrapper'})"


def entries() -> list[dict[str, str]]:
    """For fcdp.stats()["bypassed"]."""
    why = reason(_process.stepped) if sys.modules.get("fcdp._enable") is not None else None
    return [{"group": "every group", "reason": why}] if why else []


def _report() -> None:
    if (
        _process.reported
        or _process.joined != os.getpid()
        or _process.rank != 0
        or os.environ.get("FCDP_LOG") == "quiet"
    ):
        return
    why = reason(True)
    if why:
        _process.reported = True
        words.write(f"FCDP=1, but {why}, so nothing was cached")
