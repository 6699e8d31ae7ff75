"""What the machine is, and the most that its links can carry: from the driver's libraries by ctypes, without torch."""

from __future__ import annotations

import ctypes
import os
import platform
import re
from typing import Any

# CUdevice_attribute
_MEMORY_CLOCK_KHZ, _MEMORY_BUS_BITS = 36, 37
_PCI_BUS, _PCI_DEVICE, _PCI_DOMAIN = 33, 34, 50
_MAJOR, _MINOR, _MULTIPROCESSORS = 75, 76, 16
# GB/s of one lane, each way, by the link's generation: what is left of its transfers after the encoding.
_LANE_GB_S = {1: 0.25, 2: 0.5, 3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563}
_SPEED_GENERATION = {2.5: 1, 5.0: 2, 8.0: 3, 16.0: 4, 32.0: 5, 64.0: 6}


class NoGpu(Exception):
    """Its text says why none can be used."""


def _driver() -> ctypes.CDLL:
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise NoGpu(f"NVIDIA's driver is not there ({error})") from None
    count = ctypes.c_int()
    for call, arguments in (("cuInit", (ctypes.c_uint(0),)), ("cuDeviceGetCount", (ctypes.byref(count),))):
        result = getattr(cuda, call)(*arguments)
        if result:
            name = ctypes.c_char_p()
            cuda.cuGetErrorName(result, ctypes.byref(name))
            raise NoGpu(f"{call}: {name.value.decode() if name.value else result}")
    if count.value == 0:
        raise NoGpu("the driver shows no device; see CUDA_VISIBLE_DEVICES")
    return cuda


def _attribute(cuda: ctypes.CDLL, device: int, attribute: int) -> int | None:
    value = ctypes.c_int()
    return value.value if cuda.cuDeviceGetAttribute(ctypes.byref(value), attribute, device) == 0 else None


def _bus_id(cuda: ctypes.CDLL, device: int) -> str | None:
    text = ctypes.create_string_buffer(32)
    return text.value.decode().lower() if cuda.cuDeviceGetPCIBusId(text, len(text), device) == 0 else None


def _read(path: str) -> str:
    try:
        with open(path) as f:
            return f.read().strip()
    except OSError:
        return ""


def _link_of_sysfs(bus_id: str) -> tuple[int, int] | None:
    """(generation, width) that the device can do at most, as the kernel knows it."""
    folder = f"/sys/bus/pci/devices/{bus_id}"
    speed, width = re.match(r"[\d.]+", _read(f"{folder}/max_link_speed")), _read(f"{folder}/max_link_width")
    if not speed or not width.isdigit():
        return None
    generation = _SPEED_GENERATION.get(float(speed[0]))
    return (generation, int(width)) if generation and 0 < int(width) <= 32 else None


def _link_of_nvml(bus_id: str) -> tuple[int, int] | None:
    """(generation, width) at most, for this device in this machine."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    handle, generation, width = ctypes.c_void_p(), ctypes.c_uint(), ctypes.c_uint()
    try:
        if nvml.nvmlInit_v2() or nvml.nvmlDeviceGetHandleByPciBusId_v2(bus_id.encode(), ctypes.byref(handle)):
            return None
        if nvml.nvmlDeviceGetMaxPcieLinkGeneration(
            handle, ctypes.byref(generation)
        ) or nvml.nvmlDeviceGetMaxPcieLinkWidth(handle, ctypes.byref(width)):
            return None
    except AttributeError:
        return None
    return generation.value, width.value


def _driver_version() -> str:
    match = re.search(r"Kernel Module(?: for \S+)?\s+(\d[\d.]+)", _read("/proc/driver/nvidia/version"))
    return match[1] if match else "unknown"


def facts() -> dict[str, Any]:
    """Of device 0. Raises NoGpu."""
    cuda = _driver()
    device, name, total, version = ctypes.c_int(), ctypes.create_string_buffer(128), ctypes.c_size_t(), ctypes.c_int()
    if cuda.cuDeviceGet(ctypes.byref(device), 0):
        raise NoGpu("cuDeviceGet(0) fails")
    cuda.cuDeviceGetName(name, len(name), device)
    cuda.cuDeviceTotalMem_v2(ctypes.byref(total), device)
    cuda.cuDriverGetVersion(ctypes.byref(version))
    clock, bus = (_attribute(cuda, device, a) for a in (_MEMORY_CLOCK_KHZ, _MEMORY_BUS_BITS))
    bus_id = _bus_id(cuda, device)
    link = (_link_of_nvml(bus_id) or _link_of_sysfs(bus_id)) if bus_id else None
    pcie = round(_LANE_GB_S[link[0]] * link[1], 1) if link and link[0] in _LANE_GB_S else None
    return host() | {
        "device": name.value.decode(errors="replace"),
        "device_memory_bytes": total.value,
        "compute_capability": f"{_attribute(cuda, device, _MAJOR)}.{_attribute(cuda, device, _MINOR)}",
        "multiprocessors": _attribute(cuda, device, _MULTIPROCESSORS),
        "pci_bus_id": bus_id,
        "nvidia_driver": _driver_version(),
        "cuda_of_driver": f"{version.value // 1000}.{version.value % 1000 // 10}",
        "pcie_link": f"generation {link[0]}, {link[1]} lanes" if link else None,
        "pcie_peak_gb_s": pcie,
        "memory_peak_gb_s": round(2 * clock * 1e3 * bus / 8 / 1e9, 1) if clock and bus else None,
    }


def host() -> dict[str, Any]:
    model = re.search(r"model name\s*:\s*(.+)", _read("/proc/cpuinfo"))
    memory = re.search(r"MemTotal:\s+(\d+)", _read("/proc/meminfo"))
    return {
        "python": platform.python_version(),
        "glibc": platform.libc_ver()[1],
        "kernel": platform.release(),
        "cpu": model[1] if model else platform.machine(),
        "cpus": len(os.sched_getaffinity(0)),
        "host_memory_bytes": int(memory[1]) * 1024 if memory else None,
    }
