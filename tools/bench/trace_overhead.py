"""The ratio of the step time with the trace on to that without, from a report of fcdp-lab whose modes are "off" and
"on", run in turn: the median over pairs of neighbouring runs. Ends with 1 where it is above 1.01."""

import json
import statistics
import sys

LIMIT = 1.01


def ratios(report):
    runs = {mode["name"]: [run["step_s"] for run in mode["runs"]] for mode in report["modes"]}
    return sorted(on / off for on, off in zip(runs["on"], runs["off"]))


def main(path):
    with open(path) as file:
        found = ratios(json.load(file))
    middle = statistics.median(found)
    low, high = found[len(found) // 4], found[-1 - len(found) // 4]
    print(
        f"step time with FCDP_TRACE=1 over FCDP_TRACE=0: {middle:.4f} (median of {len(found)} pairs; the middle half "
        f"from {low:.4f} to {high:.4f})"
    )
    return middle > LIMIT


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
