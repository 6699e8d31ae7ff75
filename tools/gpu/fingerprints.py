"""The fingerprint's kernel: as a share of the device memory's bandwidth, and equal to the host's."""

import re

from section import Failed, Section, last_line, main

PROGRAM = "test_comm_fingerprint_device"
RATE = re.compile(
    r"\s*(\d+) arrays of +(\d+) bytes: (?:the simulated device|the device) ([\d.]+) GB/s \((\d+) us with the wait\), the CPU ([\d.]+) GB/s"
)


def body(section: Section) -> None:
    job = section.run(PROGRAM)
    section.check(
        "the device's fingerprints are the host's, and a flipped bit is seen",
        job.returncode == 0,
        "" if job.returncode == 0 else last_line(job.stdout),
        PROGRAM,
    )
    size = 64 if section.simulated else 2048
    command, peak = f"{PROGRAM} {size}", section.settings["machine"].get("memory_peak_gb_s")
    job = section.run(PROGRAM, size)
    if job.returncode:
        raise Failed(f"{command}: {last_line(job.stdout)}")
    for n, each, device, us, cpu in RATE.findall(job.stdout):
        what = f"{n} arrays of {each} bytes"
        section.figure(f"{what}: by the kernel, with the host's wait", float(device), "GB/s", command, us=float(us))
        section.figure(f"{what}: by one thread of the host", float(cpu), "GB/s", command)
        if peak:
            section.figure(
                f"{what}: over the memory's peak of {peak} GB/s", round(float(device) / peak, 3), "share", command
            )
    if not peak:
        section.reason(
            "no share of the memory's peak: "
            + ("the device is simulated" if section.simulated else "the driver does not tell its clock")
        )


if __name__ == "__main__":
    main(body)
