"""Training a GPT under PyTorch's two allocators and FCDP's: steps a second, reserved memory, the largest batch.
And what a hit costs, and an event of recorded runs."""

import gzip
import json
import pathlib
import re
import shlex
import subprocess
import sys

from section import Failed, Section, last_line, main

TRAINING = pathlib.Path(__file__).resolve().parent.parent / "bench" / "training.py"
TRACES = TRAINING.parent.parent / "replay" / "traces"
SMALL = "--device cpu --layers 2 --dim 32 --heads 4 --seq 32 --batch 2 --steps 2 --rounds 1 --most 0".split()


def hits(section: Section) -> None:
    try:
        job = section.run("bench_heap", limit_s=section.left() / 4)
    except Failed as error:
        section.check("bench_heap", False, str(error))
        return
    ns = [
        line.split(": ")[1].split(" ns")[0]
        for line in job.stdout.splitlines()
        if line.startswith("malloc + free, a hit")
    ]
    section.check("bench_heap", job.returncode == 0, "" if job.returncode == 0 else last_line(job.stdout))
    if ns:
        section.figure("malloc and free of FCDP's heap, a hit", float(ns[0]), "ns", "bench_heap")


def replays(section: Section) -> None:
    """Recorded runs into FCDP's heap over the driver: what an event costs with twice the peak of live bytes as
    budget, and in the smallest one."""
    traces = [section.out / f"{name}.txt" for name in ("lora", "demo", "gpt12")]
    for trace in traces:  # not every machine has the gzip that fcdp-replay would start
        trace.write_bytes(gzip.decompress((TRACES / f"{trace.name}.gz").read_bytes()))
    command = shlex.join(["fcdp-replay", *(trace.name for trace in traces)])
    try:
        job = section.run("fcdp-replay", *traces, limit_s=section.left() / 4)
    except Failed as error:
        section.check(command, False, str(error))
        return
    clock = "CPU time" if section.simulated else "time"
    for line in job.stdout.splitlines():
        cells = [cell.strip() for cell in line.strip("| ").split("|")]
        if len(cells) == 16 and (ns := re.fullmatch(r"(\d+), (\d+)", cells[-1])):
            section.figure(
                f"replay of {cells[0]}: {clock} of an event, memory not short",
                float(ns[1]),
                "ns",
                command,
                driver_calls=int(cells[11]),
            )
            section.figure(
                f"replay of {cells[0]}: {clock} of an event, in the smallest budget",
                float(ns[2]),
                "ns",
                command,
                driver_calls=int(cells[14]),
            )
    section.check(command, job.returncode == 0, "" if job.returncode == 0 else last_line(job.stdout))


def training(section: Section) -> None:
    path = section.out / "training.json"
    options = SMALL if section.simulated else ["--steps", "15", "--rounds", "2", "--memory", "12"]
    command = [sys.executable, str(TRAINING), *options, "--json", str(path), "--seconds", str(int(section.left() - 3))]
    print("$", shlex.join(command), flush=True)
    try:
        job = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=section.left(),
        )
    except subprocess.TimeoutExpired as late:
        raise Failed(f"training.py did not end within {late.timeout:.0f} s") from None
    print(job.stdout, flush=True)
    shown = shlex.join(["training.py", *options])
    if job.returncode or not path.exists():
        section.check(shown, False, last_line(job.stdout))
        return
    units = {"steps_per_s": "1/s", "reserved": "B", "allocated": "B", "largest_batch": "sequences", "states": "B"}
    for allocator, figures in json.loads(path.read_text()).items():
        failure = figures.pop("failed", "")
        section.check(f"training under {allocator}", not failure, failure, shown)
        if figures.get("allocated"):
            section.figure(
                f"{allocator}: reserved over allocated, peaks",
                round(figures["reserved"] / figures["allocated"], 4),
                "",
                shown,
            )
        for key, value in figures.items():
            if value:
                section.figure(f"{allocator}: {key.replace('_', ' ')}", round(value, 3), units[key], shown)
            elif value is None and not failure:
                section.reason(
                    f"{allocator}: {key.replace('_', ' ')}: {'not sought on a CPU' if section.simulated else 'no time was left to find it'}"
                )


def body(section: Section) -> None:
    hits(section)
    replays(section)
    training(section)


if __name__ == "__main__":
    main(body)
