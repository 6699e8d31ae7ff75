"""Numbers as people read and write them."""

from __future__ import annotations

import argparse


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
    """Of an option: what an FCDP_* variable takes."""
    from fcdp import _fcdp  # here: most commands take no size, and are to start at once

    try:
        return _fcdp.size_parse(text)
    except (_fcdp.Error, ValueError) as error:  # ValueError: a NUL
        raise argparse.ArgumentTypeError(str(error.args[0])) from None


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
