"""torch.sim: what FSDP, autograd, autocast and activation checkpointing ask of a device's module, after torch.cuda."""

from __future__ import annotations

import types
from collections.abc import Iterable
from typing import Any

import torch

from fcdp import tensors
from torch_sim import _c, _n_devices

_initialized = True  # torch.utils.checkpoint asks
default_generators = (_c.default_generator(),)


def is_available() -> bool:
    return True


def is_initialized() -> bool:
    return True


def init() -> None:
    pass


_lazy_init = init


def _is_in_bad_fork() -> bool:
    return False


# ---- devices ----


def device_count() -> int:
    return _n_devices


def current_device() -> int:
    return torch.accelerator.current_device_index()


def _index_of(device: Any) -> int:
    index = device if isinstance(device, int) else None if device is None else torch.device(device).index
    return current_device() if index is None else index


def set_device(device: Any) -> None:
    """The first index that is set, or used, is the one device of this process."""
    _c.set_device(_index_of(device))


class device:
    """`with torch.sim.device(i)`; with one device per process, this checks that it is that one."""

    def __init__(self, device: Any):
        self._index = _index_of(device)

    def __enter__(self) -> None:
        if self._index >= 0:
            set_device(self._index)

    def __exit__(self, *exception: Any) -> None:
        pass


def get_device_name(device: Any = None) -> str:
    return "simulated GPU"


def get_device_capability(device: Any = None) -> tuple[int, int]:
    return (0, 0)


def get_device_properties(device: Any = None) -> types.SimpleNamespace:
    return types.SimpleNamespace(name=get_device_name(), total_memory=mem_get_info()[1], multi_processor_count=1)


# ---- streams and events ----


class Stream:
    """Makes a torch.Stream."""

    def __new__(cls, device: Any = None, priority: int = 0, **kwargs: Any) -> torch.Stream:
        return torch.Stream(device=torch.device("sim", _index_of(device)), priority=priority)


class Event:
    """Makes a torch.Event."""

    def __new__(cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> torch.Event:
        if interprocess:
            raise RuntimeError("the simulated device has no events between processes")
        return torch.Event(device=torch.device("sim", current_device()), enable_timing=enable_timing)


def current_stream(device: Any = None) -> torch.Stream:
    return torch.accelerator.current_stream(torch.device("sim", _index_of(device)))


def default_stream(device: Any = None) -> torch.Stream:
    kind = torch._C._autograd.DeviceType.PrivateUse1.value
    return torch.Stream(stream_id=0, device_index=_index_of(device), device_type=kind)


def set_stream(stream: torch.Stream) -> None:
    torch.accelerator.set_stream(stream)


class stream:
    """`with torch.sim.stream(s)`: s is current within; None changes nothing."""

    def __init__(self, stream: torch.Stream | None):
        self._stream, self._before = stream, []

    def __enter__(self) -> torch.Stream | None:
        if self._stream is not None:
            self._before.append(current_stream())
            set_stream(self._stream)
        return self._stream

    def __exit__(self, *exception: Any) -> None:
        if self._stream is not None:
            set_stream(self._before.pop())


StreamContext = stream


def synchronize(device: Any = None) -> None:
    """Waits for all streams; raises what an operator on one of them has raised."""
    _c.synchronize()


# ---- memory; the figures are fcdp_alloc's ----


def empty_cache() -> None:
    torch.accelerator.empty_cache()


def mem_get_info(device: Any = None) -> tuple[int, int]:
    return _c.mem_get_info()


def memory_stats(device: Any = None) -> dict[str, int]:
    return tensors.memory_stats(0)


def memory_allocated(device: Any = None) -> int:
    return tensors.memory_allocated(0)


def max_memory_allocated(device: Any = None) -> int:
    return tensors.max_memory_allocated(0)


def memory_reserved(device: Any = None) -> int:
    return tensors.memory_reserved(0)


def max_memory_reserved(device: Any = None) -> int:
    return tensors.max_memory_reserved(0)


def reset_peak_memory_stats(device: Any = None) -> None:
    tensors.reset_peak_memory_stats(0)


def reset_accumulated_memory_stats(device: Any = None) -> None:
    tensors.reset_accumulated_memory_stats(0)


def memory_summary(device: Any = None, abbreviated: bool = False) -> str:
    return tensors.memory_summary(0, abbreviated)


def memory_snapshot() -> list[dict[str, Any]]:
    return tensors.snapshot()["segments"]


# As torch.cuda.memory has them.
memory = types.SimpleNamespace(
    _snapshot=lambda device=None: tensors.snapshot(), _record_memory_history=tensors.record_memory_history
)


# ---- random numbers ----


def manual_seed(seed: int) -> None:
    _c.default_generator().manual_seed(int(seed))


manual_seed_all = manual_seed


def seed() -> None:
    _c.default_generator().seed()


seed_all = seed


def initial_seed() -> int:
    return _c.default_generator().initial_seed()


def get_rng_state(device: Any = None) -> torch.Tensor:
    return _c.default_generator().get_state()


def set_rng_state(new_state: torch.Tensor, device: Any = None) -> None:
    _c.default_generator().set_state(new_state)


def get_rng_state_all() -> list[torch.Tensor]:
    return [get_rng_state()]


def set_rng_state_all(new_states: Iterable[torch.Tensor]) -> None:
    for state in new_states:
        set_rng_state(state)


# ---- autocast ----


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.bfloat16, torch.float16]


def is_bf16_supported(including_emulation: bool = True) -> bool:
    return True


# ---- what only a simulated device has ----


def counts(reset: bool = False) -> dict[str, Any]:
    """Operators since the last reset: those launched behind the host, those for which it waited (with their names), and
    how often a Meta kernel was asked, or its answer remembered."""
    return _c.counts(reset)


def set_rates(gflops: float = 0, gbytes: float = 0) -> None:
    """As TORCH_SIM_GFLOPS and TORCH_SIM_GBYTES, from now on."""
    _c.set_rates(gflops, gbytes)
