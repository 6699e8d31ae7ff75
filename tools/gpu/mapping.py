"""What physical handles and mappings cost, by their size: idle, beside running kernels, and as aliases."""

from section import Section, main


def body(section: Section) -> None:
    section.bench("bench_mapping", *((64, 1) if section.simulated else (1024, 5)))


if __name__ == "__main__":
    main(body)
