"""One process trains over PyTorch's own NCCL, under PyTorch's allocator and under FCDP's. At its start this NCCL asks
the current allocator for what PyTorch refuses to other pluggable ones (from torch 2.15 on), so a job may end there."""

from ranks import first_difference, launch
from section import Failed, Section, main

FCDP = {"FCDP": "1", "FCDP_SUMMARY": "0"}
RUNS = {"fcdp_alloc": FCDP, "fcdp_alloc and the NCCL before 2.15": FCDP | {"TORCH_DIST_USE_NCCL2": "0"}}
ARGUMENTS = "--layers 2 --dim 256 --heads 4 --seq 128 --batch 2 --warmup 1 --steps 3".split()


def body(section: Section) -> None:
    if section.simulated:
        section.reason(
            "not on the simulated device: NCCL needs a GPU (tests/torch_plugin/test_tensors.py makes the calls that it makes of an allocator)"
        )
        return
    limit_s = section.left() / (len(RUNS) + 1)
    plain = launch(section, "PyTorch's allocator", ARGUMENTS, {}, limit_s, nccl=True, world=1)
    for name, settings in RUNS.items():
        what = f"{name}: losses and parameters are bit for bit those under PyTorch's allocator"
        try:
            got = launch(section, name, ARGUMENTS, settings, limit_s, nccl=True, world=1)
        except Failed as error:
            section.check(what, False, str(error))
            continue
        allocator = got[0]["allocator"]
        section.check(f"{name}: tensors are FCDP's", allocator == "pluggable", f"PyTorch's allocator is {allocator}")
        difference = first_difference(plain, got)
        section.check(what, not difference, difference or f"{len(got[0]['losses'])} steps", "job.py")
        section.figure(f"{name}: a step", round(1e3 * got[0]["step_median_s"], 2), "ms", "job.py")


if __name__ == "__main__":
    main(body)
