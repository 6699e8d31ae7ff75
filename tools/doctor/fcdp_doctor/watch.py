"""Lives in every rank that fcdp-doctor starts: writes fcdp.stats() into $DOCTOR_FOLDER/rank<r>.json, once as many
optimizer steps are made as it waits for, or at the rank's end. Then the rank waits for fcdp-doctor to end it, so that
its peers find it alive.

An uncaught exception is written into rank<r>.error, with its time: the first of them is the cause.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import threading
import time
import traceback
import weakref
from types import ModuleType
from typing import Any

from fcdp._enable import AfterImport


class Watch:
    def __init__(self, folder: str, steps: int):
        self.path = os.path.join(folder, f"rank{int(os.environ['RANK'])}")
        self.pid, self.steps, self.made = os.getpid(), steps, 0
        self.optimizer: Any = None  # whose steps are counted: the first that steps
        self.first: dict[str, Any] | None = None  # fcdp.stats() after its first step
        self.has_reported = False

    def install(self) -> None:
        hooks = {"torch.optim.optimizer": self._watch_optimizers, "fcdp.runtime": self._watch_runtime}
        sys.meta_path.insert(0, AfterImport(hooks))
        atexit.register(self.report)  # of a job that imports no FSDP
        earlier = sys.excepthook

        def hook(kind: type[BaseException], value: BaseException, trace: Any) -> None:
            with open(f"{self.path}.error", "w") as file:
                said = "".join(traceback.format_exception(kind, value, trace))
                json.dump({"t": time.monotonic(), "traceback": said}, file)
            earlier(kind, value, trace)

        sys.excepthook = hook

    def _watch_runtime(self, module: ModuleType) -> None:
        """The engine's exit function is registered by now, so this one runs before it."""
        atexit.register(self.report)

    def _watch_optimizers(self, module: ModuleType) -> None:
        module.register_optimizer_step_post_hook(self._after_step)

    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self.optimizer = self.optimizer or weakref.ref(optimizer)
        if self.optimizer() is not optimizer:
            return
        self.made += 1
        if self.made == 1:
            self.first = _stats()
        if self.made == self.steps:
            self.report()
            threading.Event().wait()

    def report(self) -> None:
        if self.has_reported or os.getpid() != self.pid:
            return
        self.has_reported = True
        report = {
            "t": time.monotonic(),
            "steps": self.made,
            "is_complete": self.made == self.steps,
            "first": self.first,
            "last": _stats(),
        }
        with open(f"{self.path}.part", "w") as file:
            json.dump(report, file)
        os.rename(f"{self.path}.part", f"{self.path}.json")


def _stats() -> dict[str, Any]:
    import fcdp

    return fcdp.stats()


def install() -> None:
    """Only this process gets the variables: its children are not ranks."""
    Watch(os.environ.pop("DOCTOR_FOLDER"), int(os.environ.pop("DOCTOR_STEPS"))).install()
