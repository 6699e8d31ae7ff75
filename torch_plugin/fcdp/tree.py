"""What lies under one FSDP root, and the beginnings of its passes."""

from __future__ import annotations

from typing import Any

import torch

from fcdp import _fcdp
from fcdp.c10d import Shards


def in_backward() -> bool:
    """Does autograd run a backward on this thread?"""
    return torch._C._current_graph_task_id() != -1


class Tree:
    """What lies under one FSDP root: its passes begin for all of it at once. One agreement for each shard group
    in it."""

    def __init__(self, param_groups: list[Any]):
        self.param_groups = param_groups  # FSDP's, served or not
        self.handles: dict[Shards, _fcdp.Tree] = {}
        # A backward that raised has left FSDP's mark of one under way; and the task of autograd's that last began one.
        self.interrupted, self.task = False, -1

    def begins_backward(self, is_marked: bool) -> bool:
        """In a backward's first hook, and in no later one. `is_marked`: FSDP knows of a backward."""
        before, self.task = self.task, torch._C._current_graph_task_id()
        return not is_marked or self.interrupted and self.task != before

    def begin_forward(self) -> None:
        """Copies are not trusted any more without asking; nor in a backward."""
        for handle in self.handles.values():
            handle.begin_forward()

    def begin_backward(self) -> None:
        for handle in self.handles.values():
            handle.begin_backward()

    def handle(self, shards: Shards) -> _fcdp.Tree:
        if shards not in self.handles:
            self.handles[shards] = shards.comm.create_tree()
            self._enter(shards)
        return self.handles[shards]

    def enter(self) -> None:
        """Groups of it have been decided on since the handles were made."""
        for shards in self.handles:
            self._enter(shards)

    def _enter(self, shards: Shards) -> None:
        groups = [g.__dict__.get("_fcdp") for g in self.param_groups]
        served = [group for group in groups if group is not None and group.shards is shards and group.tree is None]
        self.handles[shards].set_groups([group.handle for group in served])
