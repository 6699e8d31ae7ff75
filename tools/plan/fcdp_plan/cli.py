"""fcdp-plan: will it fit, how fast will it be, which setting is best.

Each subcommand is a module of this package with ABOUT (its help; the first line is the summary), add_arguments(parser)
and run(args) -> exit status.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys

import fcdp
from fcdp_plan.failure import Error

COMMANDS = ("batch", "describe", "profile", "compare", "search", "paper")
EPILOG = """\
examples:
  fcdp-plan batch --layers 40 --hidden 4800 --heads 40 --cluster a40 --nodes 2
  fcdp-plan describe --layers 40 --hidden 4800 --heads 40 --batch 8 -o gpt.json
  fcdp-plan profile -o job.json -- train.py --steps 20
  fcdp-plan compare gpt.json --link 25gbit --gpus 8 --nodes 2
  fcdp-plan search gpt.json --link 25gbit
  fcdp-plan paper

Only profile measures: all else is computed, from its profile or from what the options describe. docs/plan.md lists what is
assumed.

exit status: 0 the command did what you asked for; 1 it failed: stderr says why; 2 an argument is wrong.
"""


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="fcdp-plan",
        description="Says whether a training job fits, how long its step takes and which setting of FSDP2 or FCDP is "
        "best, from described hardware and a described or measured job.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("--version", action="version", version=f"fcdp-plan {fcdp.__version__}")
    subcommands = top.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name in COMMANDS:
        module = importlib.import_module(f"fcdp_plan.{name}")
        summary = module.ABOUT.strip().splitlines()[0]
        subparser = subcommands.add_parser(
            name,
            help=summary[0].lower() + summary[1:].rstrip("."),
            description=module.ABOUT.strip(),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_arguments(subparser)
        subparser.set_defaults(run=module.run)
    return top


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    try:
        status = args.run(args)
        sys.stdout.flush()
        return status
    except Error as error:
        print(f"fcdp-plan {args.command}: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # of `| head`, which has stopped reading
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        print(f"fcdp-plan {args.command}: {error.filename or 'stdout'}: {error.strerror}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
