"""fcdp-memtrace: what FCDP does with memory, in a live job and afterwards.

Each subcommand is a module of this package with ABOUT (its help; the first line is the summary), add_arguments(parser)
and run(args) -> exit status.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys

import fcdp
from fcdp_memtrace._trace import Error

COMMANDS = ("top", "record", "report", "diff", "export", "plot", "check", "serve")
EPILOG = """\
examples:
  fcdp-memtrace top                                          the jobs that run on this machine
  fcdp-memtrace record -o run.trace -- torchrun train.py     a whole job, from its start
  fcdp-memtrace record -o run.trace --pid 4711               one that runs already, until it ends or Ctrl-C
  fcdp-memtrace report run.trace                             moves, bytes and waits per step and region
  fcdp-memtrace check run.trace --max-stall 20               exits with 1 where a step waited for longer than 20 ms

Every process with FCDP=1 keeps its last events in memory, so you can look at a job without restarting it.
FCDP_TRACE_BUFFER sets how many it keeps; FCDP_TRACE=0 keeps none.

exit status: 0 the command did what you asked for; 1 it failed, found no job, found a broken rule (check), or could not
read all of a file: stderr says which; 2 an argument is wrong. record exits with the status of the command that it ran.
"""


def _module(name: str):
    return importlib.import_module(f"fcdp_memtrace.{name}")


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="fcdp-memtrace",
        description="Shows what FCDP does with memory: which gathered parameters are on the device or the host, what "
        "moves between them and between nodes, and what waited for it. In a live job, and from files.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("--version", action="version", version=f"fcdp-memtrace {fcdp.__version__}")
    subcommands = top.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name in COMMANDS:
        module = _module(name)
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


def drop_output() -> None:
    """Discards what stdout still holds, since writing it when Python ends would fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    if sys.stdout is None:  # closed where the program started
        print("fcdp-memtrace: cannot write to stdout: it is closed", file=sys.stderr)
        return 1
    try:
        status = args.run(args)
        sys.stdout.flush()
        return status
    except Error as error:
        print(f"fcdp-memtrace: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # of `| head`, which has stopped reading
        drop_output()
        return 0
    except OSError as error:
        if error.filename is None:  # not of a file that was opened: of stdout
            drop_output()
        print(f"fcdp-memtrace: {error.filename or 'cannot write to stdout'}: {error.strerror}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
