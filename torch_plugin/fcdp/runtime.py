"""This process's engine: set up for its first shard group, ended with the interpreter (ending.py)."""

from __future__ import annotations

import logging
import os

import torch

import fcdp.ending  # noqa: F401 (it ends the engine)
from fcdp import _fcdp, released, tensors
from fcdp.c10d import Shards, Unsupported
from fcdp.settings import options

log = logging.getLogger("fcdp")


class Runtime:
    def __init__(self) -> None:
        self.pid = os.getpid()
        self.engine: _fcdp.Engine | None = None
        self.device: torch.device | None = None  # the engine's
        self._has_account = False

    def need_engine(self, device: torch.device) -> None:
        """Make it, unless it is there. Raises Unsupported for a device that it cannot serve."""
        if self.engine is not None:
            if self.device != device:
                raise Unsupported(
                    f"this process serves another device already ({self.device}, this shard group is on {device})"
                )
            return
        asked = options["driver"]
        is_cuda, on_host = device.type == "cuda", device.type == "cpu"
        kind = _fcdp.DRIVER_CUDA if is_cuda else _fcdp.DRIVER_SIM
        if asked == _fcdp.DRIVER_CUDA and on_host:
            raise Unsupported(
                "FCDP_DRIVER=cuda, but the model is on the CPU (is there a CUDA device?); use FCDP_DRIVER=auto, or sim"
            )
        if asked == _fcdp.DRIVER_SIM and kind == _fcdp.DRIVER_CUDA:
            raise Unsupported("FCDP_DRIVER=sim, but the model is on a CUDA device; use FCDP_DRIVER=auto")
        library = os.path.join(os.path.dirname(__file__), "libfcdp_simgpu.so")
        # one pool of pages for parameters and tensors; all tensors of "sim" are fcdp_alloc's
        shares = tensors.is_current() if is_cuda else not on_host
        ordinal = device.index or 0 if is_cuda else 0  # simgpu has one device, whatever its index in torch
        if not on_host:  # torch counts CPUs once, when it is first asked; the engine may bind the process to fewer
            torch.get_num_threads()
        self.engine = _fcdp.create_engine(kind, ordinal, library, shares, released.SUPPORTED, on_host)
        self.device = device
        if kind == _fcdp.DRIVER_CUDA and not shares:
            tensors.share_device(self.engine)

    def need_account(self, shards: Shards) -> None:
        """The budget of the node's host memory: the node's first process to come here makes it, whatever its
        shard group; the others join."""
        if self._has_account:
            return
        key, store = f"fcdp/account/{shards.machine}", shards.store
        if store.add(f"{key}/comers", 1) == 1:
            try:
                ticket = self.engine.create_account()
            except _fcdp.Error as error:
                store.set(key, f"!{error.args[0]}")
                raise
            store.set(key, ticket.hex())
        else:
            said = store.get(key).decode()
            if said.startswith("!"):
                raise Unsupported(said[1:])
            self.engine.join_account(bytes.fromhex(said))
        self._has_account = True

    def end(self) -> None:
        """The streams must be idle before the interpreter ends: a thread that asks for the GIL after that is ended
        inside torch, which aborts. A collective whose peer is gone ends by itself: its connection is closed, or
        FCDP_TIMEOUT passes."""
        try:
            self.engine.drain()
        except _fcdp.Error as error:
            log.debug("at exit: %s", error.args[0])
        self.engine.destroy()


runtime = Runtime()
