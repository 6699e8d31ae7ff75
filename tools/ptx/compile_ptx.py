"""The kernels of comm/*.cu as PTX: compile_ptx.py KERNEL OUTPUT [ARCHITECTURE], where KERNEL is fingerprint,
codec or copy_if.

With NVRTC (libnvrtc.so: CUDA's, or of the package nvidia-cuda-nvrtc-cu12) or nvcc, whichever is found. The
PTX's version is then lowered to 6.4, which drivers from CUDA 10.1 on take: a driver refuses a version newer
than its own, and the text uses nothing newer.
"""

import ctypes
import glob
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
KERNELS = ("fingerprint", "codec", "copy_if")
VERSION = "6.4"
ARCHITECTURE = "compute_70"


def source_of(kernel):
    return ROOT / "comm" / f"{kernel}.cu"


def text_of(kernel):
    """What is shipped."""
    return ROOT / "comm" / f"{kernel}.ptx"


def nvrtc():
    """NVRTC, or None."""
    packaged = [path for folder in sys.path for path in glob.glob(f"{folder}/nvidia/*/lib/libnvrtc.so.*")]
    for path in [*packaged, "libnvrtc.so", *glob.glob("/usr/local/cuda*/lib64/libnvrtc.so")]:
        try:
            return ctypes.CDLL(path)
        except OSError:
            continue
    return None


def by_nvrtc(library, source, architecture):
    """A failure but the compiler's own says nothing here: the text that follows is then empty."""
    call = lambda name, *args: getattr(library, name)(*args)  # noqa: E731
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    call("nvrtcCreateProgram", ctypes.byref(program), source.read_bytes(), source.name.encode(), 0, None, None)
    options = (ctypes.c_char_p * 1)(f"--gpu-architecture={architecture}".encode())
    failed = call("nvrtcCompileProgram", program, 1, options)
    if failed:
        call("nvrtcGetProgramLogSize", program, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value)
        call("nvrtcGetProgramLog", program, log)
        raise RuntimeError(f"NVRTC does not compile {source.name} for {architecture}: {log.value.decode() or failed}")
    call("nvrtcGetPTXSize", program, ctypes.byref(size))
    text = ctypes.create_string_buffer(size.value)
    call("nvrtcGetPTX", program, text)
    return text.value.decode()


def by_nvcc(nvcc, source, architecture):
    with tempfile.TemporaryDirectory() as folder:
        output = pathlib.Path(folder, "out.ptx")
        subprocess.run([nvcc, "-ptx", f"-arch={architecture}", "-o", output, source], check=True)
        return output.read_text()


def lowered(text):
    """Without the compiler's own remarks, and for older drivers."""
    text = re.sub(r"^//.*\n", "", text, flags=re.MULTILINE)
    text = re.sub(r"^\.version .*", f".version {VERSION}", text, flags=re.MULTILINE)
    return re.sub(r"\s*//.*", "", text).strip() + "\n"


def compiled(kernel, architecture=ARCHITECTURE):
    """The PTX; None where no compiler is found."""
    source, library, nvcc = source_of(kernel), nvrtc(), shutil.which("nvcc")
    if library:
        return lowered(by_nvrtc(library, source, architecture))
    return lowered(by_nvcc(nvcc, source, architecture)) if nvcc else None


if __name__ == "__main__":
    if len(sys.argv) not in (3, 4) or sys.argv[1] not in KERNELS:
        sys.exit(__doc__)
    made = compiled(sys.argv[1], *sys.argv[3:])
    if made is None:
        sys.exit("no NVRTC and no nvcc was found: pip install nvidia-cuda-nvrtc-cu12 (13 does not know compute_70)")
    pathlib.Path(sys.argv[2]).write_text(made)
