"""Trains the demo's GPT on 2 emulated nodes of 2 ranks by FSDP2, and with each setting that adds or rounds in another way, and
draws the losses of all of them. tools/bench.sh --help names the options."""

import argparse
import sys

import matplotlib

import frameworks
from frameworks import INT8, REDUCE, ROOT

matplotlib.use("Agg")
from matplotlib.figure import Figure

PICTURE = ROOT / "docs" / "loss-curves.svg"
JOB = ["tools/demo/gpt.py", "--dim", "168", "--layers", "4"]
# Of each line: its mode of fcdp-lab, and its colour. The first is what the others are compared with.
SETTINGS = {
    "FSDP2": ("", "#111827"),
    "FCDP=1": ("FCDP=1", "#9aa3b2"),
    "HSDP": ("-- --hsdp", "#c2553f"),
    REDUCE: (f"FCDP=1 {REDUCE}", "#2f6fdb"),
    f"{REDUCE} FCDP_REDUCE_DTYPE=bf16": (f"FCDP=1 {REDUCE} FCDP_REDUCE_DTYPE=bf16", "#e08a2e"),
    f"{REDUCE} {INT8}": (f"FCDP=1 {REDUCE} {INT8}", "#7c5cd6"),
}
OF_CURVES = "setting | first loss | last loss | largest difference of a loss | difference of the last ten's mean"
STYLE = {"svg.fonttype": "none", "svg.hashsalt": "fcdp-bench", "font.size": 9}
LAST = 10  # steps whose mean tells where a run has come to


def differences(losses, reference):
    """Step by step, over the reference's loss there."""
    return [abs(one - other) / other for one, other in zip(losses, reference, strict=True)]


def rows(curves):
    reference = next(iter(curves.values()))
    at_end = sum(reference[-LAST:])
    for title, losses in curves.items():
        end = abs(sum(losses[-LAST:]) - at_end) / at_end
        largest = max(differences(losses, reference))
        yield [title, f"{losses[0]:.4f}", f"{losses[-1]:.4f}", f"{largest:.0e}" if largest else "0", f"{end:.1e}"]


def draw(curves, path):
    """The losses, one over the other; below, how far each is from the first. A run that is equal has no line there."""
    reference = next(iter(curves.values()))
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(9.5, 6.2), layout="constrained")
        above, below = figure.subplots(2, 1, height_ratios=(3, 2), sharex=True)
        for i, (title, losses) in enumerate(curves.items()):
            steps, colour = range(1, len(losses) + 1), SETTINGS[title][1]
            width = 1 + 0.7 * (len(curves) - i)  # those below show on both sides
            above.plot(steps, losses, color=colour, linewidth=width, label=title)
            apart = [value or float("nan") for value in differences(losses, reference)]
            below.plot(steps, apart, color=colour, linewidth=1.2)
        above.set_title("Loss", loc="left", fontweight="bold")
        below.set_title(f"Difference from {next(iter(curves))}, relative", loc="left", fontweight="bold")
        above.legend(frameon=False, fontsize=8)
        below.set_yscale("log")
        below.set_xlabel("optimizer step")
        for axes in (above, below):
            axes.grid(True, axis="y", color="#e5e7eb", linewidth=0.8)
            axes.spines[["top", "right"]].set_visible(False)
        figure.savefig(path, format="svg", metadata={"Date": None})


def measured(n_steps, arguments):
    job = [*JOB, "--steps", str(n_steps), *arguments]
    modes = frameworks.lab("unlimited", job, [mode for mode, _ in SETTINGS.values()])
    return {title: [float(loss) for loss in mode["runs"][0]["losses"]] for title, mode in zip(SETTINGS, modes)}


def main():
    parser = argparse.ArgumentParser(prog="tools/bench.sh curves")
    parser.add_argument("--steps", type=int, default=200, help="optimizer steps (default %(default)s)")
    parser.add_argument("--picture", metavar="X.svg", help="draw there")
    parser.add_argument("--write", action="store_true", help="draw docs/loss-curves.svg")
    options, of_job = parser.parse_known_args()
    if options.steps < LAST:
        parser.error(f"--steps must be at least {LAST}")
    if of_job[:1] not in ([], ["--"]):
        parser.error(f"unknown: {' '.join(of_job)}; options of tools/demo/gpt.py follow --")
    frameworks.stop_on_signals()
    curves = measured(options.steps, of_job[1:])
    print(*frameworks.lines(OF_CURVES, rows(curves)), sep="\n", flush=True)
    for path in filter(None, (options.picture, PICTURE if options.write else None)):
        draw(curves, path)
        print(f"The picture is in {path}")
    differs = curves["FCDP=1"] != curves["FSDP2"]
    if differs:
        print("FCDP=1 has other losses than FSDP2, which is a fault", file=sys.stderr)
    return differs


if __name__ == "__main__":
    sys.exit(main())
