"""Everything that only a GPU can show, in one report: tools/gpu.sh's program. Its sections are programs of their
own, beside this file: what one of them does to its process or to the device's context is its own, and one
that hangs is ended without the others.

Writes report.txt, report.json and, for each section, what it printed. Nothing is installed outside of the
output's folder.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time
from typing import Any, NamedTuple

import machine
import report

HERE = pathlib.Path(__file__).resolve().parent
NO_GPU = 3


class Section(NamedTuple):
    name: str
    title: str
    seconds: int  # its share of LIMIT_S
    program: pathlib.Path


def _section(name: str, seconds: int, title: str) -> Section:
    return Section(name, title, seconds, HERE / f"{name}.py")


SECTIONS = [
    _section("c_tests", 25, "The C tests on the driver, every check on"),
    _section("mapping", 30, "Physical handles and mappings, by handle size"),
    _section("copies", 25, "Copies, page-locking, moving a region, sleep"),
    _section("fingerprints", 20, "The fingerprint's kernel"),
    _section("codec", 20, "The kernel that encodes differences"),
    _section("nccl_one", 25, "NCCL with one rank"),
    _section("nccl_alloc", 30, "PyTorch's own NCCL with fcdp_alloc: one process"),
    _section("fsdp2", 100, "FSDP2 and FCDP: 2 nodes x 2 ranks on one device, over gloo"),
    _section("budget", 60, "Parameters that exceed the device budget, likewise"),
    _section("dpo", 55, "LoRA with DPO's reference forward, likewise"),
    _section("nccl_ranks", 60, "FSDP2 and FCDP: the same 4 ranks over NCCL"),
    _section("allocators", 70, "Training under PyTorch's allocators and FCDP's"),
]
LIMIT_S = 520  # of the sections together, in 9 minutes


def arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="tools/gpu.sh", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    root = HERE.parent.parent
    add("--bundle-dir", type=pathlib.Path, default=root / "build" / "gpu-bundle")
    add("--out", type=pathlib.Path, default=root / "build" / "gpu-report")
    add("--minutes", type=float, default=9.0)
    add("--only", type=lambda text: text.split(","), metavar="SECTION,...")
    add("--list", action="store_true")
    add("--simulated", action="store_true")
    args = parser.parse_args(argv)
    unknown = set(args.only or ()) - {section.name for section in SECTIONS}
    if unknown:
        parser.error(
            f"no section {', '.join(sorted(unknown))}; there are {', '.join(section.name for section in SECTIONS)}"
        )
    if not 0.1 <= args.minutes <= 600:
        parser.error(f"--minutes {args.minutes:g}: 0.1 to 600")
    args.bundle_dir, args.out = args.bundle_dir.resolve(), args.out.resolve()
    return args


# ---- the wheel ----


def install_wheel(bundle_dir: pathlib.Path, site_dir: pathlib.Path) -> str:
    """The bundle's wheel into a folder of its own; how it got there. A wheel of this kind is its files: where
    pip refuses, it is unpacked."""
    wheels = sorted(bundle_dir.glob("fcdp-*.whl"))
    if len(wheels) != 1:
        raise report.Unusable(
            f"{bundle_dir} holds {len(wheels)} wheels, not 1: make it where things are built with tools/gpu.sh --bundle"
        )
    command = [
        sys.executable,
        "-m",
        "pip",
        "--disable-pip-version-check",
        "--no-input",
        "install",
        "--no-deps",
        "--no-index",
        "--no-compile",
        "--target",
        str(site_dir),
        str(wheels[0]),
    ]
    job = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    how = "pip install --no-deps --no-index --target"
    if job.returncode:
        shutil.rmtree(site_dir, ignore_errors=True)
        unpacked = subprocess.run(
            [sys.executable, "-m", "zipfile", "-e", str(wheels[0]), str(site_dir)], capture_output=True, text=True
        )
        if unpacked.returncode:
            raise report.Unusable(
                f"{wheels[0].name} can be neither installed ({job.stdout.strip()[-300:]}) nor unpacked ({unpacked.stderr.strip()[-300:]})"
            )
        how = "unpacked, as pip refused"
    # .pth files count in site folders alone; with this one, FCDP=1 works as if the wheel were installed.
    (site_dir / "sitecustomize.py").write_text(f"import site\nsite.addsitedir({str(site_dir)!r})\n")
    return f"{wheels[0].name} ({how})"


def versions(env: dict[str, str]) -> dict[str, Any]:
    """Of torch and its NCCL, and whether it reaches a device; asked in a process of its own, which also reads
    what the sections' processes import."""
    ask = """
import json, torch, torch.distributed.fsdp, torch.profiler
nccl = None
if torch.distributed.is_available() and torch.distributed.is_nccl_available():
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
print(json.dumps({"torch": torch.__version__, "torch_cuda": torch.version.cuda, "nccl_of_torch": nccl, "torch_sees_gpu": torch.cuda.is_available()}))
"""
    nothing = {"torch": None, "torch_cuda": None, "nccl_of_torch": None, "torch_sees_gpu": False}
    try:
        job = subprocess.run(
            [sys.executable, "-c", ask], env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120
        )
        return (
            nothing | json.loads(job.stdout.splitlines()[-1])
            if job.returncode == 0
            else nothing | {"torch_problem": job.stderr.strip()[-300:]}
        )
    except (subprocess.TimeoutExpired, ValueError, IndexError) as error:
        return nothing | {"torch_problem": f"{type(error).__name__}: {error}"[:300]}


def environment(site_dir: pathlib.Path, out: pathlib.Path) -> dict[str, str]:
    """Of every section: the wheel, and nothing of the caller's that changes what is measured."""
    dropped = ("FCDP", "TORCHELASTIC", "NCCL_", "PYTORCH_")
    env = {
        k: v
        for k, v in os.environ.items()
        if not k.startswith(dropped) and k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    }
    path = f"{site_dir}{os.pathsep}{env['PYTHONPATH']}" if env.get("PYTHONPATH") else str(site_dir)
    return env | {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"} | compiled_modules(env, out)


def compiled_modules(env: dict[str, str], out: pathlib.Path) -> dict[str, str]:
    """Many processes import torch. Where it was not compiled when it was installed, and cannot be beside its
    sources, it is compiled once, here."""
    torch = importlib.util.find_spec("torch")
    folder = pathlib.Path(torch.origin).parent if torch and torch.origin else None
    if env.get("PYTHONPYCACHEPREFIX") or folder is None or (folder / "__pycache__").exists():
        return {}
    return {"PYTHONPYCACHEPREFIX": str(out / "pycache"), "PYTHONDONTWRITEBYTECODE": ""}


# ---- sections ----


def end_group(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def run_section(section: Section, settings: dict[str, Any], env: dict[str, str]) -> dict[str, Any]:
    """Its result. Its processes are one group, of which none is left afterwards; it ends by itself, or at its limit."""
    out, began = pathlib.Path(settings["out_dir"]), time.monotonic()
    path = out / f"{section.name}.settings.json"
    path.write_text(json.dumps(settings))
    timed_out = False
    with open(out / f"{section.name}.log", "wb") as log:
        process = subprocess.Popen(
            [sys.executable, str(section.program), str(path)],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=out,
            start_new_session=True,
        )
        try:
            process.wait(settings["seconds"])
        except subprocess.TimeoutExpired:
            timed_out = True
        finally:
            end_group(process.pid)
            process.wait()
    return report.section_result(
        section.name, section.title, out, process.returncode, timed_out, settings["seconds"], time.monotonic() - began
    )


def run_sections(
    sections: list[Section], settings: dict[str, Any], env: dict[str, str], deadline: float
) -> list[dict[str, Any]]:
    """One after another. A section's limit is its share of the time, and what those before it left of theirs."""
    results, whole = [], max(1.0, deadline - time.monotonic())
    scale = whole / sum(section.seconds for section in sections)
    end = time.monotonic()
    for section in sections:
        end += section.seconds * scale
        limit = min(end, deadline) - time.monotonic()
        print(f"{section.name:<13} {section.title} ...", flush=True)
        if limit < 1:
            results.append(report.not_run(section.name, section.title, "no time was left"))
        else:
            results.append(run_section(section, settings | {"seconds": limit}, env))
        print(f"{'':<13} {report.one_line(results[-1])}", flush=True)
    return results


def main(argv: list[str], sections: list[Section] = SECTIONS) -> int:
    args = arguments(argv)
    chosen = [s for s in sections if not args.only or s.name in args.only]
    if args.list:
        for section in chosen:
            print(f"{section.name:<13} {section.seconds:4d} s  {section.title}")
        return 0
    began = time.monotonic()
    try:
        facts = (
            machine.host() | {"device": "simulated: no figure here is of a GPU"} if args.simulated else machine.facts()
        )
    except machine.NoGpu as error:
        print(
            f"tools/gpu.sh: no GPU can be used here: {error}. Nothing was measured (--simulated runs it on the simulated device)."
        )
        return NO_GPU
    if args.out.exists() and any(args.out.iterdir()) and not (args.out / report.MARK).exists():
        print(
            f"tools/gpu.sh: {args.out} is not empty, and no report of this program: --out names another folder",
            file=sys.stderr,
        )
        return 2
    shutil.rmtree(args.out, ignore_errors=True)
    args.out.mkdir(parents=True)
    (args.out / report.MARK).touch()
    site_dir = args.out / "site"
    env = environment(site_dir, args.out)
    try:
        wheel = install_wheel(args.bundle_dir, site_dir)
    except report.Unusable as error:
        print(f"tools/gpu.sh: {error}", file=sys.stderr)
        return 2
    facts |= versions(env) | {"wheel": wheel, "commit": report.read(args.bundle_dir / "commit")}
    settings = {
        "bundle_dir": str(args.bundle_dir),
        "out_dir": str(args.out),
        "simulated": args.simulated,
        "machine": facts,
    }
    print(report.heading(facts), flush=True)
    results = run_sections(chosen, settings, env, began + 60 * args.minutes - 5)
    report.write(args.out, facts, results, time.monotonic() - began)
    for folder in (site_dir, args.out / "pycache"):  # what is left is what was found
        shutil.rmtree(folder, ignore_errors=True)
    print(f"{args.out / 'report.txt'}\n{args.out / 'report.json'}")
    return 0 if all(result["status"] == "done" for result in results) else 1


if __name__ == "__main__":
    for number in (signal.SIGTERM, signal.SIGHUP):  # as an interrupt does, this takes the section that runs with it
        signal.signal(number, lambda received, _: sys.exit(128 + received))
    sys.exit(main(sys.argv[1:]))
