"""What a section of the report is given, and how it says what it found: one JSON object a line, written at once,
so that what a section measured before its time was up is in the report."""

from __future__ import annotations

import json
import os
import pathlib
import re
import shlex
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

LINE = re.compile(
    r"^(?P<name>.+) = (?P<value>-?[\d.]+(?:e[+-]?\d+)?) (?P<unit>\S+?)(?:, worst (?P<worst>[\d.]+) \S+)?$"
)


class Failed(Exception):
    """A section, or a part of it, cannot go on; the text says why."""


class Section:
    """settings: bundle_dir, out_dir, site_dir (the wheel), simulated, seconds (the limit), machine (main.py's
    facts)."""

    def __init__(self, name: str, settings: dict[str, Any]):
        self.name, self.settings, self.ok = name, settings, True
        self.simulated: bool = settings["simulated"]
        self.bundle, self.out = pathlib.Path(settings["bundle_dir"]), pathlib.Path(settings["out_dir"])
        self.deadline = time.monotonic() + settings["seconds"]
        self._lines = open(self.out / f"{name}.jsonl", "w", buffering=1)

    def left(self) -> float:
        """Seconds until the runner ends this section; a little before, so that it can still say so itself."""
        return max(1.0, self.deadline - time.monotonic() - 2)

    def _say(self, **entry: Any) -> None:
        self._lines.write(json.dumps(entry) + "\n")

    def figure(self, name: str, value: Any, unit: str = "", command: str = "", **more: Any) -> None:
        self._say(kind="figure", name=name, value=value, unit=unit, command=command, **more)

    def check(self, name: str, ok: bool, detail: str = "", command: str = "") -> None:
        """Something that must hold; the section has failed where it does not."""
        self.ok = self.ok and ok
        self._say(kind="check", name=name, ok=ok, detail=detail, command=command)

    def reason(self, text: str) -> None:
        """Why something is not in the report."""
        self._say(kind="reason", text=text)

    # ---- programs ----

    def environment(self, **more: str) -> dict[str, str]:
        """For a C program of the bundle: the driver that is asked for, and no option of FCDP's that the caller has."""
        env = {k: v for k, v in os.environ.items() if not k.startswith("FCDP")}
        env |= {
            "FCDP_DRIVER": "sim" if self.simulated else "cuda",
            "LD_LIBRARY_PATH": _with(self.bundle / "lib", env.get("LD_LIBRARY_PATH")),
        }
        if self.simulated:
            env["FCDP_SIM_LIBRARY"] = str(self.bundle / "lib" / "libfcdp_simgpu.so")
        return env | more

    def run(self, program: str, *arguments: Any, limit_s: float = 1e9, **env: str) -> subprocess.CompletedProcess[str]:
        """A program of the bundle. Its output is in the section's log too. Failed: it could not start, or did
        not end in time."""
        command = [str(self.bundle / "bin" / program), *map(str, arguments)]
        print("$", shlex.join(command), flush=True)
        try:
            job = subprocess.run(
                command,
                env=self.environment(**env),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                timeout=min(limit_s, self.left()),
            )
        except subprocess.TimeoutExpired as late:
            said = late.stdout or b""
            print(said.decode(errors="replace") if isinstance(said, bytes) else said, flush=True)
            raise Failed(f"{program} did not end within {late.timeout:.0f} s") from None
        except OSError as error:
            raise Failed(f"{program} cannot be started: {error}") from None
        print(job.stdout, flush=True)
        return job

    def kernel_test(self, program: str, claim: str, size: int) -> tuple[str, str, float | None]:
        """A C test of a kernel, of which `claim` must hold, and then its rates, with `size` as its argument: what it said,
        the command, and the memory's peak in GB/s, None where it is not known."""
        job = self.run(program)
        self.check(claim, job.returncode == 0, "" if job.returncode == 0 else last_line(job.stdout), program)
        command, peak = f"{program} {size}", self.settings["machine"].get("memory_peak_gb_s")
        job = self.run(program, size)
        if job.returncode:
            raise Failed(f"{command}: {last_line(job.stdout)}")
        if not peak:
            self.reason(
                "no share of the memory's peak: "
                + ("the device is simulated" if self.simulated else "the driver does not tell its clock")
            )
        return job.stdout, command, peak

    def bench(self, program: str, *arguments: Any, **env: str) -> list[dict[str, Any]]:
        """Runs a program that prints "NAME = VALUE UNIT"; those lines as figures, in the report and returned."""
        command = shlex.join([program, *map(str, arguments)])
        try:
            job = self.run(program, *arguments, **env)
        except Failed as error:
            self.check(command, False, str(error))
            return []
        figures = []
        for match in filter(None, map(LINE.match, job.stdout.splitlines())):
            worst = {"worst": float(match["worst"])} if match["worst"] else {}
            figures.append({"name": match["name"], "value": float(match["value"]), "unit": match["unit"], **worst})
            self.figure(match["name"], float(match["value"]), match["unit"], command, **worst)
        self.check(
            command,
            job.returncode == 0,
            "" if job.returncode == 0 else f"{ended(job.returncode)}: {last_line(job.stdout)}",
        )
        return figures


def _with(folder: pathlib.Path, others: str | None) -> str:
    return f"{folder}:{others}" if others else str(folder)


def ended(returncode: int) -> str:
    return f"killed by signal {-returncode}" if returncode < 0 else f"exit status {returncode}"


def last_line(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "no output")


def main(body: Callable[[Section], None]) -> None:
    """Runs a section as a program: NAME.py SETTINGS.json. Exit status 0 when every check held."""
    settings = json.loads(pathlib.Path(sys.argv[1]).read_text())
    section = Section(pathlib.Path(sys.argv[0]).stem, settings)
    try:
        body(section)
    except Failed as error:
        section.check("the section", False, str(error))
    except Exception as error:  # whatever it is, it is this section's alone
        traceback.print_exc()
        section.check("the section", False, f"{type(error).__name__}: {error}")
    sys.exit(0 if section.ok else 1)
