"""The fingerprint's kernel: as a share of the device memory's bandwidth, and equal to the host's."""

import re

from section import Section, main

PROGRAM = "test_comm_fingerprint_device"
RATE = re.compile(
    r"\s*(\d+) arrays of +(\d+) bytes: (?:the simulated device|the device) ([\d.]+) GB/s \((\d+) us with the wait\), the CPU ([\d.]+) GB/s"
)


def body(section: Section) -> None:
    size = 64 if section.simulated else 2048
    said, command, peak = section.kernel_test(
        PROGRAM, "the device's fingerprints are the host's, and a flipped bit is seen", size
    )
    for n, each, device, us, cpu in RATE.findall(said):
        what = f"{n} arrays of {each} bytes"
        section.figure(f"{what}: by the kernel, with the host's wait", float(device), "GB/s", command, us=float(us))
        section.figure(f"{what}: by one thread of the host", float(cpu), "GB/s", command)
        if peak:
            section.figure(
                f"{what}: over the memory's peak of {peak} GB/s", round(float(device) / peak, 3), "share", command
            )


if __name__ == "__main__":
    main(body)
