"""Numbers of options, refused where they make no sense."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable


def at_least(least: int) -> Callable[[str], int]:
    """A type for argparse: a whole number that is `least` or larger."""

    def number(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least:
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number that is {least} or larger")
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
