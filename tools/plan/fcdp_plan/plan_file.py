"""A plan: a JSON file with the tier of each region. `search -o` writes it, and FCDP_PLAN has a job follow it."""

from __future__ import annotations

import importlib.resources
import json

from fcdp_plan import _plan, profile

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
    counts = ("trainable", "frozen")
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
        "regions": [
            {"name": region["name"], **{key: round(region[key]) for key in counts}, "tier": TIERS[tier]}
            for region, tier in zip(job["regions"], found["tiers"])
        ],
    }


def read(path: str) -> dict:
    """Raises Error with what is wrong with the file."""
    return profile.read_json(path, schema(), "the plan")
