"""Lives in every rank of a job that fcdp-plan profile measures: writes when FSDP2's groups were used into
$PLAN_FOLDER/rank<r>.json, once $PLAN_STEPS optimizer steps are made, and ends the rank. With PLAN_MARKS=0,
the marks are collectives alone, by their names, and optimizers, so that they cost the step next to nothing.

A mark is (kind, group, begin, end, seconds of collectives in it), in seconds of time.monotonic(). Kinds:

    forward, backward   an unshard: what follows computes with the group, until the next of these marks
    end                 the group's forward is over
    reduce              its gradients are reduced
    optimizer           an optimizer's step; group -1

An accelerator is waited for at each mark, so what is measured is computing, one group behind the other.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import sys
import threading
import time
from types import ModuleType
from typing import Any

from fcdp._enable import AfterImport

GROUPS = "torch.distributed.fsdp._fully_shard._fsdp_param_group"
KINDS = {"pre_forward": "forward", "pre_backward": "backward", "post_forward": "end", "post_backward": "reduce"}
COLLECTIVES = (
    "all_gather_into_tensor",
    "all_gather_single",  # its name since torch 2.15
    "reduce_scatter_tensor",
    "reduce_scatter_single",
    "all_reduce",
)
SAVES_IN_STEP = 1  # activations are counted in the second step, which is of the warm-up
POLL_S = 0.02


class Watch:
    def __init__(self, folder: str, steps: int):
        self.folder, self.path = folder, os.path.join(folder, f"rank{int(os.environ['RANK'])}")
        self.pid, self.steps, self.made = os.getpid(), steps, 0
        self.groups: list[Any] = []  # in the order of their first use
        self.marks: list[tuple[str, int, float, float, float]] = []
        self.gathers: list[dict[str, int]] = []  # of each group: unshards that gathered, in forward and in backward
        self.saved: list[int] = []  # of each group: bytes that its forward left for its backward
        self.collective_s = 0.0
        self.marks_collectives = False
        self.n_collectives = 0
        self.phase = "forward"
        self.optimizer: Any = None  # whose steps are counted: the first that steps
        self.optimizer_began = 0.0
        self.seen: set[int] | None = None  # storages that are counted already; None: nothing is
        self.linears: dict[int, dict[str, Any]] = {}  # bytes in and out of a forward, by a layer's id
        self.forwards: tuple[Any, ...] = ()  # the hooks that count them
        self.has_reported = False

    def install(self, marks: bool) -> None:
        groups = self._watch_groups if marks else self._watch_collectives
        sys.meta_path.insert(0, AfterImport({GROUPS: groups, "torch.optim.optimizer": self._watch_steps}))
        self.marks_collectives = not marks
        atexit.register(self.report)  # of a job that ends earlier

    # ---- FSDP2 ----

    def _watch_groups(self, module: ModuleType) -> None:
        cls = module.FSDPParamGroup
        for name, kind in KINDS.items():
            self._wrap_hook(cls, name, kind)
        self._wrap_unshard(cls)
        self._watch_collectives(module)

    def _watch_collectives(self, module: ModuleType) -> None:
        dist = sys.modules["torch.distributed"]
        for name in COLLECTIVES:
            if hasattr(dist, name):
                self._wrap_collective(dist, name)

    def _index(self, group: Any) -> int:
        for i, one in enumerate(self.groups):
            if one is group:
                return i
        self.groups.append(group)
        self.gathers.append({"forward": 0, "backward": 0})
        self.saved.append(0)
        return len(self.groups) - 1

    def _wrap_hook(self, cls: type, name: str, kind: str) -> None:
        hook = getattr(cls, name)

        @functools.wraps(hook)
        def marked(group: Any, *args: Any, **kwargs: Any) -> Any:
            synchronize(group.device)
            began, collectives_s = time.monotonic(), self.collective_s
            at = self._index(group)
            if kind in ("forward", "backward"):
                self.phase = kind
            try:
                return hook(group, *args, **kwargs)
            finally:
                synchronize(group.device)
                self._after(kind, at)
                self.marks.append((kind, at, began, time.monotonic(), self.collective_s - collectives_s))

        setattr(cls, name, marked)

    def _wrap_unshard(self, cls: Any) -> None:
        """Backward unshards a group ahead of its use, so gathers are counted where they are made."""
        unshard = cls.unshard

        @functools.wraps(unshard)
        def counted(group: Any, *args: Any, **kwargs: Any) -> Any:
            before = self.n_collectives
            result = unshard(group, *args, **kwargs)
            if self.n_collectives > before:
                self.gathers[self._index(group)][self.phase] += 1
            return result

        cls.unshard = counted

    def _wrap_collective(self, dist: ModuleType, name: str) -> None:
        collective = getattr(dist, name)

        @functools.wraps(collective)
        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.monotonic()
            try:
                return collective(*args, **kwargs)
            finally:
                ended = time.monotonic()
                self.collective_s += ended - began
                self.n_collectives += 1
                if self.marks_collectives:
                    self.marks.append((name, -1, began, ended, 0.0))

        setattr(dist, name, timed)

    # ---- activations ----

    def _after(self, kind: str, at: int) -> None:
        if kind == "forward" and self.made == SAVES_IN_STEP and self.seen is None:
            self.seen = set()
            sys.modules["torch"]._C._autograd._push_saved_tensors_default_hooks(self._save, lambda tensor: tensor)
            self.forwards = self._watch_linears()
        if self.seen is not None and kind == "forward":
            self.seen |= parameter_storages(self.groups[at])

    def _save(self, tensor: Any) -> Any:
        """Count the storage of what autograd saves, once, unless it is a parameter's."""
        storage = tensor.untyped_storage()
        if self.seen is not None and self.phase == "forward" and storage._cdata not in self.seen:
            self.seen.add(storage._cdata)
            if self.marks:
                at = next((mark[1] for mark in reversed(self.marks) if mark[0] == "forward"), 0)
                self.saved[at] += storage.nbytes()
        return tensor.detach()

    def _stop_saving(self) -> None:
        if self.seen is not None and self.made == SAVES_IN_STEP:
            sys.modules["torch"]._C._autograd._pop_saved_tensors_default_hooks()
            for hook in self.forwards:
                hook.remove()
            self.seen = None

    def _watch_linears(self) -> tuple[Any, Any]:
        module = sys.modules["torch"].nn.modules.module
        before = module.register_module_forward_pre_hook(self._before_linear)
        return before, module.register_module_forward_hook(self._after_linear)

    def _before_linear(self, module: Any, inputs: Any) -> None:
        """A layer that is recomputed in backward is gathered once more there. Its recomputation may stop inside of it."""
        if id(module) in self.linears and sys.modules["torch"]._C._current_graph_task_id() != -1:
            self.linears[id(module)]["extra_gathers"] = 1

    def _after_linear(self, module: Any, inputs: Any, output: Any) -> None:
        """Of one forward."""
        if is_linear(module) and inputs:
            moved = {"input_bytes": inputs[0].nbytes, "output_bytes": output.nbytes}
            self.linears.setdefault(id(module), moved)

    # ---- steps ----

    def _watch_steps(self, module: ModuleType) -> None:
        module.register_optimizer_step_pre_hook(self._before_step)
        module.register_optimizer_step_post_hook(self._after_step)

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._stop_saving()
        synchronize_parameters(optimizer)
        self.optimizer_began = time.monotonic()

    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        synchronize_parameters(optimizer)
        self.marks.append(("optimizer", -1, self.optimizer_began, time.monotonic(), 0.0))
        self.optimizer = self.optimizer or optimizer
        if self.optimizer is not optimizer:
            return
        self.made += 1
        if self.made == self.steps:
            self.report()
            self._end_with_the_others()

    def _end_with_the_others(self) -> None:
        """A rank that ended earlier would break its peers' last collective."""
        ranks = [os.path.join(self.folder, f"rank{r}.json") for r in range(int(os.environ["WORLD_SIZE"]))]
        while not all(map(os.path.exists, ranks)):
            threading.Event().wait(POLL_S)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)

    def report(self) -> None:
        if self.has_reported or os.getpid() != self.pid:
            return
        self.has_reported = True
        report = {
            "steps": self.made,
            "device": self.groups[0].device.type if self.groups else "cpu",
            "groups": [describe(group) for group in self.groups],
            "linears": [linears_of(group, self.linears) for group in self.groups],
            "gathers": self.gathers,
            "saved": self.saved,
            "state": state_bytes(self.optimizer) if self.optimizer else None,
            "marks": self.marks,
        }
        with open(f"{self.path}.part", "w") as file:
            json.dump(report, file)
        os.rename(f"{self.path}.part", f"{self.path}.json")


def synchronize(device: Any) -> None:
    if device.type != "cpu":
        sys.modules["torch"].get_device_module(device).synchronize(device)


def synchronize_parameters(optimizer: Any) -> None:
    first = next((p for group in optimizer.param_groups for p in group["params"]), None)
    if first is not None:
        synchronize(first.device)


def parameter_storages(group: Any) -> set[int]:
    found = (getattr(p, "_unsharded_param", None) for p in group.fsdp_params)
    return {tensor.untyped_storage()._cdata for tensor in found if tensor is not None}


def is_linear(module: Any) -> bool:
    """What fcdp.split() splits: no subclass, but for the one that fully_shard makes."""
    cls = type(module)
    if cls.__name__.startswith("FSDP") and len(cls.__bases__) == 2:
        cls = cls.__bases__[1]
    return cls is sys.modules["torch"].nn.Linear


def linears_of(group: Any, counted: dict[int, dict[str, Any]]) -> list[dict[str, Any]]:
    """Its linear layers with weights of their own, of those that were used in a forward."""
    found: dict[int, dict[str, Any]] = {}
    for p in group.fsdp_params:
        of, fqn = p._module_info, p._param_fqn
        if not is_linear(of.module) or of.shared_modules or fqn is None or id(of.module) not in counted:
            continue
        rows, columns = of.module.out_features, of.module.in_features
        name = fqn.rpartition(".")[0]
        one = {"name": name, "rows": rows, "columns": columns, "trainable": 0, "frozen": 0, **counted[id(of.module)]}
        layer = found.setdefault(id(of.module), one)
        layer["trainable" if p.sharded_param.requires_grad else "frozen"] += p._orig_size.numel()
    return list(found.values())


def reduced_dtype(group: Any, parameter: Any, gathered: Any) -> Any:
    """Of gradients. Where the policy has none, torch 2.15 reduces in the dtype of the parameter, older ones as gathered."""
    return group._reduce_dtype or getattr(parameter, "unsharded_grad_dtype", None) or gathered


def describe(group: Any) -> dict[str, Any]:
    """Numbers of parameters, and their bytes: as gathered, as sharded, and of gradients as reduced."""
    sums = dict.fromkeys(("trainable", "frozen", "gathered_bytes", "shard_bytes", "reduced_bytes"), 0)
    for p in group.fsdp_params:
        n, gathered = p._orig_size.numel(), p.param_dtype or p.orig_dtype
        trains = p.sharded_param.requires_grad
        sums["trainable" if trains else "frozen"] += n
        sums["gathered_bytes"] += n * gathered.itemsize
        sums["shard_bytes"] += n * p.orig_dtype.itemsize
        sums["reduced_bytes"] += n * reduced_dtype(group, p, gathered).itemsize if trains else 0
    dtypes = {str(p.param_dtype or p.orig_dtype).removeprefix("torch.") for p in group.fsdp_params}
    return {"name": group._module_fqn or "", "dtypes": sorted(dtypes), **sums}


def state_bytes(optimizer: Any) -> dict[str, int]:
    """Of this rank: the optimizer's state, and the numbers that it has state of."""
    tensors = [p for p, state in optimizer.state.items() if state]
    local = [p.to_local() if hasattr(p, "to_local") else p for p in tensors]
    held = [v for state in optimizer.state.values() for v in state.values() if hasattr(v, "element_size")]
    held = [v.to_local() if hasattr(v, "to_local") else v for v in held]
    return {"bytes": sum(v.numel() * v.element_size() for v in held), "numbers": sum(p.numel() for p in local)}


def install() -> None:
    """Only this process gets the variables: its children are not ranks."""
    watch = Watch(os.environ.pop("PLAN_FOLDER"), int(os.environ.pop("PLAN_STEPS")))
    watch.install(marks=os.environ.pop("PLAN_MARKS", "1") != "0")
