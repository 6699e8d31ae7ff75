"""A plan: a JSON file with the tier of each region. `search -o` writes it, and FCDP_PLAN has a job follow it."""

from __future__ import annotations

import importlib.resources
import json

from fcdp_plan import _plan, profile, splits

SCHEMA = "fcdp-plan-plan/1"
TIERS = {
    _plan.ON_DEVICE: "device",
    _plan.BY_SLICE: "host",
    _plan.WHOLE: "host-whole",
    _plan.IN_FILE: "file",
    _plan.GATHERED: "gather",
}


def schema() -> dict:
    """JSON Schema of the file."""
    return json.loads(importlib.resources.files("fcdp_plan").joinpath("plan.schema.json").read_text())


def make(job: dict, found: dict, prefetch: int) -> dict:
    """`found`: what search has found for the job."""
    step, memory = found["step"], found["memory"]
    regions = []
    for region, tier, parts in zip(job["regions"], found["tiers"], found["parts"]):
        for group in splits.groups(region, parts):
            counts = {key: round(group[key]) for key in ("trainable", "frozen")}
            regions.append({"name": group["name"], **counts, "tier": TIERS[tier]})
    chosen = splits.chosen(job, found["parts"])
    return {
        "schema": SCHEMA,
        "prefetch": prefetch,
        "batch": job["batch"],
        "predicted": {
            "seconds": step["seconds"],
            "device_bytes": round(memory["cache"]),
            "host_bytes": round(memory["host"]),
            "file_bytes": round(memory["file"]),
            "sent_bytes": round(step["forward_inter"] + step["backward_inter"]),
        },
        **({"splits": chosen} if chosen else {}),
        "regions": regions,
    }


def read(path: str) -> dict:
    """Raises Error with what is wrong with the file."""
    return profile.read_json(path, schema(), "the plan")
