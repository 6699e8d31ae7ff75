"""The stream beside the compute on which what a gather reads is made: FSDP2's copy-in stream.

A cast or an upload of each shard, and what an all-gather extension computes, would otherwise stand in front of
the compute. The side stream comes behind all that was put on the current stream before, which may write the
shards. The memory of what is made there is used again by that stream alone (PyTorch's allocator), which the core
puts behind the readers when the group is waited for (comm/use.h):

    shards written -> current stream -> side stream: made -> FCDP's streams: read -> side stream
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from fcdp import seam


class Side:
    def __init__(self, stream: Any, handle: int, device: torch.device):
        self.handle, self._stream, self._device = handle, stream, device

    def wait_for_current(self) -> None:
        self._stream.wait_stream(seam.current_stream(self._device))

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """It is the current stream."""
        with torch.get_device_module(self._device).stream(self._stream):
            yield


def beside(stream: Any, device: torch.device) -> Side | None:
    """None: on CPUs, and where FSDP2 itself makes inputs on the current stream, as for unshard(async_op=True)."""
    if device.type == "cpu":
        return None
    handle = seam.handle_of(stream)
    return None if handle == seam.stream_of(device) else Side(stream, handle, device)
