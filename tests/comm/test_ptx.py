"""The fingerprint's kernel without a GPU: what comm/fingerprint.ptx computes, what a compiler makes of its
source today, and that it assembles."""

import os
import pathlib
import random
import shutil
import struct
import subprocess
import sys

import pytest

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(ROOT / "tools" / "ptx")]

import compile_ptx  # noqa: E402
import ptx  # noqa: E402

TEXT = compile_ptx.TEXT.read_text()
N_THREADS, TASK_BYTES = 256, 256 << 10  # comm/fingerprint.h
MASK = (1 << 64) - 1
# A word's end, a pair's, one round of all threads (4 KiB) and an unrolled one (16 KiB), each with a rest.
SIZES = [0, 1, 7, 8, 9, 15, 16, 17, 100, 2048, 4095, 4096, 4097, 16383, 16384, 16385, 20000, 33000]
STARTS = [0, 1, 2, 4, 7, 8, 12]


def mix(x):
    for _ in range(2):
        x = (x ^ x >> 32) * 0xD6E8FEB86659FD93 & MASK
    return x ^ x >> 32


def sum_of(data, first):
    words = (int.from_bytes(data[i : i + 8], "little") for i in range(0, len(data), 8))
    return sum(mix(word + (first + i + 1) * 0x9E3779B97F4A7C15 & MASK) for i, word in enumerate(words)) & MASK


def run(kernel, cases):
    """Sums of (bytes, start of their address, index of the first word), a block for each."""
    arrays = {(1 + i) << 32 | start: bytearray(data) for i, (data, start, _) in enumerate(cases)}
    tasks = bytearray().join(
        struct.pack("<4Q", at, len(data), first, 77) for at, (data, _, first) in zip(arrays, cases)
    )
    kernel.launch(len(cases), N_THREADS, 4096, ptx.Memory({4096: tasks, **arrays}))
    return [struct.unpack_from("<4Q", tasks, 32 * i)[3] for i in range(len(cases))]


def check(text):
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    kernel = ptx.Kernel(text)
    sizes = [(size, 0) for size in SIZES] + [(size, start) for size in (1, 9, 16, 100, 5000, 20000) for start in STARTS]
    cases = [(chance.randbytes(size), start, chance.choice([0, 5, TASK_BYTES // 8, 1 << 40])) for size, start in sizes]
    for said, (data, start, first) in zip(run(kernel, cases), cases):
        assert said == sum_of(data, first), f"{len(data)} bytes at ...{start}, first word {first}, seed {seed}"


@pytest.mark.slow
def test_the_shipped_text_computes_the_sum():
    check(TEXT)


@pytest.mark.parametrize("start", [1, 2, 4, 8, 12])
def test_few_bytes_are_read_one_by_one(start):
    """Wherever an array begins: its first word and its last, or it takes many times as long as one at 16."""
    bytes_read = TEXT.count("ld.global.nc.u8")
    counted = ptx.Memory({})
    loads, load = [], counted.load
    data = random.randbytes(20000)
    tasks = bytearray(struct.pack("<4Q", (1 << 32) + start, len(data), 0, 77))
    counted.arrays = {4096: tasks, (1 << 32) + start: bytearray(data)}
    counted.load = lambda at, n, aligned: loads.append(n) or load(at, n, aligned)
    ptx.Kernel(TEXT).launch(1, N_THREADS, 4096, counted)
    assert bytes_read and struct.unpack_from("<4Q", tasks)[3] == sum_of(data, 0)
    assert loads.count(1) <= 3 * 8 and len(loads) < 3 * len(data) / 8


@pytest.mark.slow
@pytest.mark.parametrize(
    "wrong",
    [
        ("xor.b64", "or.b64"),
        ("add.s32 	%r", "sub.s32 	%r"),
        ("bar.sync 	0;", ""),
        ("ld.global.nc.u8", "ld.global.nc.u64"),
    ],
)
def test_a_wrong_instruction_is_noticed(wrong):
    """Of the tool: it runs what it is given."""
    assert wrong[0] in TEXT
    with pytest.raises((AssertionError, IndexError, ValueError)):
        check(TEXT.replace(*wrong))


def test_drivers_of_torchs_oldest_cuda_take_it():
    assert f".version {compile_ptx.VERSION}\n.target sm_70\n" in TEXT


@pytest.mark.parametrize("architecture", ["sm_70", "sm_80", "sm_90", "sm_100"])
def test_it_assembles(architecture, tmp_path):
    packaged = [str(path) for folder in sys.path for path in pathlib.Path(folder).glob("nvidia/*/bin/ptxas")]
    ptxas = shutil.which(
        "ptxas", path=os.pathsep.join([*(str(pathlib.Path(path).parent) for path in packaged), os.environ["PATH"]])
    )
    if not ptxas:
        pytest.skip("no ptxas on PATH (CUDA's, or of the package nvidia-cuda-nvcc-cu12)")
    done = subprocess.run(
        [ptxas, "-v", f"-arch={architecture}", "-o", tmp_path / "out.cubin", compile_ptx.TEXT],
        capture_output=True,
        text=True,
    )
    if "is not defined for option" in done.stderr:
        pytest.skip(f"this ptxas does not know {architecture}")
    assert done.returncode == 0, done.stderr
    assert "0 bytes spill stores, 0 bytes spill loads" in done.stderr


@pytest.mark.slow
def test_the_source_and_the_text_agree():
    architecture = compile_ptx.ARCHITECTURE
    try:
        made = compile_ptx.compiled(architecture)
    except (RuntimeError, subprocess.CalledProcessError):  # newer compilers do not know it any more
        made = compile_ptx.compiled(architecture := "compute_75")
    if made is None:
        pytest.skip("no NVRTC (package nvidia-cuda-nvrtc-cu12) and no nvcc on PATH")
    print(architecture, "the same text" if made == TEXT else "another text")
    check(made)
