"""Trains the examples as they are and with FCDP=1 over a slow link (fcdp-lab), then a small GPT with the settings that
people use on such links, and prints the tables of docs/frameworks.md. tools/bench.sh --help names the options."""

import argparse
import json
import pathlib
import signal
import subprocess
import sys
import sysconfig
import tempfile

from fcdp_memtrace.arguments import at_least

ROOT = pathlib.Path(__file__).resolve().parents[2]
DOCUMENT = ROOT / "docs" / "frameworks.md"
# Of each example, what the table calls it.
EXAMPLES = {
    "fsdp2": "FSDP2, all weights",
    "fsdp1": "FSDP1, all weights",
    "accelerate_lora": "accelerate, LoRA by peft, 2 micro-batches",
    "transformers_trainer": "transformers' Trainer, all weights, 2 micro-batches",
    "trl_sft": "TRL's SFTTrainer, LoRA",
    "lightning_fabric": "Lightning Fabric, all weights",
    "torchtitan_llama": "torchtitan, all weights",
}
GPT = ["tools/demo/gpt.py", "--steps", "8", "--dim", "168", "--layers", "8"]
REDUCE, INT8 = "FCDP_REDUCE=hierarchical", "FCDP_REDUCE_DTYPE=int8"
WHOLE, ROUNDED = "FCDP_CODEC=none", "FCDP_CODEC=int8"
# Jobs, and of each the settings that are compared: a title, and a mode of fcdp-lab. The first is the reference.
SETTINGS = {
    "full": (
        [],
        {
            "FSDP2": "",
            "**FCDP=1**": "FCDP=1",
            f"`{WHOLE}`": f"FCDP=1 {WHOLE}",
            "reshard_after_forward=2, the ranks of a node": "-- --reshard-after-forward 2",
            "reshard_after_forward=False": "-- --reshard-after-forward false",
            "HSDP": "-- --hsdp",
            f"`{REDUCE}`": f"FCDP=1 {REDUCE}",
            f"`{REDUCE} {INT8}`": f"FCDP=1 {REDUCE} {INT8}",
        },
    ),
    "bf16": (
        ["--bf16", "--lr", "3e-4"],
        {
            "FSDP2": "",
            "**FCDP=1**": "FCDP=1",
            f"`{WHOLE}`": f"FCDP=1 {WHOLE}",
            f"`{ROUNDED}`": f"FCDP=1 {ROUNDED}",
            "HSDP": "-- --hsdp",
            f"`{REDUCE}`": f"FCDP=1 {REDUCE}",
            f"`{REDUCE} {WHOLE}`": f"FCDP=1 {REDUCE} {WHOLE}",
            f"`{REDUCE} {INT8}`": f"FCDP=1 {REDUCE} {INT8}",
        },
    ),
    "lora": (
        ["--lora", "8"],
        {
            "FSDP2": "",
            "**FCDP=1**": "FCDP=1",
            f"`{REDUCE}`": f"FCDP=1 {REDUCE}",
            "reshard_after_forward=False": "-- --reshard-after-forward false",
            "frozen weights on every rank (`ignored_params`)": "-- --replicate-frozen",
            "HSDP": "-- --hsdp",
        },
    ),
}
OF_EXAMPLES = "example | training | groups served | sent per step: plain | FCDP | of it gathers | step: plain | FCDP"
OF_SETTINGS = "setting | step | sent per step | training"


STOPS = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}


def stop_on_signals():
    """By an exception, as an interrupt is one: the lab is ended then. Under nohup, SIGHUP stays ignored."""
    for signum in STOPS - {signal.SIGINT}:
        if signal.getsignal(signum) != signal.SIG_IGN:
            signal.signal(signum, lambda signum, _: sys.exit(128 + signum))


def run(command):
    """Ends it with this process, by a signal at which fcdp-lab ends what it has started and removes its files."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)  # until the process is known here
    process = subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        cwd=ROOT,
        preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_SETMASK, mask),
    )
    try:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        code = process.wait()
    except BaseException:
        process.terminate()
        process.wait()
        raise
    if code:
        raise subprocess.CalledProcessError(code, command)


def lab(rate, job, modes=(), repeat=1, more=()):
    """The modes of the document that fcdp-lab writes. `more` of its options."""
    program = pathlib.Path(sysconfig.get_path("scripts"), "fcdp-lab")
    with tempfile.TemporaryDirectory() as folder:
        out = pathlib.Path(folder, "out.json")
        options = ["--rate", rate, "--repeat", str(repeat), "--json", out, *more]
        for i, mode in enumerate(modes):
            options += ["--mode", f"mode{i}: {mode}"]
        if modes:
            options += ["--modes", ",".join(f"mode{i}" for i in range(len(modes)))]
        run([program, *options, "--", *job])
        return json.loads(out.read_text())["modes"]


def over(value, reference, text):
    return f"{text} ({value / reference:.2f})"


def title_of(name):
    return f"[{EXAMPLES[name]}](../examples/{name}.py)"


def of_example(name, rate, repeat):
    plain, fcdp = lab(rate, [f"examples/{name}.py"], repeat=repeat)
    equal = fcdp["equal"]["shards"] and fcdp["equal"]["losses"] is not False
    state = fcdp["runs"][0]["fcdp"]
    sent, seconds = [m["sent_bytes_per_step"] for m in (plain, fcdp)], [m["step_s"] for m in (plain, fcdp)]
    gathers = sum(fcdp["sent_bytes_per_step_by_collective"].get(kind, 0) for kind in ("gather", "plain_gather"))
    return [
        title_of(name),
        "bitwise equal" if equal else "NOT EQUAL",
        f"{state['groups_served']} of {state['groups_served'] + len(state['bypassed'])}",
        f"{sent[0] / 1e6:.2f} MB",
        over(sent[1], sent[0], f"{sent[1] / 1e6:.2f} MB"),
        f"{gathers / 1e6:.2f} MB",
        f"{seconds[0]:.2f} s",
        over(seconds[1], seconds[0], f"{seconds[1]:.2f} s"),
    ]


def training(mode, reference):
    if mode is reference:
        return "reference"
    shards = mode["equal"]["shards"]
    if shards or (shards is None and mode["equal"]["losses"]):
        return "bitwise equal" if shards else "the same losses"  # shards of other shapes are not compared
    if mode["env"].get("FCDP_CODEC") == "int8":
        return "rounded parameters"
    if "FCDP_REDUCE_DTYPE" in mode["env"]:
        return "rounded sums"
    own_sums = "FCDP" not in mode["env"] or "FCDP_REDUCE" in mode["env"]
    return "another order of sums" if own_sums else "NOT EQUAL"


def of_setting(name, rate, repeat):
    arguments, settings = SETTINGS[name]
    modes = lab(rate, [*GPT, *arguments], settings.values(), repeat)
    first = modes[0]
    for title, mode in zip(settings, modes):
        yield [
            title,
            over(mode["step_s"], first["step_s"], f"{mode['step_s']:.2f} s"),
            over(
                mode["sent_bytes_per_step"], first["sent_bytes_per_step"], f"{mode['sent_bytes_per_step'] / 1e6:.1f} MB"
            ),
            training(mode, first),
        ]


def put(name, head, rows, order):
    """Writes the rows into the document's table, and keeps those of others that are there."""
    begin, end = f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->"
    before, rest = DOCUMENT.read_text().split(begin)
    old, after = rest.split(end)
    known = {line.split(" | ")[0]: line for line in old.splitlines()[2:]}
    known |= {line.split(" | ")[0]: line for line in lines(head, rows)[2:]}
    kept = [known[f"| {title}"] for title in order if f"| {title}" in known]
    table = "".join(f"{line}\n" for line in [*lines(head, [])[:2], *kept])
    DOCUMENT.write_text(f"{before}{begin}{table}{end}{after}")


def lines(head, rows):
    cells = [head.split(" | "), ["---"] * (head.count("|") + 1), *rows]
    return [f"| {' | '.join(line)} |" for line in cells]


def show(name, head, rows, order, write):
    """Prints a table; true where a job that must train the same does not."""
    rows = list(rows)
    print(*lines(head, rows), sep="\n", end="\n\n", flush=True)
    if write:
        put(name, head, rows, order)
    return any("NOT EQUAL" in row for row in rows)


def add_options(parser, document):
    parser.add_argument("--write", action="store_true", help=f"put what is printed into docs/{document.name}")
    parser.add_argument("--rate", default="100mbit", help="of each node's link (default %(default)s)")
    parser.add_argument("--repeat", type=at_least(1), default=1, metavar="N", help="runs of each, in turns (default 1)")


def main():
    parser = argparse.ArgumentParser(prog="tools/bench.sh frameworks")
    add_options(parser, DOCUMENT)
    parser.add_argument("name", nargs="*", metavar="NAME", help="of an example, or full, or lora (default: all)")
    options = parser.parse_args()
    known = [*EXAMPLES, *SETTINGS]
    if wrong := [name for name in options.name if name not in known]:
        parser.error(f"no such name: {', '.join(wrong)}; there are {', '.join(known)}")
    names = options.name or known
    stop_on_signals()
    differs = False
    if examples := [name for name in EXAMPLES if name in names]:
        rows = (of_example(name, options.rate, options.repeat) for name in examples)
        differs |= show("examples", OF_EXAMPLES, rows, map(title_of, EXAMPLES), options.write)
    for name in SETTINGS:
        if name in names:
            rows = of_setting(name, options.rate, options.repeat)
            differs |= show(name, OF_SETTINGS, rows, SETTINGS[name][1], options.write)
    return differs


if __name__ == "__main__":
    sys.exit(main())
