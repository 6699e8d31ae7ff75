"""fcdp-plan describe: a model's shape as a profile."""

from __future__ import annotations

import argparse
import json

from fcdp_memtrace.arguments import at_least
from fcdp_memtrace.replace import replacing
from fcdp_plan import profile, shapes

ABOUT = """\
Write a model's description as a profile, for compare and search.

The model is a decoder: of GPT-2's shape, or one that Hugging Face's config.json describes. The profile is JSON: for each
region (what one unshard gathers) its parameters, operations and activations. --schema prints its JSON Schema, so that
other programs can write profiles of what they measured.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    shapes.add_arguments(parser)
    parser.add_argument("--batch", type=at_least(1), default=1, metavar="N", help="sequences on each GPU (default 1)")
    parser.add_argument("-o", "--output", metavar="FILE", help="default: stdout")
    parser.add_argument("--schema", action="store_true", help="print the schema of profiles, and nothing else")


def run(args: argparse.Namespace) -> int:
    made = profile.schema() if args.schema else profile.make(shapes.of(args), args.batch, args.dtype)
    text = json.dumps(made, indent=1) + "\n"
    if not args.output:
        print(text, end="")
        return 0
    with replacing(args.output) as part, open(part, "w") as file:
        file.write(text)
    return 0
