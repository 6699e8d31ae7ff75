"""Builds the simulated device's extension against the torch that is there, once.

PyTorch's C++ has no stable interface, so there is one shared library for each torch and each state of the sources. It
lies in build/torch_sim, by a hash of both; several processes that want it wait for the first. Three compilers run at
once; together they take about a minute of CPU.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import pathlib
import shutil
import subprocess
import sysconfig

import torch

HERE = pathlib.Path(__file__).resolve().parent.parent  # sim/torch
ROOT = HERE.parent.parent
CACHE = ROOT / "build" / "torch_sim"
NAME = "torch_sim_c"
# Each is one run of the compiler: torch's headers cost more than what is in the files.
UNITS = [
    ["ops.cpp", "tensors.cpp"],
    ["device.cpp", "memory.cpp", "random.cpp", "autocast.cpp"],
    ["collectives.cpp", "module.cpp"],
]
HEADERS = ["sim.h", "collectives.h", "../gpu/simgpu.h", "../gpu/simgpu_cuda.h"]
LIBRARIES = ["torch", "torch_cpu", "c10", "torch_python"]


class BuildError(RuntimeError):
    """The extension cannot be built here; the text says why."""


def _compiler() -> str:
    for name in (os.environ.get("CXX", ""), "g++", "clang++"):
        if name and shutil.which(name.split()[0]):
            return name
    raise BuildError('torch.device("sim") is C++ that is compiled here: install g++ or clang++, or set CXX')


def _flags() -> list[str]:
    home = pathlib.Path(torch.__file__).parent
    includes = [ROOT, home / "include", home / "include/torch/csrc/api/include", sysconfig.get_paths()["include"]]
    standard = 20 if torch.__version__ >= (2, 10) else 17
    return [
        f"-std=c++{standard}",
        "-O1",
        "-fPIC",
        "-fvisibility=hidden",
        "-Wall",
        "-Wno-unknown-pragmas",
        f"-DTORCH_EXTENSION_NAME={NAME}",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}",
        f"-I{includes[0]}",
        *(f"-isystem{place}" for place in includes[1:]),
    ]


def _hash(command: list[str], files: list[str]) -> str:
    text = hashlib.sha256(" ".join([torch.__version__, torch.__file__, *command]).encode())
    for name in files:
        text.update((HERE / name).read_bytes())
    return text.hexdigest()[:16]


def _run_all(commands: list[list[str]]) -> None:
    """All at once; raises with what those that fail have said."""
    processes = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for command in commands
    ]
    said = [process.communicate()[0] for process in processes]
    failed = [
        f"{' '.join(command)}\n{text[-8000:]}"
        for command, process, text in zip(commands, processes, said)
        if process.returncode
    ]
    if failed:
        raise BuildError("\n".join(failed))


def _build(command: list[str], library: pathlib.Path) -> None:
    """A unit whose sources have not changed keeps its object."""
    objects = [CACHE / f"{unit[-1]}-{_hash(command, [*HEADERS, *unit])}.o" for unit in UNITS]
    compiles = []
    for unit, path in zip(UNITS, objects):
        front = [argument for name in unit[:-1] for argument in ("-include", str(HERE / name))]
        if not path.exists():
            compiles.append([*command, *front, "-c", str(HERE / unit[-1]), "-o", str(path)])
    _run_all(compiles)
    home = pathlib.Path(torch.__file__).parent
    links = [f"-L{home / 'lib'}", *(f"-l{name}" for name in LIBRARIES), "-ldl"]
    made = library.with_suffix(".made")
    _run_all([[command[0], "-shared", *map(str, objects), *links, "-o", str(made)]])
    made.rename(library)


def library() -> pathlib.Path:
    """The extension's shared library, built now if need be. Raises BuildError."""
    command = [*_compiler().split(), *_flags()]
    path = CACHE / f"{NAME}-{_hash(command, [*HEADERS, *(name for unit in UNITS for name in unit)])}.so"
    if path.exists():
        return path
    CACHE.mkdir(parents=True, exist_ok=True)
    with open(CACHE / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            _build(command, path)
    return path


if __name__ == "__main__":
    print(library())
