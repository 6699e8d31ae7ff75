"""What a mode's step takes beside what the model has of it: FCDP's own work on the host, hpZ's second partition, and what
collectives take of cores that others use too.

fcdp-plan profile --calibrate measures a step of each mode on links that are not shaped. What the cores need for FSDP2's
collectives is then as much as these took there; and the mode's host work is as many seconds of computing as the model needs
to come to that step. No step on another link is looked at.
"""

from __future__ import annotations

from fcdp_plan import clusters, modes, splits

LINK = "unlimited"  # of the runs that are measured
# The environment that a mode is run in. Gathers send all bytes, as the model has it.
FCDP = {"FCDP": "1", "FCDP_CODEC": "none"}
ENVIRONMENTS = {
    "FCDP": FCDP,
    "FCDP whole": FCDP | {"FCDP_RESTORE": "whole"},
    "FCDP device": FCDP | {"FCDP_TAU": "1"},
}
WITHOUT_ARGUMENTS = ("FSDP2", "FCDP", "FCDP device")  # what --calibrate runs; on CPUs FCDP restores the whole
ROUNDS = 40  # each makes the error smaller by the share of host work that nothing hides
ENOUGH_S = 1e-6


def environment(mode: str) -> dict[str, str]:
    return ENVIRONMENTS.get(mode, {})


def schedules(job: dict, schedule: dict) -> dict[str, dict[str, float]]:
    """By mode, what differs from the schedule; {}: the profile has no calibration, or this is no job on CPUs."""
    measured = job.get("calibration")
    if not measured or not schedule["host_computes"]:
        return {}
    machine = clusters.read(clusters.MEASURED, job) | {"link": LINK}
    cluster = clusters.numbers(machine, measured["nodes"])
    calm = schedule | {"jitter": 0, "n_steps": 1, "differences": 1, "micro_batches": job.get("micro_batches", 1)}
    regions = splits.regions_of(job)
    found = {
        name: _fitted(name, step, job["costs"], regions, cluster, calm)
        for name, step in measured["modes"].items()
        if name in modes.MODES
    }
    stand_ins = {name: _stand_in(name, found) for name in modes.MODES}
    return {name: found[stand_in] for name, stand_in in stand_ins.items() if stand_in}


def _stand_in(name: str, found: dict[str, dict]) -> str | None:
    """Whose calibration the mode has: its own, or that of the mode most like it."""
    like = "FCDP" if name.startswith("FCDP") else "FSDP2"
    return name if name in found else like if like in found else None


def _fitted(
    name: str, measured: dict, costs: dict, regions: list[dict], cluster: dict, schedule: dict
) -> dict[str, float]:
    def simulated(fitted: dict[str, float]) -> dict:
        return modes.simulate(name, costs, regions, cluster, **schedule | fitted)

    bare = simulated({})
    fitted = {"host_seconds": 0.0}
    for kind in ("gather", "reduce"):
        seconds, described = measured[f"{kind}_seconds"], bare[f"{kind}_core_seconds"]
        fitted[f"{kind}_cores"] = seconds / described if described > 0 else 0.0
    for _ in range(ROUNDS):
        missing = measured["step_seconds"] - simulated(fitted)["seconds"]
        if abs(missing) < ENOUGH_S:
            break
        fitted["host_seconds"] += missing
    return fitted
