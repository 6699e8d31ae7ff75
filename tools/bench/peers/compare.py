"""Trains the demo's GPT on 2 emulated nodes of 2 ranks with FSDP2, FCDP, and the libraries that shard as they do, with 1
and with 4 micro-batches per optimizer step, and prints the table of docs/peers.md. tools/bench.sh --help names the
options."""

import argparse
import importlib.metadata
import os
import pathlib
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
import textwrap
import venv

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
import frameworks
from frameworks import INT8, REDUCE, ROOT, ROUNDED, WHOLE

DOCUMENT = ROOT / "docs" / "peers.md"
JOB = ["tools/bench/peers/job.py", "--steps", "6", "--dim", "168", "--layers", "4"]
MICRO_BATCHES = (1, 4)
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
HEAD = (
    "peer | sent per step, 1 micro-batch | 4 micro-batches | step, 1 micro-batch | 4 micro-batches | training | "
    "largest difference of a loss"
)
# ZeRO++'s kernels of qwZ and qgZ are for CUDA alone. Its paper (arXiv 2306.10209) counts 3 M for ZeRO-3.
NOT_MEASURED = [
    "DeepSpeed, ZeRO++ (hpZ, qwZ, qgZ): not measured",
    "0.25 of ZeRO-3's, by its paper",
    *["-"] * 3,
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


def rows(titles, documents):
    """documents: for each number of micro-batches, the modes that fcdp-lab measured, in the order of the titles."""
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


def put(written):
    begin, end = "<!-- peers: begin -->\n", "<!-- peers: end -->"
    before, rest = DOCUMENT.read_text().split(begin)
    DOCUMENT.write_text(f"{before}{begin}{written}{end}{rest.split(end)[1]}")


def main():
    parser = argparse.ArgumentParser(prog="tools/bench.sh peers")
    frameworks.add_options(parser, DOCUMENT)
    options = parser.parse_args()
    frameworks.stop_on_signals()
    found, missing = environments()
    titles, modes = [], []
    for title, mode, library in PEERS:
        if library not in missing:
            path = f"PYTHONPATH={shlex.quote(str(found[library]))} " if library else ""
            titles.append(title)
            modes.append(path + mode)
    documents = [
        frameworks.lab(options.rate, [*JOB, "--micro-batches", str(n)], modes, options.repeat) for n in MICRO_BATCHES
    ]
    table = [*rows(titles, documents), NOT_MEASURED]
    written = text(options, found, missing, table, documents)
    print(written, flush=True)
    if options.write:
        put(written)
    return any("NOT EQUAL" in cell for row in table for cell in row)


if __name__ == "__main__":
    sys.exit(main())
