"""The kernel that encodes differences: as a share of the device memory's bandwidth, and equal to the host's."""

import re

from section import Failed, Section, last_line, main

PROGRAM = "test_comm_codec_device"
GOAL = 0.5  # of the memory's peak, reading the base and the new values once each
RATE = re.compile(
    r"(\w+ weights, lr \S+), ([\d.]+) of the array: the (?:simulated )?device reads ([\d.]+) GB/s with slots on the device, ([\d.]+) in"
)


def body(section: Section) -> None:
    job = section.run(PROGRAM)
    section.check(
        "the device's wires of differences are the host's",
        job.returncode == 0,
        "" if job.returncode == 0 else last_line(job.stdout),
        PROGRAM,
    )
    size = 8 if section.simulated else 512
    command, peak = f"{PROGRAM} {size}", section.settings["machine"].get("memory_peak_gb_s")
    job = section.run(PROGRAM, size)
    if job.returncode:
        raise Failed(f"{command}: {last_line(job.stdout)}")
    for what, of_array, near, far in RATE.findall(job.stdout):
        for where, rate in (("on the device", float(near)), ("in host memory", float(far))):
            name = f"{what}: both arrays read, slots {where}"
            section.figure(name, rate, "GB/s", command, wire_of_array=float(of_array))
            if peak:
                section.figure(f"{name}, over the memory's peak", round(rate / peak, 3), "share", command, goal=GOAL)
    if not peak:
        section.reason(
            "no share of the memory's peak: "
            + ("the device is simulated" if section.simulated else "the driver does not tell its clock")
        )


if __name__ == "__main__":
    main(body)
