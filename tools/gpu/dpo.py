"""LoRA adapters trained with DPO: a no-grad reference forward on the same model between forward and backward.
What is frozen must not be gathered again."""

from fsdp2 import SMALL
from ranks import ONE_LANE, compare
from section import Section, main


def body(section: Section) -> None:
    if section.simulated:  # on half as many ranks, as most of the time is their start
        compare(section, ["--dpo", *SMALL], {"FCDP": ONE_LANE}, node_size=1)
    else:
        compare(section, ["--dpo", "--batch", "2"], {"FCDP": ONE_LANE})


if __name__ == "__main__":
    main(body)
