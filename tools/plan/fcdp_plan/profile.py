"""A job's profile: a JSON file with its regions, and what a parameter costs. And fcdp-plan profile, which measures one."""

from __future__ import annotations

import argparse
import importlib.resources
import json
import os
import shlex
import sys

from fcdp_memtrace.arguments import at_least, within
from fcdp_memtrace.replace import replacing
from fcdp_plan import calibration, modes, shapes, splits
from fcdp_plan.failure import Error

ABOUT = """\
Measure a job, as a profile for compare and search.

fcdp-plan profile [-o FILE] -- SCRIPT [ARGUMENTS] runs the script for some steps on emulated nodes of this machine (as
fcdp-lab does), as plain FSDP2. It measures of each group: parameters, the order of uses, how long it computes, what autograd
saves for backward; of a step, the optimizer and the rest; and on CPUs what the machine's own links and copies take.
--calibrate measures a step of some modes as well, so that compare --on-cpus knows of each what the model does not have.
fcdp-plan profile --trace FILE takes what a trace of a job with FCDP=1 has of this (fcdp-memtrace record).
"""
SCHEMA = "fcdp-plan-profile/2"  # 1 has no calibration
DTYPES = {"bfloat16": 2, "float16": 2, "float32": 4}  # bytes


def schema() -> dict:
    """JSON Schema of the file."""
    return json.loads(importlib.resources.files("fcdp_plan").joinpath("profile.schema.json").read_text())


def make(shape: dict, batch: int, dtype: str) -> dict:
    costs, regions = shapes.describe(shape, batch, dtype)
    names = ["embedding", *(f"layer {i}" for i in range(len(regions) - 2)), "head"]
    linears = splits.of_shape(shape, regions, batch, costs["parameter_bytes"])
    return {
        "schema": SCHEMA,
        "shape": shape,
        "batch": batch,
        "dtype": dtype,
        "costs": costs,
        "regions": [
            {"name": name} | region | ({"linears": own} if own else {})
            for name, region, own in zip(names, regions, linears)
        ],
    }


def at_batch(profile: dict, batch: int) -> dict:
    """The same model with another batch per GPU. One without a shape has activations and operations scaled."""
    if profile.get("shape"):
        return make(profile["shape"], batch, profile["dtype"])
    times = batch / profile["batch"]
    scaled = ("forward_flops", "backward_flops", "activation_bytes", "forward_seconds", "backward_seconds")
    regions = [r | {key: r[key] * times for key in scaled if key in r} for r in profile["regions"]]
    for region in regions:
        if "linears" in region:
            moved = ("input_bytes", "output_bytes")
            region["linears"] = [one | {key: one[key] * times for key in moved} for one in region["linears"]]
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
            elif not (others := of.get("additionalProperties", True)):
                raise Error(f"{path}: {where} has {key}, which is unknown")
            elif isinstance(others, dict):
                _check(path, inner, others, f"{where}.{key}")
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


# ---- the command ----


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-o", "--output", metavar="FILE", help="default: stdout")
    parser.add_argument("--trace", metavar="TRACE", help="take this trace of a job; nothing is run")
    parser.add_argument("--nodes", type=at_least(1), default=2, metavar="N", help="emulated nodes (default 2)")
    parser.add_argument("--ranks", type=at_least(1), default=2, metavar="G", help="ranks on each of them (default 2)")
    parser.add_argument(
        "--steps",
        type=at_least(5),
        default=12,
        metavar="N",
        help="optimizer steps; the first 3 do not count (default 12)",
    )
    parser.add_argument(
        "--calibrate",
        action="store_true",
        help="on CPUs: run FSDP2, FCDP and FCDP device as well, on links that are not shaped",
    )
    parser.add_argument(
        "--mode",
        type=mode_and_arguments,
        action="append",
        default=[],
        metavar="'MODE: ARGUMENTS'",
        help="calibrate another mode too, by what the script takes for it: 'FSDP2 hpZ: --reshard-after-forward 2'",
    )
    parser.add_argument(
        "--timeout", type=within(1, float("inf"), "seconds"), default=600.0, metavar="S", help="default 600"
    )
    parser.add_argument(
        "--batch",
        type=at_least(1),
        default=1,
        metavar="N",
        help="sequences on each rank, as the script has it (default 1)",
    )
    parser.add_argument(
        "--dtype",
        choices=DTYPES,
        default="bfloat16",
        help="of a trace's gathers, which it does not say (default bfloat16)",
    )
    parser.add_argument("job", nargs="*", metavar="-- SCRIPT [ARGUMENTS]", help="what Python is to run")


def mode_and_arguments(text: str) -> tuple[str, tuple[str, ...]]:
    name, colon, rest = text.partition(":")
    known = [mode for mode in modes.MODES if mode != "FCDP file"]  # which needs a folder
    if not colon or name not in known:
        raise argparse.ArgumentTypeError(f"write 'MODE: ARGUMENTS', with a mode of {', '.join(known)}")
    return name, tuple(shlex.split(rest))


def _to_calibrate(args: argparse.Namespace) -> dict[str, tuple[str, ...]]:
    """Modes, and what the script takes for them."""
    if not args.calibrate and not args.mode:
        return {}
    if args.nodes < 2:
        raise Error("--calibrate and --mode run modes that differ between nodes: 2 nodes or more are needed")
    return dict.fromkeys(calibration.WITHOUT_ARGUMENTS, ()) | dict(args.mode)


def run(args: argparse.Namespace) -> int:
    from fcdp_plan import measure, traces

    if bool(args.trace) == bool(args.job):
        raise Error("give a script behind --, or --trace FILE")
    if args.trace:
        made = traces.profile_of(args.trace, DTYPES[args.dtype], args.dtype, args.batch)
    else:
        if not args.job[0].startswith("-") and not os.path.isfile(args.job[0]):
            raise Error(f"no such script: {args.job[0]}")
        to_calibrate = _to_calibrate(args)
        reports, links, calibrated = measure.run(
            args.job, args.nodes, args.ranks, args.steps, args.timeout, to_calibrate
        )
        made = measure.profile_of(reports, links, args.ranks, args.batch)
        if calibrated:
            made["calibration"] = calibrated
        elif to_calibrate:
            made["notes"].append("jobs on CPUs alone are calibrated: no mode was")
    made = {"schema": SCHEMA} | made
    for note in made["notes"]:
        print(f"fcdp-plan profile: {note}", file=sys.stderr)
    text = json.dumps(made, indent=1) + "\n"
    if not args.output:
        print(text, end="")
        return 0
    with replacing(args.output, *([args.trace] if args.trace else [])) as part, open(part, "w") as file:
        file.write(text)
    return 0
