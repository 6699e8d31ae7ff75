"""What a case is given: data, a record of everything that must come out bitwise equal, and snapshots of
fcdp.stats()."""

import ctypes
import gc
import hashlib
import os
import random

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from models import BATCH, IN, OUT, TiedLM
from place import DEVICE
from subclass import Bf16AllGather

CASES = {}
PARTICULAR = {}  # of one configuration alone, which a test names
COUNTING = {}


class Unsupported(Exception):
    """Raised, on every rank alike, by a case that this torch cannot run."""


def case(function=None, *, into=CASES, name=None):
    def register(f):
        key = name or f.__name__
        if key in into:
            raise ValueError(f"two cases are named {key}")
        into[key] = f
        return f

    return register(function) if function else register


def kept(value):
    """What it is now: of a tensor, the bytes of this rank's part, copied in stream order. The host does not wait."""
    if isinstance(value, DTensor):
        value = value._local_tensor
    if isinstance(value, Bf16AllGather):
        value = value._data
    return value.detach().contiguous().clone() if isinstance(value, torch.Tensor) else repr(value)


def raw_bytes(value):
    if isinstance(value, str):
        return value.encode()
    value = kept(value)
    head = f"{value.dtype}{tuple(value.shape)}".encode()
    size = value.numel() * value.element_size()
    return head + (ctypes.string_at(value.data_ptr(), size) if size else b"")


def preview(value):
    if isinstance(value, str):
        return value[:200]
    return float(value.double().sum()) if value.numel() else 0.0


class Run:
    def __init__(self, name, rank, world, fcdp=None):
        self.name, self.rank, self.world, self.fcdp = name, rank, world, fcdp
        self.events, self.marks, self.extra = [], [], {}
        self.unread = []  # of the events, those whose values a device may not have computed yet
        random.seed(5)
        np.random.seed(5)
        torch.manual_seed(1234)
        self.data = torch.Generator().manual_seed(1000 + rank)

    def record(self, tag, value):
        self.events.append([tag, kept(value)])
        self.unread.append(self.events[-1])
        if DEVICE.type == "cpu":
            self.read()

    def read(self):
        """What was recorded becomes a hash and a few words: on a device at the end, so that the host runs ahead of it."""
        while self.unread:
            _, value = self.unread[0]
            value = value.cpu() if isinstance(value, torch.Tensor) else value
            self.unread.pop(0)[1:] = hashlib.blake2b(raw_bytes(value), digest_size=12).hexdigest(), preview(value)

    def mark(self, label):
        """A snapshot of FCDP's counters under a label; the record that is compared knows nothing of it."""
        self.marks.append([label, self.fcdp.stats() if self.fcdp else None])

    def batch(self, dtype=torch.float32):
        return self.randn(BATCH, IN).to(dtype), self.randn(BATCH, OUT)

    def randn(self, *sizes):
        """Of the CPU, on every device."""
        return torch.randn(sizes, generator=self.data, device="cpu").to(DEVICE)

    def tokens(self):
        return torch.randint(0, TiedLM.vocab, (2, 8), generator=self.data, device="cpu").to(DEVICE)

    def loss(self, model, tag="loss"):
        x, y = self.batch()
        loss = ((model(x).float() - y) ** 2).mean()
        self.record(tag, loss)
        return loss

    def step(self, model, optimizer, micro_batches=1):
        for _ in range(micro_batches):
            (self.loss(model) / micro_batches).backward()
        optimizer.step()
        optimizer.zero_grad()

    def train(self, model, optimizer, steps=2, micro_batches=1):
        for _ in range(steps):
            self.step(model, optimizer, micro_batches)

    def evaluate(self, model, n=1, mode=torch.no_grad, tag="eval"):
        model.eval()
        with mode():
            for _ in range(n):
                x, _ = self.batch()
                self.record(tag, model(x))
        model.train()

    def finish(self, model, optimizer=None):
        """Records the final shards: what the run was for."""
        reshard_all(model)
        for name, parameter in model.named_parameters():
            self.record(f"shard {name}", parameter)
            self.record(f"requires_grad {name}", parameter.requires_grad)
        for name, buffer in model.named_buffers():
            self.record(f"buffer {name}", buffer)
        if optimizer is not None:
            for group in optimizer.param_groups:
                for i, parameter in enumerate(group["params"]):
                    for key, value in sorted(optimizer.state.get(parameter, {}).items()):
                        self.record(f"optimizer {i} {key}", value)

    def finish_process_state(self):
        """FCDP must not draw a random number, change a default or leave a mode on."""
        self.record("torch rng", torch.get_rng_state())
        if DEVICE.type != "cpu":
            self.record("device rng", torch.get_device_module(DEVICE).get_rng_state())
        self.record("numpy rng", np.random.get_state()[1].tobytes())
        self.record("python rng", random.getstate()[1][:8])
        self.record(
            "modes",
            [
                torch.is_grad_enabled(),
                torch.is_inference_mode_enabled(),
                str(torch.get_default_dtype()),
                torch.get_num_threads(),
            ],
        )


def reshard_all(model):
    for module in model.modules():
        if hasattr(module, "reshard"):
            module.reshard()


def collect():
    for _ in range(2):  # a second pass takes what finalizers let go of
        gc.collect()


def import_fcdp():
    """The package, in a job that FCDP=1 turned it on for; a plain job must never import it."""
    if os.environ.get("FCDP") != "1":
        return None
    try:
        import fcdp
    except ImportError:
        return None
    return fcdp
