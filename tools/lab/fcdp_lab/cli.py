"""The command line: checks everything that can be checked before the first run, then runs, reports, and cleans up."""

import argparse
import importlib.util
import os
import shutil
import sys
import tempfile

from fcdp_lab import device, lab, modes, network, report, results

_DESCRIPTION = """\
Emulates nodes on this machine (a network namespace each, links shaped by tc) and runs an unmodified training
script on them with torchrun, once per mode; then compares step time, bytes between nodes, memory, and whether
training was bitwise the same. Needs root or unprivileged user namespaces, and iproute2."""

_EPILOG = """\
modes
  fsdp    the script as it is (FCDP unset)          fcdp    the same with FCDP=1
  Others are defined by --mode 'NAME: KEY=VALUE ... -- SCRIPT ARGUMENTS'; both parts may be left out. They run after
  those of --modes, or where --modes names them. The first mode is what the others are compared with.

examples
  fcdp-lab -- train.py --steps 20
  fcdp-lab --nodes 3 --ranks 1 --rate 500mbit --modes fcdp,fsdp --json out.json --svg out.svg -- train.py
  fcdp-lab --mode 'hpz: -- --reshard-after-forward 2' --mode 'tau1: FCDP=1 FCDP_TAU=1' -- train.py
  fcdp-lab --rate unlimited --repeat 3 -- -m my.package.train     (what follows -- goes to torchrun as it is)
  fcdp-lab --device sim --device-memory 512M -- train.py          (in a checkout: on simulated GPUs)

what is measured
  step       median seconds from one optimizer step to the next, averaged over the ranks; the first --warmup steps
             and the probe's own work are left out
  sent       bytes that a node's link sent per step (the kernel's counter), mean over nodes; in MB (10^6 bytes) and
             in W, the bytes of all parameters as FSDP2 gathers them
  gathered   most bytes of gathered parameters that a rank held on its device at once (in mode fsdp counted at FSDP2's
             own allocations, under FCDP taken from fcdp.stats())
  state      a rank's shards, their gradients and optimizer state
  host       most bytes of host memory that FCDP held on a node
  device     (with --device sim) most bytes of its device's memory that a rank had taken after a step: tensors, gathered
             parameters, and pages that wait for their next use
  equal      whether the bytes of every rank's shards were those of the first mode after every optimizer step

fcdp-doctor SCRIPT says which parameter groups FCDP serves, and why not the others.

exit status: 0 all ran; 1 a run failed, or --require-equal did not hold; 2 bad arguments; 128+n ended by signal n"""


class _Version(argparse.Action):
    """Asks fcdp only when needed, since the Python that runs the lab may not have it (--python names that of the
    ranks)."""

    def __call__(self, parser, *_):
        import fcdp

        print(f"fcdp-lab {fcdp.__version__}")
        parser.exit()


def _parser():
    parser = argparse.ArgumentParser(
        prog="fcdp-lab",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        usage="fcdp-lab [options] -- SCRIPT [ARGUMENTS]",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--version", action=_Version, nargs=0, help="show program's version number and exit")
    add("--nodes", type=int, default=2, metavar="N", help="emulated nodes (default 2)")
    add("--ranks", type=int, default=2, metavar="G", help="ranks per node (default 2)")
    add("--rate", default="1gbit", help="of every node's link, each way: 1gbit (default), 125mbyte, ..., unlimited")
    add("--delay", default="0ms", help="added one way to every packet, e.g. 200us (default none; needs netem)")
    add(
        "--device",
        choices=("cpu", "sim"),
        default="cpu",
        help="what torch finds in the ranks: this machine's own (cpu, the default), or a simulated GPU each (sim), on which "
        "the host runs ahead; sim is compiled from a checkout of FCDP, once, in about a minute",
    )
    add("--device-memory", metavar="BYTES", help="of each simulated device: 512M, 8GB, ... (default 16G)")
    add("--gflops", metavar="N", help="1e9 operations a second of its matrix products (default: as fast as the CPU)")
    add("--gbytes", metavar="N", help="1e9 bytes a second that its operators read and write (default: the same)")
    add("--modes", default="fsdp,fcdp", metavar="A,B", help="which modes to run, in order (default fsdp,fcdp)")
    add("--mode", action="append", default=[], metavar="'N: K=V -- ARGS'", help="define a mode; repeatable")
    add("--env", action="append", default=[], metavar="K=V", help="for the ranks of every mode; repeatable")
    add("--repeat", type=int, default=1, metavar="N", help="run the modes N times, interleaved; medians are reported")
    add("--warmup", type=int, default=2, metavar="N", help="steps at the start that do not count (default 2)")
    add("--timeout", type=float, default=900, metavar="S", help="seconds that one run may take (default 900)")
    add(
        "--grace",
        type=float,
        default=15,
        metavar="S",
        help="once a node failed, seconds for the others to say why they fail too (default 15)",
    )
    add("--json", metavar="FILE", help="write all figures (fields: tools/lab/README.md)")
    add("--svg", metavar="FILE", help="draw time and bytes of the modes (needs matplotlib)")
    add("--logs", metavar="DIR", help="keep every rank's output and records there (else kept on failure only)")
    add("--require-equal", action="store_true", help="exit 1 unless every mode trained bitwise as the first")
    add("--python", default=sys.executable, help="interpreter that runs torchrun and the script (default this one)")
    add(
        "--launcher",
        choices=("torchrun", "direct"),
        default="torchrun",
        help="direct: start the ranks with torchrun's environment but without its agent (starts faster)",
    )
    add("job", nargs="*", metavar="-- SCRIPT [ARGUMENTS]", help=argparse.SUPPRESS)
    return parser


def _split(argv):
    """Everything after the first -- is the job, even if it looks like options."""
    cut = argv.index("--") if "--" in argv else len(argv)
    return argv[:cut], argv[cut + 1 :]


def _check_counts(args, fail):
    if not 1 <= args.nodes <= 250 or not 1 <= args.ranks <= 64:
        fail(f"--nodes must be 1 to 250 and --ranks 1 to 64, not {args.nodes} and {args.ranks}")
    for name in ("repeat", "warmup"):
        if getattr(args, name) < 1:
            fail(f"--{name} must be at least 1")
    if args.timeout <= 0 or args.grace < 0:
        fail("--timeout must be above 0, --grace at least 0")


def _check_job(args, job, fail):
    if args.job:
        fail(f"put -- before the script: fcdp-lab [options] -- {' '.join([*args.job, *job])}")
    if not job:
        fail("no script given: fcdp-lab [options] -- SCRIPT [ARGUMENTS]")
    if not job[0].startswith("-") and not os.path.isfile(job[0]):
        fail(f"no such script: {job[0]}")
    if shutil.which(args.python) is None:
        fail(f"no such interpreter: --python {args.python}")


def _check_outputs(args, fail):
    for option, path in (("--json", args.json), ("--svg", args.svg)):
        folder = os.path.dirname(os.path.abspath(path or "."))
        if path and not os.access(folder, os.W_OK):
            fail(f"{option} {path}: cannot write into {folder}")
    if args.svg and importlib.util.find_spec("matplotlib") is None:
        fail("--svg needs matplotlib: pip install matplotlib")


def parse(argv):
    """(arguments, modes, Setup); exits with status 2 and a reason on anything that cannot work."""
    parser = _parser()
    options, job = _split(argv)
    args = parser.parse_args(options)

    def fail(message):
        parser.exit(2, f"fcdp-lab: {message}\n")

    _check_counts(args, fail)
    _check_job(args, job, fail)
    _check_outputs(args, fail)
    missing = network.missing_tools()
    if missing:
        fail(f"cannot find {' and '.join(missing)}: install iproute2 (apt-get install iproute2)")
    try:
        env = dict(modes.parse_setting(text) for text in args.env)
        if "FCDP" in env:
            fail("--env FCDP would change every mode, fsdp too: define a mode instead, e.g. --mode 'mine: FCDP=1'")
        setup = lab.Setup(
            tuple(job),
            args.nodes,
            args.ranks,
            network.parse_rate(args.rate),
            network.parse_delay(args.delay),
            env,
            args.launcher,
            args.python,
            args.timeout,
            args.grace,
            device.parse(args.device, args.device_memory, args.gflops, args.gbytes),
        )
        chosen = modes.select(args.modes, args.mode)
        for mode in chosen:
            if mode.wants_fcdp and (refusal := lab.refused_option(setup, mode)):
                fail(f"mode {mode.name}: {refusal}")
        return args, chosen, setup
    except ValueError as error:
        fail(str(error))


def _run_all(args, chosen, setup, folder, screen):
    if setup.device is not None:
        with screen.run("the simulated device", "built") as progress:
            lab.build_device(setup, progress)
    runs = {mode.name: [] for mode in chosen}
    for repeat, mode in lab.order_of_runs(chosen, args.repeat):
        label = mode.name if args.repeat == 1 else f"{mode.name} {repeat + 1}/{args.repeat}"
        with screen.run(label) as progress:
            runs[mode.name].append(lab.run_mode(setup, mode, f"{folder}/{mode.name}.{repeat}", progress))
    reference = runs[chosen[0].name]
    return [results.of_mode(mode, runs[mode.name], reference, args.warmup) for mode in chosen]


def _missing_fcdp(mode, figures):
    """Refuses a mode that asked for FCDP and ran without it: its figures would have a false name."""
    if not mode.wants_fcdp:
        return None
    fcdp = figures["runs"][0]["fcdp"]
    if fcdp is None:
        return f"mode {mode.name} sets FCDP, but fcdp was not loaded in the ranks: is it installed for --python?"
    if not fcdp["enabled"]:
        reasons = "; ".join(dict.fromkeys(entry["reason"] for entry in fcdp["bypassed"]))
        why = reasons or "run with --logs DIR, and read there what rank 0 wrote"
        return f"mode {mode.name} sets FCDP, but FCDP served nothing in it: {why}"
    return None


def _work(args, chosen, setup, folder, screen):
    figures = _run_all(args, chosen, setup, folder, screen)
    document = report.document(args, setup, figures)
    if args.json:
        report.write_json(document, args.json)
    if args.svg:
        from fcdp_lab import figure

        figure.draw(document, args.svg)
    screen.table(document)
    problems = list(filter(None, map(_missing_fcdp, chosen, figures)))
    if args.require_equal:
        problems += [
            f"mode {f['name']} did not train as {figures[0]['name']}" for f in figures if not f["equal"]["shards"]
        ]
    for problem in problems:
        screen.error(problem)
    return 1 if problems else 0


def main(argv=None):
    args, chosen, setup = parse(sys.argv[1:] if argv is None else argv)
    screen = report.Screen()
    lab.stop_on_signals()
    folder, code = None, 1
    try:
        folder = tempfile.mkdtemp(prefix="fcdp-lab-") if args.logs is None else _fresh(args.logs)
        code = _work(args, chosen, setup, folder, screen)
    except lab.RunFailed as error:
        screen.error(str(error))
        if args.logs is None:
            screen.error(f"output of every rank: {folder}")
            folder = None
    except lab.Stopped as stopped:
        screen.error(f"ended by {stopped}")
        code = stopped.exit_code
    except OSError as error:
        screen.error(str(error))
    if folder and args.logs is None:
        shutil.rmtree(folder, ignore_errors=True)
    return code


def _fresh(path):
    path = os.path.abspath(path)
    os.makedirs(path, exist_ok=True)
    return tempfile.mkdtemp(prefix="lab-", dir=path)
