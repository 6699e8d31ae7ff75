"""What fcdp-plan predicts of a script's groups on a cluster: step time by mode, whether it fits, the setting to use."""

from __future__ import annotations

from typing import Any

from fcdp_doctor import Failed
from fcdp_doctor.groups import ROOT, Document, Group, natural

MODES = ("FSDP2", "HSDP", "FCDP", "FCDP device")
PARAMETER_BYTES = 2  # gathers in 16 bits are assumed


def _regions(groups: list[Group], compute_s: float) -> list[dict[str, Any]]:
    """Computing time as operations of a GPU that makes one per second, spread by bytes; a third of it in forward."""
    known = sorted((group for group in groups if group.bytes), key=lambda group: natural(group.name))
    all_bytes = sum(group.bytes or 0 for group in known)
    regions = []
    for group in known:
        trainable = (group.trainable_bytes or 0) / PARAMETER_BYTES
        seconds = compute_s * (group.bytes or 0) / all_bytes
        regions.append(
            {
                "trainable": trainable,
                "frozen": (group.bytes or 0) / PARAMETER_BYTES - trainable,
                "forward_flops": seconds / 3,
                "backward_flops": 2 * seconds / 3,
                "activation_bytes": 0,
                "stays": group.name == ROOT,
            }
        )
    return regions


def cluster_of(name: str, link: str, gpus: int, nodes: int) -> dict[str, float]:
    """What fcdp-plan takes; Failed with the reason if it knows no such cluster or link."""
    from fcdp_plan import clusters
    from fcdp_plan.failure import Error

    try:
        return clusters.numbers(clusters.read(name) | {"link": link, "gpus_per_node": gpus}, nodes) | {"flops": 1.0}
    except Error as error:
        raise Failed(str(error)) from None


def predict(document: Document, numbers: dict[str, float], where: str, compute_s: float) -> dict[str, Any]:
    """On the cluster of `numbers`, which `where` names. Of each mode: seconds, fits, sent_bytes per node,
    device_bytes, host_bytes, setting. `use`: the fastest that fits; None: none does."""
    from fcdp_plan import modes, shapes

    regions = _regions(document.groups, compute_s)
    if not regions:
        raise Failed("--link predicts nothing: no group's size is known")
    costs, found = shapes.costs("float16"), {}
    for name in MODES:
        if modes.is_served(name, numbers):
            step = modes.simulate(name, costs, regions, numbers)
            memory = modes.memory(name, costs, regions, numbers, shapes.CONSTANTS)
            found[name] = {
                "seconds": step["seconds"],
                "fits": memory["fits"],
                "sent_bytes": step["forward_inter"] + step["backward_inter"],
                "device_bytes": memory["total"],
                "host_bytes": memory["host"],
                "setting": modes.SETTINGS[name],
            }
    fit = [name for name, one in found.items() if one["fits"]]
    use = min(fit, key=lambda name: found[name]["seconds"]) if fit else None
    return {
        "where": f"{numbers['n_nodes']:.0f} nodes x {numbers['gpus_per_node']:.0f} GPUs {where}",
        "compute_s": compute_s,
        "modes": found,
        "use": use,
    }


def lines(predicted: dict[str, Any]) -> list[str]:
    from fcdp_memtrace.units import human, ms, table

    rows = []
    for name, one in predicted["modes"].items():
        bytes_of = [human(one[key]) for key in ("sent_bytes", "device_bytes", "host_bytes")]
        rows.append([name, "yes" if one["fits"] else "no", ms(one["seconds"] * 1e9), *bytes_of])
    computed = f"{predicted['compute_s']:g} s of computing" if predicted["compute_s"] else "no computing (--compute)"
    said = [
        f"\nPredicted on {predicted['where']}, with {computed}, AdamW in mixed precision and no activations:",
        table(["mode", "fits", "step", "sent per node", "per GPU", "host per node"], rows, left=2),
    ]
    use = predicted["use"]
    if use:
        seconds = {name: one["seconds"] for name, one in predicted["modes"].items()}
        share = seconds[use] / seconds["FSDP2"] if seconds["FSDP2"] else 1
        said.append(f"Use {predicted['modes'][use]['setting']}: {share:.2f} of FSDP2's step. fcdp-plan says more.")
    else:
        said.append("No mode fits: more nodes, or larger GPUs.")
    return said
