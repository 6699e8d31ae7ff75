"""The kernels without a GPU: what comm/fingerprint.ptx, comm/codec.ptx and comm/copy_if.ptx compute, what a compiler makes of their
sources today, and that they assemble."""

import ctypes
import os
import pathlib
import random
import re
import shutil
import struct
import subprocess
import sys

import pytest

from fcdp import _fcdp

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(ROOT / "tools" / "ptx")]

import compile_ptx  # noqa: E402
import ptx  # noqa: E402

TEXTS = {name: compile_ptx.text_of(name).read_text() for name in compile_ptx.KERNELS}


def seeded():
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    return random.Random(seed), seed


# ---- the fingerprint's ----

TEXT = TEXTS["fingerprint"]
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
    chance, seed = seeded()
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


# ---- the encoder's ----

BLOCK, TASK_BLOCKS, SLOT_BYTES = 2048, 16, 64 << 10  # comm/codec.h, comm/codec_kernel.h
SIZES_BYTES = 2 * TASK_BLOCKS
UNWRITTEN = 0xEE


def sizes_of(wire, n_bytes, width):
    return struct.unpack_from(f"<{-(-n_bytes // (BLOCK * width))}H", wire)


def wire_of_host(base, now, width):
    """By the wheel. It makes none that is no shorter than the array, so an unchanged block stands in front."""
    before = bytes(BLOCK * width)
    arrays = [ctypes.create_string_buffer(before + array) for array in (base, now)]
    wire = _fcdp.delta_encode(*map(ctypes.addressof, arrays), len(before + now), width)
    assert wire[:2] == b"\0\0"
    return wire[2:]


def wires_of_device(kernel, cases):
    """Of (base, now, width, how far behind a multiple of 16 each begins), a task for each."""
    arrays, tasks, slots = {}, bytearray(), []
    for i, (base, now, width, starts) in enumerate(cases):
        at = [(3 * i + k + 1 << 32) + start for k, start in enumerate((*starts, 0))]
        slots.append(bytearray([UNWRITTEN]) * (SIZES_BYTES + len(now)))
        arrays |= zip(at, (bytearray(base), bytearray(now), slots[-1]))
        tasks += struct.pack("<8Q", at[1], len(now), at[0], len(base), at[2], len(slots[-1]), width, 0)
    kernel.launch(len(cases), 128, 4096, ptx.Memory({4096: tasks, **arrays}))
    wires = []
    for (_, now, width, _), written in zip(cases, slots):
        sizes = sizes_of(written, len(now), width)
        wire = bytearray(struct.pack(f"<{len(sizes)}H", *sizes))
        for i, size in enumerate(sizes):
            slot = written[SIZES_BYTES + i * BLOCK * width : SIZES_BYTES + (i + 1) * BLOCK * width]
            assert not slot[size:].strip(bytes([UNWRITTEN])), "written behind a payload"
            wire += slot[:size]
        assert not any(written[2 * len(sizes) : SIZES_BYTES])
        wires.append(bytes(wire))
    return wires


def kinds_of(wire, n_bytes, width):
    """What blocks of a wire have that others have not."""
    kinds, sizes = set(), sizes_of(wire, n_bytes, width)
    at = 2 * len(sizes)
    for i, size in enumerate(sizes):
        if size in (0, min(BLOCK * width, n_bytes - i * BLOCK * width)):
            kinds.add("as it is" if size else "unchanged")
        else:
            (header,) = struct.unpack_from("<H", wire, at)
            k, top, depth = header & 31, header >> 5 & 31, header >> 11
            kinds |= {f"{k // 8} bytes", f"{k % 8 > 0} planes", f"to {(top + 7) // 8} bytes"}
            kinds |= {f"escapes {header >> 10 & 1}", "no tree" if not depth else f"{depth > 6} high tree"}
        at += size
    return kinds


def all_kinds(width):
    kinds = {"as it is", "unchanged", "no tree", "False high tree", "True high tree", "escapes 0", "escapes 1"}
    kinds |= {"False planes", "True planes", *(f"{i} bytes" for i in range(width))}
    return kinds | {f"to {i} bytes" for i in range(1, 3 if width == 2 else 4)}


def arrays_of(chance, n_bytes, width, share, most):
    """A share of the values moves, by less than 2^most; some in pieces, as rows of an embedding do. Most of them move
    little, unless all move."""
    base = chance.randbytes(n_bytes)
    now, length = bytearray(base), chance.choice([1, 1, 30])
    for first in range(0, n_bytes - width + 1, width * length):
        if chance.random() < share:
            for i in range(first, min(first + width * length, n_bytes - width + 1), width):
                by = chance.randrange(1 << (most if share == 1 else chance.randint(0, most)))
                value = int.from_bytes(now[i : i + width], "little") + by
                now[i : i + width] = (value % (1 << 8 * width)).to_bytes(width, "little")
    if n_bytes % width and chance.random() < share:
        now[-1] ^= 1
    return base, bytes(now)


def cases_of(chance, width):
    block = BLOCK * width
    for share in (0, 0.0005, 0.01, 0.1, 0.3, 0.5, 1):
        for most in (1, 3, 6, 8, 11, 15) if width == 2 else (3, 8, 15, 20, 27, 32):
            yield *arrays_of(chance, block, width, share, most), width, (0, 0)
    for n_bytes in (
        1,
        2,
        3,
        4,
        127,
        *[65 * width] * 5,
        130,
        block - 1,
        block + 2,
        2 * block - 4,
        chance.randint(1, block),
    ):
        starts = [width * chance.randrange(16) for _ in range(2)]
        yield *arrays_of(chance, n_bytes, width, chance.random(), chance.randint(0, 8 * width)), width, starts
    parts = [arrays_of(chance, block, width, chance.random() ** 3, chance.randint(0, 8)) for _ in range(32 // width)]
    yield *(b"".join(arrays) for arrays in zip(*parts)), width, (0, 0)  # a whole task


def check_codec(text):
    chance, seed = seeded()
    kernel = ptx.Kernel(text)
    for width in (2, 4):
        cases, kinds = list(cases_of(chance, width)), set()
        while cases:
            some, cases = cases[:8], cases[8:]
            for said, (base, now, _, starts) in zip(wires_of_device(kernel, some), some):
                expected = wire_of_host(base, now, width)
                assert said == expected, f"{len(now)} bytes of width {width} at ...{starts}, seed {seed}"
                kinds |= kinds_of(expected, len(now), width)
        assert kinds >= all_kinds(width), (all_kinds(width) - kinds, seed)


@pytest.mark.slow
def test_the_shipped_text_encodes_as_the_host_does():
    check_codec(TEXTS["codec"])


@pytest.mark.slow
@pytest.mark.parametrize(
    "wrong",
    [
        ("0x55555555", "1431655765", "1431655764"),  # every other bit, but for the lowest
        ("bytes transposed", "20800;", "20801;"),
        ("counts", "popc.b64", "clz.b64"),
        ("bits of two lanes in a word", r"atom.shared.or.b32 \s*%\w+,( \[[^]]*\], %\w+;)", r"st.shared.u32\1"),
        ("lanes that wait for others", "bar.warp.sync[^;]*;", ""),
    ],
    ids=lambda wrong: wrong[0].replace(" ", "_"),
)
def test_a_wrong_encoder_is_noticed(wrong):
    _, was, becomes = wrong
    text, n = re.subn(was, becomes, TEXTS["codec"])
    assert n
    with pytest.raises((AssertionError, IndexError, ValueError)):
        check_codec(text)


# ---- the copies' ----


def check_copies(text):
    """What is not wanted stays, and so does what lies behind a task's bytes, in tasks of any size and start."""
    chance, seed = seeded()
    kernel = ptx.Kernel(text)
    sizes = [0, 1, 15, 16, 17, 4095, 4096, 16384, 16385, 77845, 256 << 10]
    cases = [(n, starts, True) for n in sizes for starts in ((0, 0), (chance.randrange(16), chance.randrange(16)))]
    cases += [(n, (0, 0), False) for n in (16, 5000)]
    tasks, arrays = bytearray(), {}
    for i, (n, starts, wanted) in enumerate(cases):
        at = [(2 * i + k + 1 << 32) + start for k, start in enumerate(starts)]
        arrays |= zip(at, (bytearray(chance.randbytes(n)), bytearray([UNWRITTEN]) * (n + 16)))
        tasks += struct.pack("<8Q", at[0], n, at[1], n, wanted, 0, 0, 0)
    before = bytes(tasks)
    kernel.launch(len(cases), N_THREADS, 4096, ptx.Memory({4096: tasks, **arrays}))
    assert tasks == before
    both = iter(arrays.values())
    for (n, starts, wanted), had, has in zip(cases, both, both):
        expected = (had if wanted else bytes([UNWRITTEN]) * n) + bytes([UNWRITTEN]) * 16
        assert has == expected, f"{n} bytes at ...{starts}, wanted: {wanted}, seed {seed}"


def test_the_shipped_text_copies_what_is_wanted():
    check_copies(TEXTS["copy_if"])


# ---- all of them ----


@pytest.mark.parametrize("kernel", compile_ptx.KERNELS)
def test_drivers_of_torchs_oldest_cuda_take_it(kernel):
    assert f".version {compile_ptx.VERSION}\n.target sm_70\n" in TEXTS[kernel]


@pytest.mark.parametrize("architecture", ["sm_70", "sm_80", "sm_90", "sm_100"])
@pytest.mark.parametrize("kernel", compile_ptx.KERNELS)
def test_it_assembles(kernel, architecture, tmp_path):
    packaged = [str(path) for folder in sys.path for path in pathlib.Path(folder).glob("nvidia/*/bin/ptxas")]
    ptxas = shutil.which(
        "ptxas", path=os.pathsep.join([*(str(pathlib.Path(path).parent) for path in packaged), os.environ["PATH"]])
    )
    if not ptxas:
        pytest.skip("no ptxas on PATH (CUDA's, or of the package nvidia-cuda-nvcc-cu12)")
    done = subprocess.run(
        [ptxas, "-v", f"-arch={architecture}", "-o", tmp_path / "out.cubin", compile_ptx.text_of(kernel)],
        capture_output=True,
        text=True,
    )
    if "is not defined for option" in done.stderr:
        pytest.skip(f"this ptxas does not know {architecture}")
    assert done.returncode == 0, done.stderr
    assert "0 bytes spill stores, 0 bytes spill loads" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("kernel", compile_ptx.KERNELS)
def test_the_source_and_the_text_agree(kernel):
    architecture = compile_ptx.ARCHITECTURE
    try:
        made = compile_ptx.compiled(kernel, architecture)
    except (RuntimeError, subprocess.CalledProcessError):  # newer compilers do not know it any more
        made = compile_ptx.compiled(kernel, architecture := "compute_75")
    if made is None:
        pytest.skip("no NVRTC (package nvidia-cuda-nvrtc-cu12) and no nvcc on PATH")
    print(architecture, "the same text" if made == TEXTS[kernel] else "another text")
    {"fingerprint": check, "codec": check_codec, "copy_if": check_copies}[kernel](made)
