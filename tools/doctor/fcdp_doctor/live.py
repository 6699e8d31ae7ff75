"""The groups of a running job, from the traces of its processes (fcdp_memtrace)."""

from __future__ import annotations

from collections.abc import Hashable

from fcdp_doctor import Failed
from fcdp_doctor.groups import Document, Group, alike


def look(pid: int) -> Document:
    """The groups of a live job. It does not disturb the job: it maps the segments and reads them."""
    from fcdp_memtrace import _trace

    try:
        processes = _trace.live_groups(pid)
    except _trace.Error as error:
        raise Failed(str(error)) from None
    if not processes:
        raise Failed(f"process {pid} has just ended")
    first = min(processes, key=lambda process: process["rank"])
    steps = max(process["steps"] for process in processes)
    found: dict[Hashable, Group] = {}
    for process in processes:
        for at, entry in alike(process["groups"], lambda entry: (entry["name"], entry["bytes"])):
            group = Group(
                name=entry["name"],
                reason=None if entry["served"] else entry["reason"] or "(why is not known)",
                bytes=entry["bytes"] or None,
                trainable_bytes=entry["trainable_bytes"] if entry["bytes"] else None,
                in_file=entry["in_file"],
                mapped=entry["mapped"],
                on_disk=entry["on_disk"],
            )
            if entry["served"] and steps:
                group.gathers, group.plain_bytes, group.fcdp_bytes = (
                    entry[key] / steps for key in ("uses", "plain_bytes", "gather_bytes")
                )
            found.setdefault(at, group)
    return Document(
        job=first["command"],
        nodes=max(first["nodes"], 0),
        ranks_per_node=max(first["ranks_per_node"], 0),
        steps=steps,
        measured=f"the mean of {steps} steps so far" if steps else "no step was made yet",
        groups=list(found.values()),
    )
