"""A job's profile: a JSON file with its regions, and what a parameter costs."""

from __future__ import annotations

import importlib.resources
import json

from fcdp_plan import shapes
from fcdp_plan.failure import Error

SCHEMA = "fcdp-plan-profile/1"


def schema() -> dict:
    """JSON Schema of the file."""
    return json.loads(importlib.resources.files("fcdp_plan").joinpath("profile.schema.json").read_text())


def make(shape: dict, batch: int, dtype: str) -> dict:
    costs, regions = shapes.describe(shape, batch, dtype)
    names = ["embedding", *(f"layer {i}" for i in range(len(regions) - 2)), "head"]
    return {
        "schema": SCHEMA,
        "shape": shape,
        "batch": batch,
        "dtype": dtype,
        "costs": costs,
        "regions": [{"name": name} | region for name, region in zip(names, regions)],
    }


def at_batch(profile: dict, batch: int) -> dict:
    """The same model with another batch per GPU. One without a shape has activations and operations scaled."""
    if profile.get("shape"):
        return make(profile["shape"], batch, profile["dtype"])
    times = batch / profile["batch"]
    scaled = ("forward_flops", "backward_flops", "activation_bytes")
    regions = [r | {key: r[key] * times for key in scaled} for r in profile["regions"]]
    costs = profile["costs"] | {"other_bytes": profile["costs"]["other_bytes"] * times}
    return profile | {"batch": batch, "costs": costs, "regions": regions}


def _check(path: str, value: object, of: dict, where: str) -> None:
    """What of JSON Schema the profile's uses: types, required, properties, additionalProperties, minimum, items, enum."""
    kinds = {"object": dict, "array": list, "string": str, "number": (int, float), "integer": int, "boolean": bool}
    kind = of.get("type")
    is_number = kind in ("number", "integer")
    if kind and (not isinstance(value, kinds[kind]) or (is_number and isinstance(value, bool))):
        raise Error(f"{path}: {where} is no {kind}")
    if "enum" in of and value not in of["enum"]:
        raise Error(f"{path}: {where} is {value!r}, and can be {', '.join(map(repr, of['enum']))}")
    if is_number and not of.get("minimum", 0) <= value < 1e30:
        raise Error(f"{path}: {where} is {value}: {of.get('minimum', 0)} or larger is expected")
    if kind == "object":
        assert isinstance(value, dict)
        for key in of.get("required", ()):
            if key not in value:
                raise Error(f"{path}: {where} has no {key}")
        for key, inner in value.items():
            if key in of.get("properties", {}):
                _check(path, inner, of["properties"][key], f"{where}.{key}")
            elif not of.get("additionalProperties", True):
                raise Error(f"{path}: {where} has {key}, which is unknown")
    if kind == "array":
        assert isinstance(value, list)
        if len(value) < of.get("minItems", 0):
            raise Error(f"{path}: {where} is empty")
        for i, inner in enumerate(value):
            _check(path, inner, of["items"], f"{where}[{i}]")


def read(path: str) -> dict:
    return read_json(path, schema(), "the profile")


def read_json(path: str, of: dict, what: str) -> dict:
    """A file, called `what`, that is as the schema `of` says."""
    try:
        with open(path) as file:
            found = json.load(file)
    except OSError as error:
        raise Error(f"{path}: {error.strerror}") from None
    except ValueError as error:
        raise Error(f"{path} is no JSON: {error}") from None
    _check(path, found, of, what)
    return found


def regions_of(profile: dict) -> list[dict]:
    """What _plan takes."""
    return [{key: value for key, value in region.items() if key != "name"} for region in profile["regions"]]
