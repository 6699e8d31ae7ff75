"""This machine as FCDP sees it (driver, memory, limits, torch), and whether it would serve a job."""

from __future__ import annotations

import os
import platform
import re
import resource
import shutil
from importlib import metadata
from pathlib import Path

import fcdp
from fcdp import _fcdp, launcher


def _torch() -> tuple[str, bool]:
    try:
        version = metadata.version("torch")
    except metadata.PackageNotFoundError:
        return "not installed: pip install 'torch>=2.6'", False
    major, minor = (int("".join(c for c in part if c.isdigit()) or 0) for part in version.split(".")[:2])
    if (major, minor) < (2, 6):
        return f"{version}: too old, FCDP needs 2.6 or later", False
    return version, True


def _driver() -> tuple[str, str, str, bool]:
    """The device, where its threads would run, what of FCDP_HOST_MAP it offers, and whether it can be used."""
    chosen = _fcdp.options_load()["driver"]
    library = str(Path(fcdp.__file__).with_name("libfcdp_simgpu.so"))
    try:
        engine = _fcdp.create_engine(chosen, 0, library, False, True, chosen == _fcdp.DRIVER_SIM)
    except _fcdp.Error as error:
        return error.args[0], "not tried", "not tried", False
    stats, lacks = engine.stats(), engine.host_map_lacks()
    engine.destroy()
    binding = stats["host"]["binding"]
    if stats["driver"] == "sim" and not os.environ.get("FCDP_SIM_ROOT"):
        binding = "models compute on CPUs: nothing is bound"
        lacks = "models on CPUs have their gathered parameters in host memory already"
    name = (
        "CUDA" if stats["driver"] == "cuda" else "no CUDA device answers, so FCDP simulates one for models on the CPU"
    )
    return (
        f"{name}; {_fcdp.size_text(stats['device_bytes']['budget'])} for gathered parameters",
        binding,
        _maps(lacks),
        True,
    )


def _maps(lacks: str) -> str:
    return f"none, so FCDP_HOST_MAP has no effect: {lacks}" if lacks else "the device can read it (FCDP_HOST_MAP)"


def memory(root: str = "") -> tuple[str, bool]:
    """The host memory that a job started now may take, computed as the job does. `root` is put before /proc and
    /sys."""
    nodes = len(list(Path(f"{root}/sys/devices/system/node").glob("node[0-9]*"))) or 1
    beside = f"{nodes} NUMA node{'s' if nodes > 1 else ''}"
    if _fcdp.options_load()["host_copies"] == _fcdp.HOST_COPIES_NUMA:
        beside += ", with a copy in each that has ranks, unless these restore by slice (FCDP_HOST_COPIES=numa)"
    try:
        budget, limit = _fcdp.host_budget(root)
    except _fcdp.Error as error:
        return f"{error.args[0]}; {beside}", False
    return f"{_fcdp.size_text(budget)} for parameters: {limit}; {beside}", budget > 0


def huge_pages(root: str = "") -> str:
    """Whether host memory comes in huge pages. `root` is put before /sys."""
    name = "/sys/kernel/mm/transparent_hugepage/shmem_enabled"
    try:
        chosen = re.search(r"\[(\w+)\]", Path(root + name).read_text())
    except OSError:
        chosen = None
    if chosen is None:
        return "this kernel has none for shared memory"
    if chosen[1] in ("never", "deny"):
        return f"none for shared memory: {name} is {chosen[1]}; with advise, FCDP asks for them"
    return f"for shared memory, where it has room for them: {name} is {chosen[1]}"


def spill(directory: str) -> tuple[str, bool]:
    """Where the groups live for which host memory has no room."""
    try:
        lacks = _fcdp.spill_lacks(directory)
    except _fcdp.Error as error:
        return error.args[0], False
    free = _fcdp.size_text(shutil.disk_usage(directory).free)
    return f"{free} free in {directory}: {lacks or 'by io_uring, past the page cache'}", True


def cache(directory: str) -> str:
    """Where frozen parameters are kept between runs."""
    try:
        _fcdp.cache_check(directory)
    except _fcdp.Error as error:
        return f"{error.args[0]}; frozen parameters are gathered"
    return f"{_fcdp.size_text(shutil.disk_usage(directory).free)} free in {directory}; fcdp-doctor --cache lists it"


def _may_lock() -> str:
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if limit == resource.RLIM_INFINITY:
        return "unlimited"
    return f"{_fcdp.size_text(limit)} (ulimit -l; root and CAP_IPC_LOCK are not bound by it)"


def ranks_per_node(option: int) -> tuple[str, bool]:
    said = any(os.environ.get(name) for name in launcher.VARIABLES)
    if not option and not said:
        return "torchrun, mpirun or srun will say; with another launcher, set FCDP_LOCAL_SIZE", True
    try:
        size, variable = launcher.ranks_per_node()
    except ValueError as error:
        return (f"{option} (FCDP_LOCAL_SIZE)", True) if option else (str(error), False)
    if option and size % option:
        return f"FCDP_LOCAL_SIZE={option} does not divide the node's {size} ranks ({variable}); unset it", False
    if option:
        return f"{option} (FCDP_LOCAL_SIZE)", True
    before = "" if variable == "LOCAL_WORLD_SIZE" else "; torchrun's own LOCAL_WORLD_SIZE goes before it"
    return f"{size} ({variable}{before})", True


def report() -> int:
    try:
        found = _fcdp.options_load()
        option, spill_dir, host_map = found["local_size"], found["spill_dir"], found["host_map"]
        options, options_ok = "all FCDP_* variables are valid", True
    except _fcdp.Error as error:
        option, spill_dir, host_map, options, options_ok = 0, "", "", error.args[0], False
    untried = "not tried", False
    device, binding, maps, device_ok = _driver() if options_ok else ("not tried", "not tried", "not tried", False)
    rows = [
        ("fcdp", f"{fcdp.__version__}, Python {platform.python_version()}", True),
        ("options", options, options_ok),
        ("torch", *_torch()),
        ("device", device, device_ok),
        ("threads", binding, True),
        ("host memory", *(memory() if options_ok else untried)),
        ("may lock", _may_lock(), True),
        *[("mapped memory", maps, True) for names in [host_map] if names],
        *[("spill", *spill(directory)) for directory in [spill_dir] if directory],
        *[("cache", cache(directory), True) for directory in [os.environ.get("FCDP_CACHE_DIR")] if directory],
        ("huge pages", huge_pages(), True),
        ("ranks per node", *(ranks_per_node(option) if options_ok else untried)),
    ]
    for name, text, _ in rows:
        print(f"{name:15s} {text}")
    good = all(ok for *_, ok in rows)
    print(
        "\nFCDP=1 torchrun ... would be served here."
        if good
        else "\nFCDP would leave jobs here to plain FSDP2, or stop them before the first step: see above."
    )
    return 0 if good else 1
