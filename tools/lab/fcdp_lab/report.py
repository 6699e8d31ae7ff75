"""The terminal and the JSON document. Uses rich where it is installed, plain lines where it is not."""

import contextlib
import json
import os
import platform
import sys
import time

from fcdp_lab import machine

try:
    from rich.console import Console
    from rich.table import Table
except ImportError:
    Console = None

_LINE_EVERY_S = 10.0
_FILE_COLUMNS = 120


def document(args, setup, figures):
    return {
        "schema": 1,
        "job": list(setup.job),
        "network": {"nodes": setup.nodes, "ranks_per_node": setup.ranks, "rate": args.rate, "delay_s": setup.delay_s},
        "device": _device(setup.device),
        "env": setup.env,
        "repeat": args.repeat,
        "warmup": args.warmup,
        "machine": {
            "cpus": len(os.sched_getaffinity(0)),
            "kernel": platform.release(),
            "python": platform.python_version(),
        },
        "modes": figures,
    }


def _device(simulated):
    if simulated is None:
        return {"type": "cpu"}
    return {"type": "sim", **{k: getattr(simulated, k) for k in ("memory_bytes", "gflops", "gbytes")}}


def write_json(doc, path):
    with open(path, "w") as f:
        json.dump(doc, f, indent=1)
        f.write("\n")


def _number(value, form="{:.3g}", none="–"):
    return none if value is None else form.format(value)


def _ratio(value, reference):
    return f" ({value / reference:.2f}x)" if value is not None and reference else ""


def _mega(n_bytes):
    return "–" if n_bytes is None else f"{n_bytes / 1e6:.1f}"


def _equal(mode, is_reference):
    if is_reference:
        return "reference"
    equal = mode["equal"]
    if equal["shards"] is None:
        same = {True: "losses equal", False: "losses differ", None: "–"}[equal["losses"]]
        return f"{same} (other shards)" if equal["losses"] is not None else same
    return "every step" if equal["shards"] else f"NOT from step {equal['first_difference']}"


DEVICE = "device MB"  # a column where there is one
COLUMNS = ("mode", "step s", "sent MB", "sent W", "gathered MB", "state MB", "host MB", "bitwise equal")


def _has_device(doc):
    return any(mode.get("device_taken_bytes") is not None for mode in doc["modes"])


def columns(doc):
    return (*COLUMNS[:-1], DEVICE, COLUMNS[-1]) if _has_device(doc) else COLUMNS


def rows(doc):
    first = doc["modes"][0]
    for mode in doc["modes"]:
        is_reference = mode is first
        ratio = (lambda key: "") if is_reference else (lambda key: _ratio(mode[key], first[key]))
        yield (
            mode["name"],
            _number(mode["step_s"], "{:.3f}") + ratio("step_s"),
            _mega(mode["sent_bytes_per_step"]) + ratio("sent_bytes_per_step"),
            _number(mode["sent_W_per_step"], "{:.3f}"),
            _mega(mode["device_gathered_peak_bytes"]) + ratio("device_gathered_peak_bytes"),
            _mega(mode["device_state_bytes"]),
            _mega(mode["host_peak_bytes"]),
            *([_mega(mode["device_taken_bytes"])] if _has_device(doc) else []),
            _equal(mode, is_reference),
        )


def caption(doc):
    net, w = doc["network"], next((m["W_bytes"] for m in doc["modes"] if m["W_bytes"]), None)
    delay = f", {net['delay_s'] * 1e3:g} ms one way" if net["delay_s"] else ""
    where = ' on torch.device("sim")' if doc["device"]["type"] == "sim" else ""
    parts = (
        f"{net['nodes']} nodes x {net['ranks_per_node']} ranks{where}, {net['rate']}{delay}; sent is per node and step"
    )
    return parts + (f"; W = {w / 1e6:.1f} MB" if w else "")


def _runs_fcdp(mode):
    """With --device sim it is imported without."""
    return (mode["runs"][0]["fcdp"] or {}).get("enabled")


def splits(doc):
    """One line per mode whose traffic is known by collective."""
    for mode in doc["modes"]:
        split = mode["sent_bytes_per_step_by_collective"]
        unit = mode["W_bytes"]
        if not split or not unit:
            continue
        parts = ", ".join(f"{kind} {n / unit:.3f}" for kind, n in split.items() if n)
        counted = sum(split.values())
        counter = "fcdp.stats()" if _runs_fcdp(mode) else "by their sizes"
        gap = abs(counted / mode["sent_bytes_per_step"] - 1) if mode["sent_bytes_per_step"] else 0
        yield (
            f"{mode['name']}: sent by collective, in W: {parts}; "
            f"{counter} {counted / unit:.3f}, kernel {mode['sent_W_per_step']:.3f} ({gap:.1%} apart)"
        )
    for mode in doc["modes"] if _has_device(doc) else ():
        if moves := mode["moves_per_step"]:
            yield (
                f"{mode['name']}: moved per step and rank: {moves['h2d_bytes'] / 1e6:.1f} MB to the device, "
                f"{moves['d2h_bytes'] / 1e6:.1f} MB to the host; {moves['evictions']:.1f} groups made room for others, the "
                f"host waited {moves['memory_waits']:.1f} times for room"
            )
    for mode in doc["modes"]:
        for bypass in (mode["runs"][0]["fcdp"] or {}).get("bypassed") or []:
            yield f"{mode['name']}: left to plain FSDP2: {bypass['group']}: {bypass['reason']}"


def busy(doc):
    """One line if other programs used so much of the machine that they affect step times; else None."""
    cpus = doc["machine"]["cpus"]
    used = {mode["name"]: mode["others_cpus"] for mode in doc["modes"] if mode["others_cpus"] is not None}
    if max(used.values(), default=0) < machine.BUSY_SHARE * cpus:
        return None
    (first, n), *others = used.items()
    rest = "".join(f", {n:.1f} during {name}" for name, n in others)
    return (
        f"This machine was busy: other programs used {n:.1f} of its {cpus} CPUs during {first}{rest}. Step times "
        "include that; run it again when the machine is idle"
    )


def unused(doc):
    """One line if there was a simulated device and no optimizer stepped on it; else None."""
    if doc["device"]["type"] == "cpu" or _has_device(doc) or not any(mode["runs"][0]["steps"] for mode in doc["modes"]):
        return None
    return (
        "No mode trained on the simulated device: a script finds it by torch.accelerator, as "
        "torch.accelerator.current_accelerator(), and not by torch.cuda"
    )


class Screen:
    """Progress and errors on stderr, the table on stdout."""

    def __init__(self):
        self._out = Console(width=None if sys.stdout.isatty() else _FILE_COLUMNS) if Console else None
        self._err = Console(stderr=True) if Console else None

    @contextlib.contextmanager
    def run(self, label, ended=None):
        """`ended`: what was done at its end; None: its number of steps."""
        terminal = self._err and self._err.is_terminal
        progress = _Spinner(self._err, label, ended) if terminal else _Lines(label, ended)
        with progress:
            yield progress

    def error(self, text):
        print(f"fcdp-lab: {text}", file=sys.stderr, flush=True)

    def table(self, doc):
        if self._out:
            table = Table(caption=caption(doc), caption_justify="left")
            for column in columns(doc):
                table.add_column(column, justify="left" if column in (COLUMNS[0], COLUMNS[-1]) else "right")
            for row in rows(doc):
                table.add_row(*row)
            self._out.print(table)
        else:
            for line in [columns(doc), *rows(doc)]:
                print("  ".join(f"{cell:<18}" for cell in line).rstrip())
            print(caption(doc))
        for line in [*splits(doc), *filter(None, [unused(doc), busy(doc)])]:
            print(line)


class _Progress:
    def __init__(self, label, ended=None):
        self.label = label
        self.ended = ended
        self.started = time.monotonic()
        self.steps = 0

    def describe(self, steps, step_s, last_line):
        self.steps = steps
        elapsed = f"{time.monotonic() - self.started:.0f} s"
        if not steps:
            return f"{self.label}: starting, {elapsed}"
        pace = f", {step_s:.2f} s/step" if step_s is not None else ""
        return f"{self.label}: step {steps}{pace}, {elapsed}" + (f" | {last_line.strip()[:60]}" if last_line else "")

    def done(self):
        return f"{self.label}: {self.ended or f'{self.steps} steps'} in {time.monotonic() - self.started:.0f} s"


class _Spinner(_Progress):
    def __init__(self, console, label, ended):
        super().__init__(label, ended)
        self._console = console
        self._status = console.status(f"{label}: starting")

    def __enter__(self):
        self._status.start()
        return self

    def __exit__(self, kind, value, trace):
        self._status.stop()
        if kind is None:
            self._console.print(self.done(), highlight=False, markup=False)

    def update(self, steps, step_s, last_line):
        from rich.text import Text

        self._status.update(Text(self.describe(steps, step_s, last_line)))


class _Lines(_Progress):
    def __init__(self, label, ended):
        super().__init__(label, ended)
        self._next = self.started + _LINE_EVERY_S

    def __enter__(self):
        return self

    def __exit__(self, kind, value, trace):
        if kind is None:
            print(self.done(), file=sys.stderr, flush=True)

    def update(self, steps, step_s, last_line):
        if time.monotonic() >= self._next:
            self._next += _LINE_EVERY_S
            print(self.describe(steps, step_s, last_line), file=sys.stderr, flush=True)
