"""FSDP2 plain and with FCDP, 2 nodes x 2 ranks sharing the device, over gloo: bitwise equality, step time, what
blocks the host, what idles; with both ways to map device pages."""

from ranks import FCDP, ONE_LANE, compare
from section import Section, main

SMALL = "--layers 2 --dim 64 --heads 4 --seq 32 --batch 2 --warmup 1 --steps 2".split()


def body(section: Section) -> None:
    runs = {}
    for mapping in ("slots", "exact"):  # auto is exact before torch 2.15, and slots from there on
        runs[f"FCDP, {mapping}, tensors PyTorch's"] = ONE_LANE | {"FCDP_MAPPING": mapping}
        if not section.simulated:
            runs[f"FCDP, {mapping}, tensors FCDP's too"] = FCDP | {"FCDP_MAPPING": mapping}
    compare(section, [*(SMALL if section.simulated else []), "--profile", "3"], runs)


if __name__ == "__main__":
    main(body)
