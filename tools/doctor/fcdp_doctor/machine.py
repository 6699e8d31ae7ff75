"""What FCDP sees of this machine (driver, memory, limits, torch), and whether it would serve a job."""

from __future__ import annotations

import os
import platform
import resource
from importlib import metadata
from pathlib import Path

import fcdp


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
        engine = _fcdp.engine_create(chosen, 0, library, False, _fcdp.MAPPING_AUTO)
    except _fcdp.Error as error:
        return error.args[0], False
    stats = _fcdp.engine_stats(engine)
    _fcdp.engine_destroy(engine)
    name = "CUDA" if stats["driver"] == "cuda" else "none answers: models on a CPU use the simulated device"
    return f"{name}, {_bytes(stats['device_bytes']['budget'])} for gathered parameters", True


def _memory() -> str:
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    available = int(fields["MemAvailable"].split()[0]) << 10
    total = int(fields["MemTotal"].split()[0]) << 10
    nodes = len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))) or 1
    return f"{_bytes(available)} available of {_bytes(total)}, {nodes} NUMA node{'s' if nodes > 1 else ''}"


def report() -> int:
    from fcdp import _fcdp

    try:
        _fcdp.options_load()
        options, options_ok = "all FCDP_* variables are valid", True
    except _fcdp.Error as error:
        options, options_ok = error.args[0], False
    torch, torch_ok = _torch()
    driver, driver_ok = _driver() if options_ok else ("not tried", False)
    local = os.environ.get("FCDP_LOCAL_SIZE") or os.environ.get("LOCAL_WORLD_SIZE")
    memlock = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    rows = [
        ("fcdp", f"{fcdp.__version__}, Python {platform.python_version()}"),
        ("options", options),
        ("torch", torch),
        ("device", driver),
        ("host memory", _memory()),
        (
            "may lock",
            _bytes(memlock)
            + ("" if memlock == resource.RLIM_INFINITY else " (ulimit -l; root and CAP_IPC_LOCK are not bound by it)"),
        ),
        ("ranks per node", local or "from the launcher (torchrun sets LOCAL_WORLD_SIZE), or FCDP_LOCAL_SIZE"),
    ]
    for name, text in rows:
        print(f"{name:15s} {text}")
    good = options_ok and torch_ok and driver_ok
    print(
        "\nFCDP=1 torchrun ... would be served here."
        if good
        else "\nFCDP would leave jobs here to plain FSDP2, or stop them before the first step: see above."
    )
    return 0 if good else 1
