"""Linear layers in parts (fcdp.split): which layers of a profile can be split, and what a job with a plan adds for that."""

from __future__ import annotations

import re

from fcdp_plan import _plan

BLOCK = 64  # rows, as fcdp.splitting has it
# Of a layer: the names of Llama's modules in transformers, which those of most gated decoders are, and names of one's own.
GATED = {
    **{name: f"model.layers.{{}}.self_attn.{name}_proj" for name in "qkvo"},
    **{name: f"model.layers.{{}}.mlp.{name}_proj" for name in ("gate", "up", "down")},
    "head": "lm_head",
}
PLAIN = {name: f"layers.{{}}.{name}" for name in ("q", "k", "v", "o", "up", "down")} | {"head": "head"}


# ---- in a profile ----


def of_shape(shape: dict, regions: list[dict], batch: float, number_bytes: float) -> list[list[dict]]:
    """Of each region of a described decoder, its linear layers. The embedding is none, nor is a head that is tied to it."""
    tokens, h, f = batch * shape["sequence"], shape["hidden"], shape["intermediate"]
    q, kv = (shape[key] * shape["head_size"] for key in ("heads", "kv_heads"))
    of_layer = {"q": (q, h), "k": (kv, h), "v": (kv, h), "o": (h, q)}
    of_layer |= {"gate": (f, h)} if shape["gated"] else {}
    of_layer |= {"up": (f, h), "down": (h, f)}
    names = GATED if shape["gated"] else PLAIN

    def linear(name: str, rows: float, columns: float, region: dict, bias: bool, again: bool) -> dict:
        parameters = rows * columns + (rows if bias else 0)
        return {
            "name": name,
            "rows": round(rows),
            "columns": round(columns),
            "trainable": 0 if shape["lora_rank"] else parameters,
            "frozen": parameters if shape["lora_rank"] else 0,
            "share": 2 * rows * columns * tokens / region["forward_flops"],
            "input_bytes": columns * tokens * number_bytes,
            "output_bytes": rows * tokens * number_bytes,
            **({"extra_gathers": 1} if again else {}),
        }

    found: list[list[dict]] = [[]]
    for i, region in enumerate(regions[1:-1]):
        biases, again = bool(shape["biases"]), bool(shape["recompute"])
        found.append([linear(names[n].format(i), *size, region, biases, again) for n, size in of_layer.items()])
    found.append([] if shape["tied"] else [linear(names["head"], shape["vocab"], h, regions[-1], False, False)])
    return found


def measured(group: dict, linears: list[dict]) -> list[dict]:
    """The linear layers of a group that fcdp-plan profile has measured, for its region. They compute as large a share as
    their parameters are. Small ones are left out, as adapters: they would be gathered one by one for next to nothing."""
    everything = group["trainable"] + group["frozen"]
    sizes = [one["trainable"] + one["frozen"] for one in linears]
    large = [(one, n) for one, n in zip(linears, sizes) if n >= max(sizes) / 16 and one["rows"] >= 2 * BLOCK]
    return [one | {"share": n / everything} for one, n in large]


def regions_of(job: dict) -> list[dict]:
    """What _plan takes, but for their linear layers."""
    others = ("name", "linears")
    return [{key: value for key, value in region.items() if key not in others} for region in job["regions"]]


def linears_of(job: dict) -> list[list[dict]]:
    """What _plan takes, of each region."""
    return [
        [{key: value for key, value in linear.items() if key not in ("name", "columns")} for linear in own]
        for own in (region.get("linears", []) for region in job["regions"])
    ]


# ---- in a plan ----


def chosen(job: dict, parts: list[int]) -> list[dict]:
    """The layers in parts, for the plan's file."""
    return [
        {"layer": linear["name"], "rows": linear["rows"], "columns": linear["columns"], "parts": n}
        for region, n in zip(job["regions"], parts)
        if n > 1
        for linear in region["linears"]
    ]


def places(rows: int, parts: int) -> list[int]:
    """Where the parts begin, and the last one ends: as fcdp.splitting has them."""
    block = BLOCK if rows >= BLOCK * parts else 1
    return [round(rows * i / parts / block) * block for i in range(parts)] + [rows]


def groups(region: dict, parts: int) -> list[dict]:
    """Names and parameters of the parameter groups that a region is, in parts: what is left of it, and then each part."""
    if parts == 1:
        return [{key: region[key] for key in ("name", "trainable", "frozen")}]
    counts = ("trainable", "frozen")
    left = {key: region[key] - sum(linear[key] for linear in region["linears"]) for key in counts}
    found = [{"name": region["name"]} | left] if sum(left.values()) >= 1 else []
    for linear in region["linears"]:
        ends = places(linear["rows"], parts)
        for k, (begin, end) in enumerate(zip(ends, ends[1:])):
            own = {key: linear[key] * (end - begin) / linear["rows"] for key in counts}
            found.append({"name": f"{linear['name']}.parts.{k}"} | own)
    return found


def _path(name: str) -> str:
    """A module of `model`, in Python."""
    words = name.split(".") if name else []
    if not all(word.isidentifier() or word.isdigit() for word in words):
        return f"model.get_submodule({name!r})"
    return "model" + "".join(f"[{int(word)}]" if word.isdigit() else f".{word}" for word in words)


def _range(numbers: list[int]) -> str:
    begin, end = numbers[0], numbers[-1] + 1
    if numbers != list(range(begin, end)):
        return f"({', '.join(map(str, numbers))})"
    return f"range({begin}, {end})" if begin else f"range({end})"


def lines(splits: list[dict]) -> list[str]:
    """What a training script needs before its fully_shard. Layers that differ in one number are one loop."""
    layers: dict[tuple[int, str, str], list[int]] = {}  # by parts, and names around the first number: the numbers
    out = []
    for split in splits:
        found = re.fullmatch(r"((?:[^.]+\.)*?)(\d+)((?:\.[^.]+)+)", split["layer"])
        if found and " " not in split["layer"]:
            layers.setdefault((split["parts"], found[1], found[3]), []).append(int(found[2]))
        else:
            out.append(f"for part in fcdp.split({_path(split['layer'])}, parts={split['parts']}): fully_shard(part)")
    loops: dict[tuple[int, str, tuple[int, ...]], list[str]] = {}
    for (parts, prefix, suffix), numbers in layers.items():
        loops.setdefault((parts, prefix, tuple(sorted(numbers))), []).append(suffix)
    for (parts, prefix, indices), suffixes in loops.items():
        if len(indices) == 1:
            names = [_path(f"{prefix}{indices[0]}{suffix}") for suffix in suffixes]
            out += [f"for part in fcdp.split({name}, parts={parts}): fully_shard(part)" for name in names]
            continue
        out.append(f"for layer in ({_path(prefix[:-1])}[i] for i in {_range(list(indices))}):")
        inner = [f"layer{_path(suffix[1:]).removeprefix('model')}" for suffix in suffixes]
        out.append(f"    for linear in ({', '.join(inner)},):")
        out.append(f"        for part in fcdp.split(linear, parts={parts}): fully_shard(part)")
    return out


def n_pieces(job: dict, parts: bytes) -> int:
    """At most."""
    return sum(1 + n * len(region.get("linears", [])) for region, n in zip(job["regions"], parts))


def in_pieces(job: dict, parts: list[int], tiers: list[int], ahead: int) -> tuple[list[dict], bytes]:
    """The regions that those of the job become, as _plan takes them, and their tiers."""
    pieces = _plan.split(job["costs"], regions_of(job), linears_of(job), bytes(parts), ahead)
    return [one for own in pieces for one in own], bytes(tier for own, tier in zip(pieces, tiers) for _ in own)
