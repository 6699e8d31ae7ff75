"""What physical handles and mappings cost, by their size: idle, beside running kernels, and as aliases; and how fast
the device reads host memory that is mapped at its addresses (FCDP_HOST_MAP)."""

from section import Section, main


def on_host(section: Section) -> None:
    """A driver or a container may refuse such memory: then the report says so, and that is no failure."""
    arguments = (32, 1) if section.simulated else (1024, 5)
    rate = {figure["name"]: figure["value"] for figure in section.bench("bench_host_map", *arguments)}
    for what in ("all of it read by a kernel", "4096 rows of 8 KiB read by a kernel"):
        device, host = rate.get(f"device memory: {what}"), rate.get(f"host memory, mapped: {what}")
        if device and host:
            section.figure(
                f"mapped host memory over device memory, {what}", round(host / device, 4), "share", "bench_host_map"
            )
        elif device:
            section.reason(f"no rate of mapped host memory, {what}: the system refuses it (the section's log says why)")


def body(section: Section) -> None:
    section.bench("bench_mapping", *((64, 1) if section.simulated else (1024, 5)))
    on_host(section)


if __name__ == "__main__":
    main(body)
