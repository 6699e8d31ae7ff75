"""Compares what fcdp-plan predicts with what fcdp-lab measures, on emulated nodes of this machine (2 x 2 ranks, over gloo).

In each round, each job is profiled for each rate by fcdp-plan profile, on links that are not shaped; its steps are predicted
by fcdp-plan compare, and then measured by fcdp-lab. So a machine that is busy for a while is so for both. The error is the
median over the rounds of predicted / measured - 1. The spreads are (largest - smallest) / median over the rounds: of what was
measured, and of what was predicted, since a profile is measured too.
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
SCRIPT = str(ROOT / "tools" / "demo" / "gpt.py")
JOBS = {
    "full": "--dim 252",
    "bf16": "--dim 252 --bf16",
    "LoRA": "--dim 252 --lora 8",
    "wide": "--layers 3 --dim 448 --batch 2 --seq 128",
}
RATES = {"unlimited": 10, "1gbit": 10, "100mbit": 6}  # optimizer steps of a run
WARM_UP = 2
# name in fcdp-plan -> what the lab calls it, and how it is run
MODES = {
    "FSDP2": ("fsdp", None),
    "FSDP2 hpZ": ("hpz", "hpz: -- --reshard-after-forward 2"),
    "HSDP": ("hsdp", "hsdp: -- --hsdp"),
    "FCDP": ("fcdp", None),
    "FCDP device": ("tau", "tau: FCDP=1 FCDP_TAU=1"),
}


def names_among(known):
    """The type of an option: names of these, with commas between them."""

    def names(text):
        given = text.split(",")
        for name in given:
            if name not in known:
                raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(known)}")
        return given

    return names


def arguments():
    parser = argparse.ArgumentParser(
        prog="tools/bench.sh plan", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--jobs", type=names_among(JOBS), default=[*JOBS], metavar="A,B", help=f"default: {','.join(JOBS)}"
    )
    parser.add_argument(
        "--rates", type=names_among(RATES), default=[*RATES], metavar="A,B", help=f"default: {','.join(RATES)}"
    )
    parser.add_argument(
        "--modes", type=names_among(MODES), default=[*MODES], metavar="A,B", help=f"default: {','.join(MODES)}"
    )
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="default %(default)s")
    parser.add_argument("--json", metavar="FILE", help="write the figures of each run there, as they come")
    return parser.parse_args()


def run(module, *words):
    done = subprocess.run(
        [sys.executable, "-m", module, *map(str, words)], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True
    )
    if done.returncode:
        sys.exit(f"tools/bench.sh plan: {module} ended with {done.returncode}")
    return done.stdout


def profiled(job, folder):
    path = os.path.join(folder, "profile.json")
    run("fcdp_plan", "profile", "-o", path, "--", SCRIPT, *JOBS[job].split(), "--steps", 100)
    return path


def predicted(profile, rate):
    out = run("fcdp_plan", "compare", profile, "--json", "--cluster", "measured", "--on-cpus", "--link", rate)
    return {name: one["step"] for name, one in json.loads(out)["modes"].items()}


def measured(job, rate, modes, folder):
    path = os.path.join(folder, "lab.json")
    own = [word for _, mode in modes.values() if mode for word in ("--mode", mode)]
    built_in = ",".join(name for name, mode in modes.values() if not mode)
    words = ["--rate", rate, "--modes", built_in, "--warmup", WARM_UP, "--launcher", "direct", "--json", path, *own]
    run("fcdp_lab", *words, "--", SCRIPT, *JOBS[job].split(), "--steps", RATES[rate])
    with open(path) as file:
        return {mode["name"]: mode for mode in json.load(file)["modes"]}


def runs_of(job, rate, modes, folder):
    model, lab = predicted(profiled(job, folder), rate), measured(job, rate, modes, folder)
    for name, (of_lab, _) in modes.items():
        step, mode = model[name], lab[of_lab]
        yield {
            "job": job,
            "rate": rate,
            "mode": name,
            "measured_s": mode["step_s"],
            "predicted_s": step["seconds"],
            "measured_bytes": mode["sent_bytes_per_step"],
            "predicted_bytes": step["forward_inter"] + step["backward_inter"],
            "others_cpus": mode["others_cpus"],
        }


def spread(values):
    return (max(values) - min(values)) / statistics.median(values)


def row_of(runs):
    """Of one job, rate and mode."""
    return {key: runs[0][key] for key in ("job", "rate", "mode")} | {
        "measured_s": statistics.median(r["measured_s"] for r in runs),
        "predicted_s": statistics.median(r["predicted_s"] for r in runs),
        "error": statistics.median(r["predicted_s"] / r["measured_s"] - 1 for r in runs),
        "measured_spread": spread([r["measured_s"] for r in runs]),
        "predicted_spread": spread([r["predicted_s"] for r in runs]),
        "bytes_error": statistics.median(r["predicted_bytes"] / r["measured_bytes"] - 1 for r in runs),
    }


def shown(row):
    cells = [row["job"], row["rate"], row["mode"], f"{row['measured_s']:.3f}", f"{row['predicted_s']:.3f}"]
    cells += [f"{100 * row['error']:+.1f} %"]
    cells += [f"{100 * row[key]:.0f} %" for key in ("measured_spread", "predicted_spread")]
    return "| " + " | ".join([*cells, f"{100 * row['bytes_error']:+.1f} %"]) + " |"


def show(runs):
    cells = {}
    for one in runs:
        cells.setdefault((one["job"], one["rate"], one["mode"]), []).append(one)
    rows = [row_of(cell) for cell in cells.values()]
    print(
        "| job | link | mode | measured, s | predicted, s | error | spread of measured | of predicted | error of bytes |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    print("\n".join(map(shown, rows)))
    for key, what in (("error", "step times"), ("bytes_error", "bytes")):
        sizes = [abs(row[key]) for row in rows]
        print(f"{what}: median error {100 * statistics.median(sizes):.1f} %, worst {100 * max(sizes):.1f} %")
    others = statistics.median(one["others_cpus"] or 0 for one in runs)
    print(f"other programs used {others:.1f} of {os.cpu_count()} CPUs meanwhile")


def main():
    args = arguments()
    modes = {name: MODES[name] for name in args.modes}
    runs = []
    with tempfile.TemporaryDirectory(prefix="fcdp-bench-") as folder:
        for _ in range(args.rounds):
            for job in args.jobs:
                for rate in args.rates:
                    runs += runs_of(job, rate, modes, folder)
                    if args.json:
                        pathlib.Path(args.json).write_text(json.dumps(runs, indent=1))
    show(runs)


if __name__ == "__main__":
    main()
