"""fcdp-doctor: what FCDP would do: on this machine, for a script, or in a job that runs."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys

import fcdp

DESCRIPTION = """\
Without arguments: what FCDP sees on this machine, and whether it would serve a job here.

With a script: runs it for a few optimizer steps, by itself, on emulated nodes of this machine, and says which of its
FSDP groups FCDP serves, why not the others, and what that saves between nodes. With the id of a process: the same for
the job that the process is of, or has started; it runs on undisturbed."""

EPILOG = """\
examples
  fcdp-doctor                                          this machine
  fcdp-doctor train.py --batch 4                       the script, on 2 emulated nodes of 2 ranks
  fcdp-doctor --nodes 4 --ranks 1 -- -m my.train       on 4 nodes of 1 rank; -- before what Python is to run
  fcdp-doctor --link 25gbit --gpus 8 train.py          and step times on 2 nodes of 8 GPUs, as fcdp-plan predicts them
  fcdp-doctor 4711                                     a job that runs with FCDP=1 (torchrun's process will do)
  fcdp-doctor --cache                                  what FCDP_CACHE_DIR holds; with --clear: remove it

The script gets the environment that torchrun would give it; every rank is a process here. Nothing between the emulated
nodes is slow: fcdp-lab measures time. FCDP_... variables are the job's; unless it sets FCDP_CODEC, that is none here, so
that bytes do not depend on how fast these few steps run.

--json prints nodes, ranks_per_node, steps, host_bytes (per node), notes, and of each of groups: name (its module's,
"(root)" for the model itself), served, reason, bytes, trainable_bytes, and per step gathers, plain_bytes (what FSDP would
send) and fcdp_bytes; and the sums of bytes; with --link, predicted

exit status: 0 every group is served (without arguments: a job would be); 1 some are not, or the job failed; 2 wrong
arguments"""


HEADINGS = {"user": "What a user sets", "expert": "What an expert may set", "development": "For development"}


def options_tables() -> str:
    """Those of docs/options.md, under their headings."""
    parts = []
    for audience, heading in HEADINGS.items():
        rows = [f"## {heading}\n", "| variable | values | default | what it does |", "| --- | --- | --- | --- |"]
        for row in fcdp.options():
            if row["audience"] == audience:
                values = row["values"].replace("|", "\\|")
                rows.append(f"| `{row['name']}` | {values} | {row['default'] or '-'} | {row['help']} |")
        parts.append("\n".join(rows))
    return "\n\n".join(parts)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fcdp-doctor",
        usage="fcdp-doctor [options] [SCRIPT [ARGUMENTS] | PID]",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--version", action="version", version=f"fcdp-doctor {fcdp.__version__}")
    add("--options", action="store_true", help="print every FCDP_* variable, as Markdown tables")
    add("--json", action="store_true", help="of a script, a process or --cache: print all figures as JSON")
    add(
        "--cache",
        nargs="?",
        const="",
        metavar="DIR",
        help="list the frozen parameters that jobs keep on this node's disk (default FCDP_CACHE_DIR)",
    )
    add("--clear", action="store_true", help="with --cache: remove them; what a job is writing stays")
    add("--nodes", type=int, default=2, metavar="N", help="emulated nodes for the script (default 2)")
    add("--ranks", type=int, default=2, metavar="G", help="ranks on each of them (default 2)")
    add("--steps", type=int, default=2, metavar="N", help="optimizer steps of the script (default 2)")
    add("--timeout", type=float, default=600, metavar="S", help="seconds that they may take (default 600)")
    add("--link", metavar="RATE", help="predict step times on a cluster whose nodes are linked so: 25gbit")
    add("--gpus", type=int, default=8, metavar="G", help="of the cluster's nodes, for --link (default 8)")
    add("--cluster", default="a40", metavar="NAME", help="of fcdp-plan, for --link: a40 (default), h100 or a file")
    add("--compute", type=float, default=0.0, metavar="S", help="computing time of a step there, for --link")
    add("what", nargs="?", help=argparse.SUPPRESS)
    add("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser


def parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """(options, what Python is to run); exits with status 2 and a reason on anything that cannot work."""
    parser = _parser()
    cut = argv.index("--") if "--" in argv else len(argv)
    args = parser.parse_args(argv[:cut])
    job = argv[cut + 1 :] if args.what is None else [args.what, *args.arguments, *argv[cut:]]
    if not 1 <= args.nodes <= 64 or not 1 <= args.ranks <= 64:
        parser.error(f"--nodes and --ranks must be 1 to 64, not {args.nodes} and {args.ranks}")
    if args.steps < 1 or args.timeout <= 0:
        parser.error(f"--steps must be at least 1 and --timeout above 0, not {args.steps} and {args.timeout:g}")
    if args.json and not job and args.cache is None:
        parser.error("--json needs a script, the id of a process or --cache")
    if args.link and not job:
        parser.error("--link needs a script or the id of a process")
    if args.gpus < 1 or not 0 <= args.compute < 1e6:
        parser.error(f"--gpus must be at least 1 and --compute 0 or more, not {args.gpus} and {args.compute:g}")
    if args.clear and args.cache is None:
        parser.error("--clear needs --cache")
    if args.cache is not None and job:
        parser.error(f"--cache looks at no script and no process: {job[0]}")
    if job and not _is_pid(job) and not job[0].startswith("-") and not os.path.isfile(job[0]):
        launcher = os.path.basename(job[0])
        hint = ""
        if launcher in ("torchrun", "accelerate", "python", "python3", "deepspeed", "srun"):
            hint = f": give the script itself, without {launcher}; its ranks are started here"
        parser.error(f"no such script: {job[0]}{hint}")
    return args, job


def _is_pid(job: list[str]) -> bool:
    return len(job) == 1 and job[0].isdigit() and not os.path.exists(job[0])


def _look(args: argparse.Namespace, job: list[str]) -> int:
    """Looks at a script or a process. Imports what it needs here, so that the other uses start at once."""
    from fcdp_doctor import groups, predict

    cluster = predict.cluster_of(args.cluster, args.link, args.gpus, args.nodes) if args.link else None
    if _is_pid(job):
        from fcdp_doctor import live

        document = live.look(int(job[0]))
    else:
        from fcdp_doctor import script

        document = script.look(job, args.nodes, args.ranks, args.steps, args.timeout)
    predicted = None
    if cluster and document.groups:
        cluster["n_nodes"] = document.nodes or args.nodes
        predicted = predict.predict(document, cluster, f"({args.cluster}) at {args.link}", args.compute)
    return groups.show(document, args.json, predicted)


def _stop_on_signals() -> None:
    """Ends by an exception, like an interrupt, so that everything that was started ends. Under nohup, SIGHUP stays
    ignored."""
    for signum in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(signum) != signal.SIG_IGN:
            signal.signal(signum, lambda signum, _: sys.exit(128 + signum))


def main(argv: list[str] | None = None) -> int:
    args, job = parse(sys.argv[1:] if argv is None else argv)
    if args.options:
        print(options_tables())
        return 0
    from fcdp_doctor import Failed

    if args.cache is not None:
        from fcdp_doctor import cache

        try:
            return cache.show(args.cache, args.clear, args.json)
        except Failed as error:
            print(f"fcdp-doctor: {error}", file=sys.stderr)
            return 1
    if not job:
        from fcdp_doctor import machine

        return machine.report()

    _stop_on_signals()
    with contextlib.suppress(KeyboardInterrupt):
        try:
            return _look(args, job)
        except Failed as error:
            print(f"fcdp-doctor: {error}", file=sys.stderr)
            return 1
    return 128 + signal.SIGINT


if __name__ == "__main__":
    sys.exit(main())
