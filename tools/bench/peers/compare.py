"""Trains the demo's GPT on 2 emulated nodes of 2 ranks with FSDP2, FCDP, and the libraries that shard as they do, with 1
and with 4 micro-batches per optimizer step, and prints the table of docs/peers.md. Device memory is measured in runs of
its own. tools/bench.sh --help names the options."""

import argparse
import importlib.metadata
import json
import os
import pathlib
import platform
import shlex
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import textwrap
import venv

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
import frameworks
from frameworks import INT8, REDUCE, ROOT, ROUNDED, WHOLE

DOCUMENT = ROOT / "docs" / "peers.md"
JOB = ["tools/bench/peers/job.py", "--steps", "6", "--dim", "168", "--layers", "4"]
MICRO_BATCHES = (1, 4)
# For memory, a larger model of few activations: parameters, gradients and optimizer state are most of what a rank holds.
# Its figures are neither times nor bytes, so the links are not shaped. The allocator gives tensors back when they end.
MEMORY_JOB = [JOB[0], *"--steps 3 --micro-batches 4 --batch 1 --seq 16 --text LICENSE".split()]
MEMORY_OPTIONS = "--launcher direct --env MALLOC_MMAP_THRESHOLD_=65536 --env MALLOC_TRIM_THRESHOLD_=65536".split()
# What pip installs for a library, call by call.
LIBRARIES = {
    "megatron-fsdp": [["megatron-fsdp==0.6.1"]],
    "deepspeed": [["setuptools<81", "wheel", "ninja"], ["--no-build-isolation", "deepspeed==0.19.8"]],
}
# Title, mode of fcdp-lab, and the library that the mode needs. The first is what the others are compared with.
PEERS = [
    ("FSDP2", "", None),
    ("FSDP2, reshard_after_forward=2, the ranks of a node", "-- --reshard-after-forward 2", None),
    ("FSDP2, reshard_after_forward=False", "-- --reshard-after-forward false", None),
    ("HSDP", "-- --hsdp", None),
    ("megatron-fsdp, FSDP", "-- --peer with_megatron:fsdp", "megatron-fsdp"),
    ("megatron-fsdp, HFSDP", "-- --peer with_megatron:hfsdp", "megatron-fsdp"),
    ("DeepSpeed, ZeRO-3", "-- --peer with_deepspeed:zero3", "deepspeed"),
    ("DeepSpeed, ZeRO-3 with hpZ", "-- --peer with_deepspeed:hpz", "deepspeed"),
    ("**FCDP=1**", "FCDP=1", None),
    ("`FCDP_TAU=1`", "FCDP=1 FCDP_TAU=1", None),
    (f"`{WHOLE}`", f"FCDP=1 {WHOLE}", None),
    (f"`{ROUNDED}`", f"FCDP=1 {ROUNDED}", None),
    (f"`{REDUCE}`", f"FCDP=1 {REDUCE}", None),
    (f"`{REDUCE} {INT8}`", f"FCDP=1 {REDUCE} {INT8}", None),
]
# Whose memory alone is measured: it has no buffers of differences, which are host memory of a job on GPUs.
REDUCE_WHOLE = (f"`{REDUCE} {WHOLE}`", f"FCDP=1 {REDUCE} {WHOLE}", None)
MEMORY = "device memory, 4 micro-batches"
HEAD = (
    "peer | sent per step, 1 micro-batch | 4 micro-batches | step, 1 micro-batch | 4 micro-batches | "
    f"{MEMORY} | training | largest difference of a loss"
)
# ZeRO++'s kernels of qwZ and qgZ are for CUDA alone. Its paper (arXiv 2306.10209) counts 3 M for ZeRO-3.
NOT_MEASURED = [
    "DeepSpeed, ZeRO++ (hpZ, qwZ, qgZ): not measured",
    "0.25 of ZeRO-3's, by its paper",
    *["-"] * 4,
    "rounded weights and sums",
    "-",
]


class NoEnvironment(Exception):
    """A library could not be installed; the text says why."""


def modules_of(folder):
    """Where the virtual environment in the folder has its modules."""
    return pathlib.Path(sysconfig.get_path("purelib", "posix_prefix", {"base": str(folder)}))


def environment(library):
    """The folder with the library's modules, in a virtual environment of its own over the packages of this Python."""
    folder = ROOT / "build" / "peers" / library
    modules, complete = modules_of(folder), folder / "complete"
    wanted = repr((LIBRARIES[library], sys.version))
    if complete.exists() and complete.read_text() == wanted:
        return modules
    print(f"build/peers/{library}: pip install {LIBRARIES[library][-1][-1]}", file=sys.stderr, flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    venv.create(folder, with_pip=True)
    below = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    (modules / "below.pth").write_text("".join(f"{path}\n" for path in below))
    for arguments in LIBRARIES[library]:
        pip = [folder / "bin" / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *arguments]
        done = subprocess.run(pip, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        if done.returncode:
            raise NoEnvironment(next(iter(done.stderr.strip().splitlines()[-1:]), f"pip ended with {done.returncode}"))
    complete.write_text(wanted)
    return modules


def environments():
    """Of each library its modules, and of each that cannot be had here, why."""
    found, missing = {}, {}
    for library in LIBRARIES:
        try:
            found[library] = environment(library)
        except (NoEnvironment, OSError, subprocess.CalledProcessError) as error:
            missing[library] = str(error)
    return found, missing


def difference(mode, reference):
    """The largest relative difference of a loss to the reference's at the same step."""
    pairs = zip(map(float, mode["runs"][0]["losses"]), map(float, reference["runs"][0]["losses"]))
    return max(abs(a - b) / abs(b) for a, b in pairs)


def memory_of_a_run(mode):
    """Of the rank that takes most, in units of W, and W in bytes; of FCDP the node's copy, in units of W too."""
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "memory")
        mode = f"{mode} {'' if '-- ' in mode else '-- '}--memory {path}"
        (measured,) = frameworks.lab("unlimited", MEMORY_JOB, [mode], more=MEMORY_OPTIONS)
        ranks = [json.loads(line) for line in path.read_text().splitlines()]
    w = ranks[0]["W_bytes"]
    return max(rank["device_bytes"] for rank in ranks) / w, w, measured["host_peak_bytes"] / w


def memory(peers, repeat):
    """Of each title the median of its runs' figures, which take turns."""
    runs = [{title: memory_of_a_run(mode) for title, mode in peers} for _ in range(repeat)]
    return {title: tuple(map(statistics.median, zip(*(run[title] for run in runs)))) for title, _ in peers}


def rows(titles, documents, taken):
    """documents: for each number of micro-batches, the modes that fcdp-lab measured, in the order of the titles. taken:
    what memory() says."""
    references = [modes[0] for modes in documents]
    w = references[0]["W_bytes"]
    for title, *measured in zip(titles, *documents):
        pairs = list(zip(measured, references))
        trained = dict.fromkeys(frameworks.training(mode, reference) for mode, reference in pairs)
        apart = max(difference(mode, reference) for mode, reference in pairs)
        yield [
            title,
            *(f"{mode['sent_bytes_per_step'] / w:.2f} W" for mode in measured),
            *(f"{mode['step_s'] / reference['step_s']:.2f}" for mode, reference in pairs),
            f"{taken[title][0]:.2f} W",
            ", ".join(trained),
            f"{apart:.0e}" if apart else "0",
        ]


def versions(found):
    """Of what was measured."""
    said = [f"torch {importlib.metadata.version('torch').partition('+')[0]}"]
    for library, modules in found.items():
        said += [f"{library} {d.version}" for d in importlib.metadata.distributions(name=library, path=[str(modules)])]
    return ", ".join(said)


def text(options, found, missing, table, documents):
    """What stands between the marks of the document."""
    short, long = documents[0][0], documents[-1][0]
    said = [
        f"2 nodes x 2 ranks on one machine ({platform.machine()}, {len(os.sched_getaffinity(0))} CPUs, no GPU), "
        f"{options.rate} between the nodes, gloo; {versions(found)}. W = {short['W_bytes'] / 1e6:.2f} MB, in float32. "
        f"FSDP2's step takes {short['step_s']:.2f} s with 1 micro-batch, {long['step_s']:.2f} s with {MICRO_BATCHES[-1]}.",
        *(f"Left out: {library}, which could not be installed: {why}" for library, why in missing.items()),
    ]
    wrapped = "\n\n".join(textwrap.fill(paragraph, 110) for paragraph in said)
    return "\n".join([wrapped, "", *frameworks.lines(HEAD, table), ""])


def text_of_memory(taken):
    """What stands below the table."""
    title = REDUCE_WHOLE[0]
    figure, w, host = taken[title]
    said = (
        f"Device memory is that of a larger model (W = {w / 1e6:.1f} MB), with 16 tokens per micro-batch. {title}, "
        f"which is what `{REDUCE}` is on a GPU, takes {figure:.2f} W. FCDP's copy of the parameters in host memory is "
        f"not part of it: {host:.2f} W per node."
    )
    return f"{textwrap.fill(said, 110)}\n"


def put(name, change):
    """Changes what stands between the marks of this name."""
    begin, end = f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->"
    before, rest = DOCUMENT.read_text().split(begin)
    old, after = rest.split(end)
    DOCUMENT.write_text(f"{before}{begin}{change(old)}{end}{after}")


def with_memory(old, taken):
    """The table with these figures in the place of those of memory that it has."""

    def changed(line):
        cells = line.strip("| ").split(" | ")
        if cells[0] in taken:
            cells[HEAD.split(" | ").index(MEMORY)] = f"{taken[cells[0]][0]:.2f} W"
            return f"| {' | '.join(cells)} |"
        return line

    return "".join(f"{changed(line)}\n" for line in old.splitlines())


def main():
    parser = argparse.ArgumentParser(prog="tools/bench.sh peers")
    frameworks.add_options(parser, DOCUMENT)
    parser.add_argument("--memory", action="store_true", help="measure device memory alone, and write that column")
    options = parser.parse_args()
    frameworks.stop_on_signals()
    found, missing = environments()
    titles, modes = [], []
    for title, mode, library in PEERS:
        if library not in missing:
            path = f"PYTHONPATH={shlex.quote(str(found[library]))} " if library else ""
            titles.append(title)
            modes.append(path + mode)
    documents, table = [], []
    if not options.memory:
        documents = [
            frameworks.lab(options.rate, [*JOB, "--micro-batches", str(n)], modes, options.repeat)
            for n in MICRO_BATCHES
        ]
    taken = memory([*zip(titles, modes), REDUCE_WHOLE[:2]], options.repeat)
    if options.memory:
        cells = [[title, f"{figure:.2f} W"] for title, (figure, *_) in taken.items()]
        print(*frameworks.lines(f"peer | {MEMORY}", cells), sep="\n")
    else:
        table = [*rows(titles, documents, taken), NOT_MEASURED]
        written = text(options, found, missing, table, documents)
        print(written)
    print(f"\n{text_of_memory(taken)}", flush=True)
    if options.write:
        put("peers", lambda old: with_memory(old, taken) if options.memory else written)
        put("memory", lambda _: text_of_memory(taken))
    return any("NOT EQUAL" in cell for row in table for cell in row)


if __name__ == "__main__":
    sys.exit(main())
