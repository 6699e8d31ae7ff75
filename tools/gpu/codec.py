"""The kernel that encodes differences: as a share of the device memory's bandwidth, and equal to the host's."""

import re

from section import Section, main

PROGRAM = "test_comm_codec_device"
GOAL = 0.5  # of the memory's peak, reading the base and the new values once each
RATE = re.compile(
    r"(\w+ weights, lr \S+), ([\d.]+) of the array: the (?:simulated )?device reads ([\d.]+) GB/s with slots on the device, ([\d.]+) in"
)


def body(section: Section) -> None:
    size = 8 if section.simulated else 512
    said, command, peak = section.kernel_test(PROGRAM, "the device's wires of differences are the host's", size)
    for what, of_array, near, far in RATE.findall(said):
        for where, rate in (("on the device", float(near)), ("in host memory", float(far))):
            name = f"{what}: both arrays read, slots {where}"
            section.figure(name, rate, "GB/s", command, wire_of_array=float(of_array))
            if peak:
                section.figure(f"{name}, over the memory's peak", round(rate / peak, 3), "share", command, goal=GOAL)


if __name__ == "__main__":
    main(body)
