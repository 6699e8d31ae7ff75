"""fcdp_alloc behind PyTorch's own pluggable allocator, without a GPU: torch's class and exceptions, FCDP's heap,
the simulated device."""

import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import pytest
import torch

import cpp
import launch
from conftest import needs_fcdp

HERE = pathlib.Path(__file__).resolve().parent
SCENARIOS = [
    line.split()[1].split("(")[0]
    for before, line in zip(
        (HERE / "tensors_job.py").read_text().splitlines(), (HERE / "tensors_job.py").read_text().splitlines()[1:]
    )
    if before == "@scenario"
]


def sim_library():
    return pathlib.Path(importlib.util.find_spec("fcdp").submodule_search_locations[0], "libfcdp_simgpu.so")


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    tmp = tmp_path_factory.mktemp("tensors")
    library = cpp.shared_library(tmp / "pluggable.so", HERE / "pluggable.cpp", ["c10", "c10_cuda", "torch_cuda"])
    result = tmp / "outcomes.json"
    env = launch.environment(
        launch.new_tag(), tmp, {"FCDP_DEVICE_BUDGET": "64M", "FCDP_SIM_CAPACITY": "256M", "FCDP_CHECK": "1"}
    )
    job = subprocess.run(
        [sys.executable, HERE / "tensors_job.py", library, result, sim_library()],
        env=env,
        cwd=HERE,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=300,
    )
    assert job.returncode == 0, job.stdout
    return json.loads(result.read_text())


@needs_fcdp
@pytest.mark.parametrize("name", SCENARIOS)
def test_pluggable(outcomes, name):
    assert outcomes[name] == "passed", outcomes[name]


NCCL_STARTS = """
import ctypes
import pathlib
import sys
import torch
import fcdp

torch.cuda.memory.change_current_allocator(fcdp.fcdp_alloc)
nccl = ctypes.CDLL(pathlib.Path(torch.__file__).parent / "lib" / "libtorch_cuda.so")
pluggable = ctypes.CDLL(sys.argv[1])
text = ctypes.create_string_buffer(4096)
detach = nccl._ZN4c10d5nccl216ProcessGroupNCCL16detachMemoryHookEv
code = pluggable.pluggable_nccl_hook(ctypes.cast(detach, ctypes.c_void_p), text, ctypes.c_size_t(len(text)))
print("code", code, text.value.decode())
"""


@needs_fcdp
@pytest.mark.skipif(not hasattr(torch.distributed, "ProcessGroupNCCL2"), reason="torch 2.15 has this NCCL")
def test_torchs_nccl_hooks_into_the_allocator(tmp_path):
    """torch's own code, up to the calls that it makes of the allocator when a communicator is there."""
    library = cpp.shared_library(tmp_path / "pluggable.so", HERE / "pluggable.cpp", ["c10", "c10_cuda", "torch_cuda"])
    runtime = cpp.shared_library(tmp_path / "standin.so", HERE / "standin_runtime.cpp")
    env = launch.environment(
        launch.new_tag(),
        tmp_path,
        {"STANDIN_DRIVER": str(sim_library()), "LD_PRELOAD": str(runtime)},
    )
    job = subprocess.run(
        [sys.executable, "-c", NCCL_STARTS, library],
        env=env,
        cwd=tmp_path,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=300,
    )
    assert job.returncode == 0 and job.stdout.splitlines()[-1].strip() == "code 0", job.stdout


TAKES_OVER = """
import os
import sys
import torch
{before}
import torch.distributed.fsdp
libc = __import__("ctypes").CDLL(None)
libc.getenv.restype = __import__("ctypes").c_char_p
print("backend", torch._C._cuda_getAllocatorBackend())
print("graph registration", libc.getenv(b"NCCL_GRAPH_REGISTER"))  # as NCCL asks for it
"""


def takes_over(tmp_path, env, before):
    (tmp_path / "driver").mkdir()
    (tmp_path / "driver" / "libcuda.so.1").symlink_to(sim_library())
    env = launch.environment(launch.new_tag(), tmp_path, {"LD_LIBRARY_PATH": str(tmp_path / "driver"), **env})
    command = [sys.executable, "-c", TAKES_OVER.format(before=before)]
    return subprocess.run(command, env=env, cwd=tmp_path, text=True, capture_output=True, timeout=300), env


@needs_fcdp
@pytest.mark.skipif(not hasattr(torch._C, "_cuda_customAllocator"), reason="this torch is built without CUDA")
def test_a_torch_with_another_pluggable_allocator_keeps_its_own(tmp_path):
    job, _ = takes_over(tmp_path, {"FCDP": "1"}, "torch._C._cuda_customAllocator = lambda malloc, free: object()")
    assert job.returncode == 0 and "backend native" in job.stdout, job.stderr
    why = f"fcdp_alloc: the pluggable allocator of torch {torch.__version__} has no set_"
    assert f"fcdp: PyTorch's own allocator serves tensors: {why}" in job.stderr, job.stderr
    assert "; use torch 2.6 to 2.15 (FCDP_ALLOC=native silences this)" in job.stderr, job.stderr


# As of a torch that FCDP does not know; before 2.15 nothing asks.
UNKNOWN_ALLOCATOR = """
torch.distributed.ProcessGroupNCCL2 = object
from fcdp import _fcdp
_fcdp.allocator_calls_find = lambda: "no snapshot"
"""


@needs_fcdp
@pytest.mark.skipif(not hasattr(torch._C, "_cuda_customAllocator"), reason="this torch is built without CUDA")
@pytest.mark.parametrize(
    "case, env, before, backend, says",
    [
        ("with a driver", {"FCDP": "1"}, "", "pluggable", ""),
        ("native asked for", {"FCDP": "1", "FCDP_ALLOC": "native"}, "", "native", ""),
        ("without FCDP", {}, "", "native", ""),
        ("without a driver", {"FCDP": "1", "LD_LIBRARY_PATH": ""}, "", "native", ""),
        (
            "another allocator",
            {"FCDP": "1", "PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"},
            "",
            "cudaMallocAsync",
            "PyTorch's own allocator serves tensors",
        ),
        (
            "cuDNN's benchmark",
            {"FCDP": "1"},
            "torch.backends.cudnn.benchmark = True",
            "native",
            "PyTorch's own allocator serves tensors: torch.backends.cudnn.benchmark needs it (FCDP_ALLOC=native silences",
        ),
        (
            "NCCL registers",
            {"FCDP": "1", "NCCL_GRAPH_REGISTER": "1"},
            "",
            "native",
            "NCCL_GRAPH_REGISTER=1 lets NCCL register",
        ),
        ("NCCL asked not to", {"FCDP": "1", "NCCL_GRAPH_REGISTER": "0"}, "", "pluggable", ""),
        (
            "NCCL registers at all times",
            {"FCDP": "1", "TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK": "true"},
            "",
            "native",
            "TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK=true lets NCCL register",
        ),
        (
            "NCCL gets no answer",
            {"FCDP": "1"},
            UNKNOWN_ALLOCATOR,
            "native",
            "no snapshot, and the NCCL of torch",
        ),
        ("NCCL does not ask", {"FCDP": "1", "TORCH_DIST_USE_NCCL2": "0"}, UNKNOWN_ALLOCATOR, "pluggable", ""),
        (
            "CUDA in use",
            {"FCDP": "1"},
            "torch.cuda.is_initialized = lambda: True",
            "native",
            "import torch.distributed.fsdp before CUDA is used",
        ),
    ],
)
def test_fcdp_takes_tensors_over_where_a_driver_is(tmp_path, case, env, before, backend, says):
    job, env = takes_over(tmp_path, env, before)
    if case == "without a driver" and os.path.exists("/dev/nvidiactl"):
        pytest.skip("there is one")
    assert job.returncode == 0, job.stderr
    assert f"backend {backend}" in job.stdout
    registers = env.get("NCCL_GRAPH_REGISTER", "0" if backend == "pluggable" else None)
    assert f"graph registration {registers and registers.encode()}" in job.stdout, job.stdout
    assert says in job.stderr
    assert ("allocator serves" in job.stderr) == bool(says), job.stderr
