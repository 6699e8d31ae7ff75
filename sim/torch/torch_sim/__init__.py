"""torch.device("sim"): a PyTorch device that runs behind the host, on FCDP's simulated GPU.

    import torch, torch_sim          # with sim/torch on PYTHONPATH, in a checkout

    x = torch.randn(4, 4).to("sim")
    with torch.sim.stream(torch.sim.Stream()): ...
    torch.distributed.init_process_group()       # "simgloo" for its tensors, gloo for the CPU's

Operators are PyTorch's CPU kernels, run in stream order on a thread of each stream, so their numbers are the CPU's bit
for bit. Memory is fcdp_alloc's. What CUDA would not promise is refused: FCDP_SIM_RACES=1 finds accesses that no event
orders and names the operators. It is for development: nothing of it is in FCDP's wheel.

Environment, beside FCDP_SIM_* (sim/gpu/simgpu.h):
  TORCH_SIM_GFLOPS   the rate of matrix products, convolutions and attention, in 1e9 operations a second
  TORCH_SIM_GBYTES   the rate at which operators read and write, in 1e9 bytes a second
                     (0, the default of both: as fast as the CPU; an operator never ends before its work is done)
  TORCH_SIM_DEVICES  how many devices torch sees; default: as many as this node has ranks
  CUDA_DEVICE_MAX_CONNECTIONS
                     hardware queues, 1 to 32, that streams share; default: 8, as CUDA's
  SIMNCCL_FABRIC     a file of simnccl_fabric_make's: FCDP's NCCL is then the double of the build "dev", unless
                     FCDP_NCCL_LIBRARY names another
"""

from __future__ import annotations

import atexit
import importlib.util
import os
import sys
from datetime import timedelta
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

import fcdp
from fcdp import _fcdp, tensors
from torch_sim import build


def _load() -> ModuleType:
    spec = importlib.util.spec_from_file_location(build.NAME, build.library())
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _rate(name: str) -> float:
    text = os.environ.get(name, "0")
    try:
        rate = float(text)
    except ValueError:
        rate = -1
    if not 0 <= rate < float("inf"):
        raise ValueError(f"{name}={text!r}: expected a rate in 1e9 a second, or 0 for as fast as the CPU")
    return rate


def _backend(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    return _c.backend(dist.ProcessGroupGloo(store, rank, size, timeout))


def _end() -> None:
    """The streams must be idle before the interpreter ends: what they run may need it."""
    try:
        _c.synchronize()
    except RuntimeError as error:
        print(f"torch_sim: at exit: {error}", file=sys.stderr)


_c = _load()
torch.utils.rename_privateuse1_backend("sim")
_fcdp.options_load()
_library = os.environ.get("FCDP_SIM_LIBRARY") or os.path.join(os.path.dirname(fcdp.__file__), "libfcdp_simgpu.so")
_double = build.ROOT / "build" / "dev" / "sim" / "nccl" / "libfcdp_simnccl.so"
if os.environ.get("SIMNCCL_FABRIC") and _double.exists():  # the job's NCCL is the double, on the same device
    os.environ.setdefault("FCDP_NCCL_LIBRARY", str(_double))
    os.environ["FCDP_SIM_LIBRARY"] = _library
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "8")  # CUDA's default; simgpu's is a queue for each stream
_n_devices = int(os.environ.get("TORCH_SIM_DEVICES") or os.environ.get("LOCAL_WORLD_SIZE") or 1)
_c.setup(_library, _fcdp.tensors_enable(_fcdp.DRIVER_SIM, _library), _n_devices)
_c.figures(tensors.nested_stats, tensors.reset_peak_memory_stats, tensors.reset_accumulated_memory_stats)
_c.set_rates(_rate("TORCH_SIM_GFLOPS"), _rate("TORCH_SIM_GBYTES"))

from torch_sim import device  # noqa: E402  what torch.sim is

torch._register_device_module("sim", device)
torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
dist.Backend.register_backend("simgloo", _backend, devices=["sim"])
atexit.register(_end)
