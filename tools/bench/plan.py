"""Compares what fcdp-plan predicts with what fcdp-lab measures, on emulated nodes of this machine (2 x 2 ranks, over gloo).

In each round, each job is profiled by fcdp-plan profile --calibrate, on links that are not shaped. Its steps are predicted for
each rate by fcdp-plan compare, and then measured by fcdp-lab on links of that rate. So a machine that is busy for long is so
for both. No prediction knows a step on a shaped link. The error is the median over the rounds of predicted / measured - 1. The
spreads are (largest - smallest) / median over the rounds: of what was measured, and of what was predicted, since a profile is
measured too. FCDP runs with FCDP_CODEC=none, since the model has no codec.
"""

import argparse
import itertools
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
# Of the links, and the optimizer steps of a run. A link that is not shaped is the calibration's.
RATES = {"1gbit": 24, "300mbit": 14, "100mbit": 8}
WARM_UP = 2
# name in fcdp-plan -> what the lab calls it, its environment, and what the script takes for it
MODES = {
    "FSDP2": ("plain", "", ""),
    "FSDP2 hpZ": ("hpz", "", "--reshard-after-forward 2"),
    "HSDP": ("hsdp", "", "--hsdp"),
    "FCDP": ("cached", "FCDP=1 FCDP_CODEC=none", ""),
    "FCDP device": ("kept", "FCDP=1 FCDP_CODEC=none FCDP_TAU=1", ""),
}
APART = 0.03  # of the faster one's step: modes that differ by less have no order


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
    parser.add_argument(
        "--json", metavar="FILE", help="write the figures of each run there, as they come, and the profiles"
    )
    parser.add_argument(
        "--again",
        nargs="+",
        metavar="FILE",
        help="run nothing: predict anew from what --json wrote, in all of these files",
    )
    return parser.parse_args()


def run(module, *words):
    done = subprocess.run(
        [sys.executable, "-m", module, *map(str, words)], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True
    )
    if done.returncode:
        sys.exit(f"tools/bench.sh plan: {module} ended with {done.returncode}")
    return done.stdout


def profiled(job, modes, folder):
    path = os.path.join(folder, "profile.json")
    own = [word for name, (_, _, given) in modes.items() if given for word in ("--mode", f"{name}: {given}")]
    run("fcdp_plan", "profile", "-o", path, "--calibrate", *own, "--", SCRIPT, *JOBS[job].split(), "--steps", 100)
    return json.loads(pathlib.Path(path).read_text())


def predicted(profile, rate, folder):
    path = pathlib.Path(folder, "profile.json")
    path.write_text(json.dumps(profile))
    out = run("fcdp_plan", "compare", path, "--json", "--cluster", "measured", "--on-cpus", "--link", rate, "--shaped")
    return {name: one["step"] for name, one in json.loads(out)["modes"].items()}


def measured(job, rate, modes, folder):
    path = os.path.join(folder, "lab.json")
    own = [word for name, env, given in modes.values() for word in ("--mode", f"{name}: {env} -- {given}")]
    names = ",".join(name for name, _, _ in modes.values())
    words = ["--rate", rate, "--modes", names, "--warmup", WARM_UP, "--launcher", "direct", "--json", path, *own]
    run("fcdp_lab", *words, "--", SCRIPT, *JOBS[job].split(), "--steps", RATES[rate])
    with open(path) as file:
        return {mode["name"]: mode for mode in json.load(file)["modes"]}


def with_prediction(one, step):
    sent = step["forward_inter"] + step["backward_inter"]
    return one | {"predicted_s": step["seconds"], "predicted_bytes": sent}


def runs_of(job, rate, modes, profile, folder):
    model, lab = predicted(profile, rate, folder), measured(job, rate, modes, folder)
    for name, (of_lab, _, _) in modes.items():
        mode = lab[of_lab]
        one = {
            "job": job,
            "rate": rate,
            "mode": name,
            "measured_s": mode["step_s"],
            "measured_bytes": mode["sent_bytes_per_step"],
            "others_cpus": mode["others_cpus"],
            "profile": profile,
        }
        yield with_prediction(one, model[name])


def predicted_again(paths, folder):
    for path in paths:
        runs, models = json.loads(pathlib.Path(path).read_text()), {}
        for one in runs:
            key = one["rate"], json.dumps(one["profile"])
            if key not in models:
                models[key] = predicted(one["profile"], one["rate"], folder)
            yield with_prediction(one, models[key][one["mode"]])


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
    show_errors(rows)
    for key, what in (("error", "step times"), ("bytes_error", "bytes")):
        sizes = [abs(row[key]) for row in rows]
        print(f"{what}: median error {100 * statistics.median(sizes):.1f} %, worst {100 * max(sizes):.1f} %")
    show_order(rows)
    others = statistics.median(one["others_cpus"] or 0 for one in runs)
    print(f"other programs used {others:.1f} of {os.cpu_count()} CPUs meanwhile")


def show_errors(rows):
    """A line for each mode of a job: of each link, the measured step and the error of the prediction."""
    rates = list(dict.fromkeys(row["rate"] for row in rows))
    print("\n| job | mode | " + " | ".join(rates) + " |\n| --- | --- |" + " --- |" * len(rates))
    cells = {
        (row["job"], row["mode"], row["rate"]): f"{row['measured_s']:.3f} s, {100 * row['error']:+.1f} %"
        for row in rows
    }
    for job, mode in dict.fromkeys((row["job"], row["mode"]) for row in rows):
        print(f"| {job} | {mode} | " + " | ".join(cells.get((job, mode, rate), "-") for rate in rates) + " |")
    print()


def show_order(rows):
    """Of the pairs of modes of a job at a rate."""
    pairs = [
        (one, other)
        for one, other in itertools.combinations(rows, 2)
        if (one["job"], one["rate"]) == (other["job"], other["rate"])
    ]
    right, wrong, equal = 0, [], 0
    for one, other in pairs:
        faster, slower = sorted((one, other), key=lambda row: row["measured_s"])
        if slower["measured_s"] < (1 + APART) * faster["measured_s"]:
            equal += 1
        elif faster["predicted_s"] < slower["predicted_s"]:
            right += 1
        else:
            wrong.append(f"{faster['mode']} before {slower['mode']} ({faster['job']}, {faster['rate']})")
    print(
        f"order: right in {right} of {right + len(wrong)} pairs of modes; {equal} more were less than {APART:.0%} apart"
    )
    print("".join(f"  wrong: {pair}\n" for pair in wrong), end="")


def main():
    args = arguments()
    modes = {name: MODES[name] for name in args.modes}
    runs = []
    with tempfile.TemporaryDirectory(prefix="fcdp-bench-") as folder:
        if args.again:
            show(list(predicted_again(args.again, folder)))
            return
        for _ in range(args.rounds):
            for job in args.jobs:
                profile = profiled(job, modes, folder)
                for rate in args.rates:
                    runs += runs_of(job, rate, modes, profile, folder)
                    if args.json:
                        pathlib.Path(args.json).write_text(json.dumps(runs, indent=1))
    show(runs)


if __name__ == "__main__":
    main()
