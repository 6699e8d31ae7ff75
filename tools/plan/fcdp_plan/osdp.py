"""OSDP's Figure 5: each operator is sharded as FSDP does (ZDP) or replicated (DP), within the memory of a GPU.

One node of eight GPUs on PCIe 3.0, nothing hidden behind compute: ZDP gathers an operator in forward and backward and
reduces its gradients, three times its bytes; DP all-reduces them, twice. Where layers are recomputed, ZDP gathers once
more. A replicated operator takes all of its 16 bytes per parameter."""

from __future__ import annotations

from fcdp_plan import _plan, shapes

GPUS, RATE, FLOPS = 8, 6e9, 30e12  # half of PCIe 3.0 x16, whose switches GPUs share; a GPU of that time in float32
STATE, PARAMETER = 16, 4
VOCAB, TOKENS = 50257, 512
NARROW = [(layers, 1024) for layers in (48, 72, 96)]
WIDE = [(2, hidden) for hidden in (8192, 10240, 12288)]
MIXED = [(24, 1536), (16, 2048), (8, 4096)]
LIMITS = (8e9, 16e9)
MOST = 24  # sequences per GPU
SLICES = 16  # of an operator, at most


def seconds_of(parameters: float, batch: int, times: float) -> float:
    """An operator's compute of a step, and its collectives of `times` its bytes."""
    return 6 * parameters * TOKENS * batch / FLOPS + times * parameters * PARAMETER * (GPUS - 1) / GPUS / RATE


def best(layers: int, hidden: int, limit: float, recompute: bool, slices: int = 1) -> float | None:
    """FSDP's time per sample over OSDP's, each at its best batch; None: nothing fits. `slices`: parts in which an
    operator is gathered, used and dropped."""
    operators = [4 * hidden * hidden, 8 * hidden * hidden] * layers  # attention, MLP
    shape = shapes.gpt(layers, hidden, max(1, hidden // 64), VOCAB, sequence=TOKENS, recompute=int(recompute))
    gathers = 4 if recompute else 3
    plain = chosen = 0.0
    for batch in range(1, MOST + 1):
        costs, regions = shapes.describe(shape, batch, "float32")
        fixed = sum(r["activation_bytes"] for r in regions) + costs["other_bytes"] + STATE * sum(operators) / GPUS
        if fixed > limit:
            break
        for parts in {1, slices}:
            room = limit - fixed - 2 * max(operators) * PARAMETER / parts
            if room < 0:
                continue
            if parts == 1:
                plain = max(plain, batch / sum(seconds_of(o, batch, gathers) for o in operators))
            choices = [
                [(seconds_of(o, batch, gathers), 0, 0), (seconds_of(o, batch, 2), STATE * o * (1 - 1 / GPUS), 0)]
                for o in operators
            ]
            _, found = _plan.search(choices, room, 0, 256)
            chosen = max(chosen, batch / found["seconds"])
    return chosen / plain if plain else None


def figure_5() -> list[tuple[str, float, float, str]]:
    """(name, the paper's, the model's, why it may differ)."""

    def all_of(sizes: list, recompute: bool = False, slices: int = 1) -> list[float]:
        found = [best(*size, limit, recompute, slices) for size in sizes for limit in LIMITS]
        return [one for one in found if one]

    def mean(values: list[float]) -> float:
        return sum(values) / len(values)

    best_batch = (
        "shapes, batches and GPU are not described; here FSDP has its best batch, and what leaves memory free at a "
        "smaller one gains up to 1.5, with checkpointing 2"
    )
    rows = []
    for name, sizes, paper in (
        ("narrow and deep", NARROW, (1.172, 1.18, 1.22, 1.23)),
        ("wide and shallow", WIDE, (None, None, 1.50, 1.92)),
        ("mixed widths", MIXED, (1.10, 1.16, 1.24, 1.33)),
    ):
        whole, parts = all_of(sizes), all_of(sizes, slices=SLICES)
        cases = (
            ("average", mean(whole)),
            ("most", max(whole)),
            ("split, average", mean(parts)),
            ("split, most", max(parts)),
        )
        rows += [(f"{name}, {case}", said, model) for said, (case, model) in zip(paper, cases) if said]
    again = all_of(NARROW + WIDE + MIXED, recompute=True, slices=SLICES)
    rows += [("checkpointing, average", 1.529, mean(again)), ("checkpointing, most", 2.083, max(again))]
    return [(*row, best_batch) for row in rows]
