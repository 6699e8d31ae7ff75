"""A GPT whose gathered parameters exceed the device budget, of which a part stays on the device: beside one with
room for all, and beside one that keeps nothing. 2 nodes x 2 ranks sharing the device, over gloo."""

from ranks import ONE_LANE, compare, gained, median
from section import Section, main

GPT = "--layers 12 --batch 2 --steps 4".split()  # 152 MB of parameters
SMALL_GPT = "--layers 8 --dim 64 --heads 4 --seq 32 --batch 2 --warmup 2 --steps 2".split()  # 9 groups of one page


def body(section: Section) -> None:
    budget = "10M" if section.simulated else "80M"
    next_use = ONE_LANE | {"FCDP_POLICY": "next-use"}
    runs = {
        "room for all": next_use,
        f"a budget of {budget}": next_use | {"FCDP_DEVICE_BUDGET": budget},
        "none kept": ONE_LANE | {"FCDP_TAU": "0"},
    }
    results = compare(section, SMALL_GPT if section.simulated else GPT, runs)
    results = {name: got for name, got in results.items() if all(one["before"] and one["after"] for one in got)}
    if missing := runs.keys() - results.keys():
        section.check(
            "the device budget's runs can be compared",
            False,
            f"{', '.join(sorted(missing))}: ended early, or without FCDP; the checks above and their logs say why",
        )
    moved = {name: sum(gained(got, "moves", "h2d_bytes")) / len(got) / got[0]["steps"] for name, got in results.items()}
    for name, got in results.items():
        section.figure(
            f"{name}: brought to the device, a step and rank",
            round(moved[name] / 1e6, 2),
            "MB",
            "fcdp.stats()",
            of_parameters=round(moved[name] / got[0]["parameter_bytes"], 3),
        )
        if "room for all" in results:
            all_kept = median(results["room for all"], "step_median_s")
            section.figure(
                f"{name}: a step, over that with room for all",
                round(median(got, "step_median_s") / all_kept, 3),
                "times",
                "job.py",
            )
    if len(moved) == len(runs):
        more = [f"{moved[name] / 1e6:.1f}" for name in runs]
        section.check(
            f"a budget of {budget} keeps some groups on the device, and not all",
            moved["room for all"] < moved[f"a budget of {budget}"] < moved["none kept"],
            f"{', '.join(more)} MB a step come to the device with room for all, with that budget, and with none kept",
            "fcdp.stats()",
        )


if __name__ == "__main__":
    main(body)
