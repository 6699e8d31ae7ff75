"""The report: what the sections said, as text and as JSON."""

from __future__ import annotations

import json
import pathlib
import signal
from typing import Any

MARK = "report-of-tools-gpu"  # in the output's folder: it is this program's to empty
LOG_LINES = 30


# With one GPU, and all ranks on it.
NOT_SHOWN = """What this report does not show, because its ranks share one GPU:
- NVLink and PCIe between GPUs: a restore's all-gather within the node, beside the compute's own traffic.
- GPUDirect: gathers between nodes go over sockets of this machine, through host memory.
- Contention across GPUs: of one node's GPUs for host memory, page-locked copies and the network's card; of FCDP's
  collectives with PyTorch's for the multiprocessors.
- Speed: here four processes take turns on a device. Ratios to plain FSDP2 on a cluster are others; compare there:
  fcdp-lab --help, and fcdp.stats() in the job."""


class Unusable(Exception):
    """The bundle cannot be used; the text says why."""


def read(path: pathlib.Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def _entries(path: pathlib.Path) -> list[dict[str, Any]]:
    """What a section wrote; a last line that was cut off is left out."""
    return [json.loads(line) for line in read(path).splitlines() if line.endswith("}")]


def _why_ended(returncode: int, timed_out: bool, limit_s: float) -> str:
    if timed_out:
        return f"it was ended at its limit of {limit_s:.0f} s"
    if returncode < 0:
        return f"it was killed by {signal.Signals(-returncode).name}"
    return f"it ended with exit status {returncode}" if returncode > 1 else ""


def section_result(
    name: str, title: str, out: pathlib.Path, returncode: int, timed_out: bool, limit_s: float, seconds: float
) -> dict[str, Any]:
    entries = _entries(out / f"{name}.jsonl")
    kinds = {
        kind: [{k: v for k, v in e.items() if k != "kind"} for e in entries if e["kind"] == kind]
        for kind in ("figure", "check", "reason")
    }
    reasons = [reason["text"] for reason in kinds["reason"]]
    why = _why_ended(returncode, timed_out, limit_s)
    status = (
        "timed out"
        if timed_out
        else "failed"
        if returncode or any(not check["ok"] for check in kinds["check"])
        else "done"
    )
    if why:
        reasons.append(why)
    if status != "done" and not why and not any(not check["ok"] for check in kinds["check"]):
        reasons.append(f"it ended with exit status {returncode}; its log says more")
    log = read(out / f"{name}.log").splitlines()
    return {
        "name": name,
        "title": title,
        "status": status,
        "seconds": round(seconds, 1),
        "limit_s": round(limit_s, 1),
        "figures": kinds["figure"],
        "checks": kinds["check"],
        "reasons": reasons,
        "log_end": log[-LOG_LINES:] if status != "done" else [],
    }


def not_run(name: str, title: str, why: str) -> dict[str, Any]:
    return {
        "name": name,
        "title": title,
        "status": "not run",
        "seconds": 0,
        "limit_s": 0,
        "figures": [],
        "checks": [],
        "reasons": [why],
        "log_end": [],
    }


def one_line(result: dict[str, Any]) -> str:
    bad = [check for check in result["checks"] if not check["ok"]]
    why = (
        f": {bad[0]['name']}: {bad[0]['detail']}"
        if bad
        else f": {result['reasons'][-1]}"
        if result["status"] != "done" and result["reasons"]
        else ""
    )
    return f"{result['status']}, {len(result['figures'])} figures, {result['seconds']:.0f} s{why}"


def heading(facts: dict[str, Any]) -> str:
    return "\n".join(f"{key.replace('_', ' ')}: {value}" for key, value in facts.items() if value is not None)


def _number(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _section_text(result: dict[str, Any]) -> str:
    lines = [
        f"== {result['title']}  ({result['name']}: {result['status']}, {result['seconds']:.0f} of at most {result['limit_s']:.0f} s)"
    ]
    lines += [
        f"{'holds' if check['ok'] else 'FAILS'}: {check['name']}{': ' + check['detail'] if check['detail'] else ''}"
        for check in result["checks"]
    ]
    lines += [f"not here, or not all of it: {reason}" for reason in result["reasons"]]
    command = None
    for figure in result["figures"]:
        if figure["command"] != command:
            command = figure["command"]
            lines.append(f"  $ {command}")
        more = ", ".join(
            f"{k} {_number(v)}" for k, v in figure.items() if k not in ("name", "value", "unit", "command")
        )
        lines.append(
            f"    {figure['name']}: {_number(figure['value'])} {figure['unit']}{' (' + more + ')' if more else ''}".rstrip()
        )
    lines += ["  the end of its log:", *(f"    | {line}" for line in result["log_end"])] if result["log_end"] else []
    return "\n".join(lines)


def write(out: pathlib.Path, facts: dict[str, Any], results: list[dict[str, Any]], seconds: float) -> None:
    summary = [f"{result['name']:<13} {one_line(result)}" for result in results]
    text = "\n\n".join(
        [heading(facts), "\n".join(summary), *map(_section_text, results), f"{seconds:.0f} s in all", NOT_SHOWN]
    )
    (out / "report.txt").write_text(text + "\n")
    whole = {"machine": facts, "seconds": round(seconds, 1), "sections": results, "not_shown": NOT_SHOWN}
    (out / "report.json").write_text(json.dumps(whole, indent=1) + "\n")
