"""What FCDP sees of this machine (driver, memory, limits, torch), and whether it would serve a job."""

from __future__ import annotations

import platform
import resource
from importlib import metadata
from pathlib import Path

import fcdp
from fcdp import launcher


def _bytes(value: int) -> str:
    return (
        "unlimited"
        if value == resource.RLIM_INFINITY
        else f"{value / 2**30:.1f} GiB"
        if value >= 2**30
        else f"{value / 2**20:.1f} MiB"
    )


def _torch() -> tuple[str, bool]:
    try:
        version = metadata.version("torch")
    except metadata.PackageNotFoundError:
        return "not installed: pip install 'torch>=2.6'", False
    major, minor = (int("".join(c for c in part if c.isdigit()) or 0) for part in version.split(".")[:2])
    if (major, minor) < (2, 6):
        return f"{version}: too old, FCDP needs 2.6 or later", False
    return version, True


def _driver() -> tuple[str, bool]:
    from fcdp import _fcdp

    chosen = _fcdp.options_load()["driver"]
    library = str(Path(fcdp.__file__).with_name("libfcdp_simgpu.so"))
    try:
        engine = _fcdp.engine_create(chosen, 0, library, False, _fcdp.MAPPING_AUTO, chosen == _fcdp.DRIVER_SIM)
    except _fcdp.Error as error:
        return error.args[0], False
    stats = _fcdp.engine_stats(engine)
    _fcdp.engine_destroy(engine)
    name = "CUDA" if stats["driver"] == "cuda" else "none answers: models on a CPU use the simulated device"
    return f"{name}, {_bytes(stats['device_bytes']['budget'])} for gathered parameters", True


def memory(root: str = "") -> tuple[str, bool]:
    """What a job may take that starts now, as the job itself finds it. `root` is put before /proc and /sys."""
    from fcdp import _fcdp

    nodes = len(list(Path(f"{root}/sys/devices/system/node").glob("node[0-9]*"))) or 1
    beside = f"{nodes} NUMA node{'s' if nodes > 1 else ''}"
    try:
        budget, limit = _fcdp.host_budget(root)
    except _fcdp.Error as error:
        return f"{error.args[0]}; {beside}", False
    return f"{_bytes(budget)} for parameters: {limit}; {beside}", budget > 0


def ranks_per_node(option: int) -> str:
    if option:
        return f"{option} (FCDP_LOCAL_SIZE)"
    try:
        size, variable = launcher.ranks_per_node()
    except ValueError as error:
        return str(error)
    before = "" if variable == "LOCAL_WORLD_SIZE" else "; torchrun's own LOCAL_WORLD_SIZE goes before it"
    return f"{size} ({variable}{before})"


def report() -> int:
    from fcdp import _fcdp

    try:
        option = _fcdp.options_load()["local_size"]
        options, options_ok = "all FCDP_* variables are valid", True
    except _fcdp.Error as error:
        option, options, options_ok = 0, error.args[0], False
    torch, torch_ok = _torch()
    driver, driver_ok = _driver() if options_ok else ("not tried", False)
    host, host_ok = memory() if options_ok else ("not tried", False)
    memlock = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    rows = [
        ("fcdp", f"{fcdp.__version__}, Python {platform.python_version()}"),
        ("options", options),
        ("torch", torch),
        ("device", driver),
        ("host memory", host),
        (
            "may lock",
            _bytes(memlock)
            + ("" if memlock == resource.RLIM_INFINITY else " (ulimit -l; root and CAP_IPC_LOCK are not bound by it)"),
        ),
        ("ranks per node", ranks_per_node(option)),
    ]
    for name, text in rows:
        print(f"{name:15s} {text}")
    good = options_ok and torch_ok and driver_ok and host_ok
    print(
        "\nFCDP=1 torchrun ... would be served here."
        if good
        else "\nFCDP would leave jobs here to plain FSDP2, or stop them before the first step: see above."
    )
    return 0 if good else 1
