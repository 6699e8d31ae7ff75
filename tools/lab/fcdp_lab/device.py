"""--device sim: the ranks get torch.device("sim"), a simulated GPU, which they find as they would find a GPU.

It is C++ against the torch of the ranks, so it is not in the wheel but in a checkout's sim/torch. It is compiled once,
before the first rank starts. The ranks need nothing but environment: torch loads the backends of the packages on
PYTHONPATH.
"""

import dataclasses
import os
import re
import signal
import subprocess

VARIABLE = "TORCH_SIM_FOLDER"
_IN_CHECKOUT = ("sim", "torch")
_BUILD = ("torch_sim", "build.py")
_BYTES = re.compile(r"(\d+)(?:([KMGT])(i?B?))?", re.IGNORECASE)
_PAGE_BYTES = 2 << 20
_SAID_BYTES = 3000  # of a compiler; what is wrong stands at the end


class DeviceError(ValueError):
    """The device cannot be made; the message says what to do."""


@dataclasses.dataclass(frozen=True)
class Simulated:
    """One for each rank."""

    folder: str  # sim/torch
    memory_bytes: int | None
    gflops: float
    gbytes: float

    @property
    def python_path(self):
        """The folder in which torch finds a package with an entry point for backends."""
        return os.path.join(self.folder, "autoload")

    def environment(self):
        env = {
            "TORCH_DEVICE_BACKEND_AUTOLOAD": "1",
            "TORCH_SIM_GFLOPS": f"{self.gflops:g}",
            "TORCH_SIM_GBYTES": f"{self.gbytes:g}",
        }
        if self.memory_bytes is not None:
            env["FCDP_SIM_CAPACITY"] = str(self.memory_bytes)
        return env

    def build(self, python, progress, poll_s):
        """Takes a minute if the device is not built yet. Raises DeviceError."""
        compiler = subprocess.Popen(
            [python, os.path.join(self.folder, *_BUILD)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        said = None
        try:
            while said is None:
                try:
                    said, _ = compiler.communicate(timeout=poll_s)
                except subprocess.TimeoutExpired:
                    progress.update(0, None, "")
        finally:
            if said is None:
                os.killpg(compiler.pid, signal.SIGKILL)
                compiler.wait()
        if compiler.returncode:
            raise DeviceError(f"--device sim: the simulated device cannot be built:\n{said.strip()[-_SAID_BYTES:]}")


def find():
    """sim/torch: the one that the environment names, of the checkout that this is, or of the one around the current
    folder."""
    named = os.environ.get(VARIABLE)
    if named:
        if not os.path.isfile(os.path.join(named, *_BUILD)):
            raise DeviceError(f"{VARIABLE}={named}: this is not the folder sim/torch of a checkout of FCDP")
        return os.path.abspath(named)
    for start in (os.path.abspath(__file__), os.getcwd()):
        while os.path.dirname(start) != start:
            folder = os.path.join(start, *_IN_CHECKOUT)
            if os.path.isfile(os.path.join(folder, *_BUILD)):
                return folder
            start = os.path.dirname(start)
    raise DeviceError(
        "--device sim: the simulated device is not in the wheel, it is compiled from a checkout of FCDP. Run fcdp-lab in "
        f"a checkout, or set {VARIABLE} to the folder sim/torch of one"
    )


def _parse_memory(text):
    found = _BYTES.fullmatch(text)
    letter, unit = (found[2] or "", found[3] or "") if found else ("", "")
    n_bytes = (
        int(found[1]) * (1000 if unit.upper() == "B" else 1024) ** " KMGT".index(letter.upper() or " ") if found else 0
    )
    if not _PAGE_BYTES <= n_bytes < 1 << 63:
        raise DeviceError(f"--device-memory {text}: write e.g. 512M or 8GB, at least 2M")
    return n_bytes


def _parse_rate(option, text):
    try:
        rate = float(text)
    except ValueError:
        rate = -1
    if not 0 <= rate < float("inf"):
        raise DeviceError(f"{option} {text}: write a number, in 1e9 a second; 0 is as fast as the CPU")
    return rate


def parse(kind, memory, gflops, gbytes):
    """What --device and its options ask for: a Simulated, or None for the CPU. Raises DeviceError."""
    given = {"--device-memory": memory, "--gflops": gflops, "--gbytes": gbytes}
    if kind == "cpu":
        for option, text in given.items():
            if text is not None:
                raise DeviceError(f"{option} is of the simulated device: give --device sim with it")
        return None
    return Simulated(
        find(),
        None if memory is None else _parse_memory(memory),
        _parse_rate("--gflops", gflops or "0"),
        _parse_rate("--gbytes", gbytes or "0"),
    )
