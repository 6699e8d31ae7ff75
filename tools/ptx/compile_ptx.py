"""comm/fingerprint.ptx from comm/fingerprint.cu: compile_ptx.py OUTPUT [ARCHITECTURE]

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
SOURCE = ROOT / "comm" / "fingerprint.cu"
TEXT = ROOT / "comm" / "fingerprint.ptx"
VERSION = "6.4"
ARCHITECTURE = "compute_70"


def nvrtc():
    """NVRTC, or None."""
    packaged = [path for folder in sys.path for path in glob.glob(f"{folder}/nvidia/*/lib/libnvrtc.so.*")]
    for path in [*packaged, "libnvrtc.so", *glob.glob("/usr/local/cuda*/lib64/libnvrtc.so")]:
        try:
            return ctypes.CDLL(path)
        except OSError:
            continue
    return None


def by_nvrtc(library, architecture):
    """A failure but the compiler's own says nothing here: the text that follows is then empty."""
    call = lambda name, *args: getattr(library, name)(*args)  # noqa: E731
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    call("nvrtcCreateProgram", ctypes.byref(program), SOURCE.read_bytes(), b"fingerprint.cu", 0, None, None)
    options = (ctypes.c_char_p * 1)(f"--gpu-architecture={architecture}".encode())
    failed = call("nvrtcCompileProgram", program, 1, options)
    if failed:
        call("nvrtcGetProgramLogSize", program, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value)
        call("nvrtcGetProgramLog", program, log)
        raise RuntimeError(f"NVRTC does not compile {SOURCE.name} for {architecture}: {log.value.decode() or failed}")
    call("nvrtcGetPTXSize", program, ctypes.byref(size))
    text = ctypes.create_string_buffer(size.value)
    call("nvrtcGetPTX", program, text)
    return text.value.decode()


def by_nvcc(nvcc, architecture):
    with tempfile.TemporaryDirectory() as folder:
        output = pathlib.Path(folder, "out.ptx")
        subprocess.run([nvcc, "-ptx", f"-arch={architecture}", "-o", output, SOURCE], check=True)
        return output.read_text()


def lowered(text):
    """Without the compiler's own remarks, and for older drivers."""
    text = re.sub(r"^//.*\n", "", text, flags=re.MULTILINE)
    text = re.sub(r"^\.version .*", f".version {VERSION}", text, flags=re.MULTILINE)
    return re.sub(r"\s*//.*", "", text).strip() + "\n"


def compiled(architecture=ARCHITECTURE):
    """The PTX; None where no compiler is found."""
    library, nvcc = nvrtc(), shutil.which("nvcc")
    if library:
        return lowered(by_nvrtc(library, architecture))
    return lowered(by_nvcc(nvcc, architecture)) if nvcc else None


if __name__ == "__main__":
    made = compiled(*sys.argv[2:])
    if made is None:
        sys.exit("no NVRTC and no nvcc was found: pip install nvidia-cuda-nvrtc-cu12 (13 does not know compute_70)")
    pathlib.Path(sys.argv[1]).write_text(made)
