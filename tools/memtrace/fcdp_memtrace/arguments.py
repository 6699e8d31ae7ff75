"""Numbers as option values, with their bounds checked."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable

MOST = 2**31 - 1  # of a process's id, and more than any other number here can be


def at_least(least: int) -> Callable[[str], int]:
    """A type for argparse: a whole number from `least` to MOST."""

    def number(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if not least <= value <= MOST:
            raise argparse.ArgumentTypeError(
                f"{text!r} is no whole number that is {least} or larger" if value <= MOST else f"{text!r} is too large"
            )
        return value

    return number


def within(least: float, most: float, unit: str) -> Callable[[str], float]:
    """A type for argparse: a number from `least` to `most`, which may be infinite."""
    says = f"{least:g} to {most:g}" if math.isfinite(most) else f"{least:g} or larger"

    def number(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and least <= value <= most):
            raise argparse.ArgumentTypeError(f"{text!r} is no number of {unit} that is {says}")
        return value

    return number
