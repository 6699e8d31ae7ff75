"""Numbers as people read and write them."""

from __future__ import annotations

import argparse
import re

SCALES = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}


def human(value: float) -> str:
    for unit in ("B", "KB", "MB", "GB"):
        if value < 1000:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} TB"


def ms(ns: float) -> str:
    value = ns / 1e6
    return f"{value:.0f} ms" if value >= 100 else f"{value:.1f} ms" if value >= 1 else f"{value:.2f} ms"


def size(text: str) -> int:
    """Of an option: 1500000, 1.5M, 512MiB."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?I?)B?", text.strip().upper())
    if not match or match[2] == "I":
        raise argparse.ArgumentTypeError(f"{text!r} is no number of bytes, such as 1500000, 512M or 8GiB")
    return int(float(match[1]) * SCALES[match[2]])


def table(head: list[str], rows: list[list[str]], left: int = 1) -> str:
    """Columns as wide as their widest cell; the first `left` ones are text."""
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    lines = []
    for row in [head, *rows]:
        cells = [
            cell.ljust(width) if i < left else cell.rjust(width) for i, (cell, width) in enumerate(zip(row, widths))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
