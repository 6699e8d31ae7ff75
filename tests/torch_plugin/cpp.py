"""C++ that tests compile against torch and the CUDA runtime's headers, as PyTorch itself is."""

import pathlib
import shutil
import subprocess

import pytest
import torch


def _cuda_headers():
    """As the wheels that torch depends on bring them, or a CUDA toolkit."""
    places = list(pathlib.Path(torch.__file__).parent.parent.glob("nvidia/*/include")) + [
        pathlib.Path("/usr/local/cuda/include")
    ]
    return [place for place in places if (place / "cuda_runtime_api.h").exists()]


def shared_library(library, source, torch_libraries=()):
    """`library` from `source`, linked with those of torch's libraries. Skips the test where it cannot be built."""
    if not hasattr(torch._C, "_cuda_customAllocator"):
        pytest.skip("this torch is built without CUDA")
    headers = _cuda_headers()
    if not shutil.which("g++") or not headers:
        pytest.skip("needs g++ and CUDA's headers, to call torch's allocators as torch does")
    root = pathlib.Path(torch.__file__).parent
    includes = [*headers, root / "include", root / "include" / "torch" / "csrc" / "api" / "include"]
    subprocess.run(
        [
            "g++",
            "-std=c++20",
            "-O0",
            "-shared",
            "-fPIC",
            f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}",
            "-o",
            library,
            source,
            *(f"-I{place}" for place in includes),
            f"-L{root}/lib",
            *(f"-l{name}" for name in torch_libraries),
        ],
        check=True,
    )
    return library
