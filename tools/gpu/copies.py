"""Copies between host and device as a share of what the link can carry, the rate of page-locking, and what
moving a region costs beside that, how fast tensors sleep and wake."""

import re

from section import Failed, Section, last_line, main


def shares(section: Section, figures: list) -> None:
    peak = section.settings["machine"].get("pcie_peak_gb_s")
    if not peak:
        section.reason(
            "no share of the link's peak: "
            + ("the device is simulated" if section.simulated else "neither NVML nor sysfs tells the link")
        )
        return
    best: dict[str, float] = {}
    for figure in figures:
        match = re.match(r"page-locked, copies of \d+ MiB, (.+)", figure["name"])
        if match:
            best[match[1]] = max(best.get(match[1], 0), figure["value"])
    for way, rate in best.items():
        ways = 2 if way == "both at once" else 1
        section.figure(
            f"{way}: best rate over the link's peak of {ways} x {peak} GB/s",
            round(rate / (ways * peak), 3),
            "share",
            "bench_copies",
        )


def regions(section: Section) -> None:
    arguments = ("32", "2") if section.simulated else ("256", "10")
    command = f"bench_tiering_moves {' '.join(arguments)}"
    try:
        job = section.run("bench_tiering_moves", *arguments, limit_s=section.left() * 0.9)
    except Failed as error:
        section.check(command, False, str(error))
        return
    mapping = ""
    for line in job.stdout.splitlines():
        mapping = line.removesuffix(" mapping") if line.endswith(" mapping") else mapping
        match = re.match(r"(.+?) +([\d.]+) ms +([\d.]+) GB/s$", line)
        if match:
            section.figure(f"{mapping}: {match[1]}", float(match[2]), "ms", command, gb_s=float(match[3]))
    section.check(command, job.returncode == 0, "" if job.returncode == 0 else last_line(job.stdout))


def body(section: Section) -> None:
    shares(section, section.bench("bench_copies", *((64, 1) if section.simulated else (1024, 5))))
    regions(section)
    section.bench("bench_sleep", *((64, 1) if section.simulated else (4096, 5)))


if __name__ == "__main__":
    main(body)
