"""The same 4 ranks over NCCL, FSDP2's collectives and FCDP's. NCCL wants a device for each rank; told that each
is on a machine of its own (NCCL_HOSTID) it goes over sockets, and its kernels take turns on the device: what
it shows is that it works, not how fast."""

from ranks import FCDP, compare
from section import Section, main


def body(section: Section) -> None:
    if section.simulated:
        section.reason(
            "not on the simulated device: NCCL needs a GPU (tests/torch_plugin/test_nccl.py runs such a job over a double)"
        )
        return
    arguments = "--layers 4 --dim 256 --heads 4 --seq 128 --batch 2 --warmup 2 --steps 4".split()
    compare(
        section, arguments, {"FCDP over NCCL": FCDP | {"FCDP_TRANSPORT": "nccl", "FCDP_ALLOC": "native"}}, nccl=True
    )


if __name__ == "__main__":
    main(body)
