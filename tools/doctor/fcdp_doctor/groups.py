"""A job's FSDP groups as a table or as JSON."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import TypeVar

try:
    from rich.console import Console
    from rich.table import Table
except ImportError:
    Console = None

FILE_COLUMNS = 120
ROOT = "(root)"  # as in a trace, which has a name for every group


@dataclasses.dataclass
class Group:
    """Unknown figures are None. Those of traffic are per step and node, between nodes."""

    name: str  # its module's, or ROOT
    reason: str | None  # why FCDP does not serve it; None: it does
    bytes: int | None = None  # in the dtype that is gathered
    trainable_bytes: int | None = None  # of those
    gathers: float | None = None  # unshards per step
    plain_bytes: float | None = None  # that FSDP's gathers would send
    fcdp_bytes: float | None = None  # that FCDP's do
    in_file: bool = False  # it lives in a file, for want of host memory (FCDP_SPILL_DIR)
    mapped: bool = False  # in host memory alone, which is mapped at its addresses (FCDP_HOST_MAP)
    on_disk: bool = False  # its frozen parameters are on the node's disk too (FCDP_CACHE_DIR)

    def __post_init__(self) -> None:
        self.name = self.name or ROOT  # fcdp.stats() has "" for it


@dataclasses.dataclass
class Document:
    job: str
    nodes: int
    ranks_per_node: int
    steps: int
    measured: str  # what the figures of traffic are of
    groups: list[Group]
    host_bytes: int | None = None  # of FCDP, per node
    notes: list[str] = dataclasses.field(default_factory=list)  # what FCDP itself said

    @property
    def is_served(self) -> bool:
        return bool(self.groups) and all(group.reason is None for group in self.groups)


Entry = TypeVar("Entry")


def alike(entries: Iterable[Entry], key: Callable[[Entry], Hashable]) -> Iterator[tuple[Hashable, Entry]]:
    """Each behind its key and the number of those of that key before it. Groups of one name and size, as of DPO's two
    models, are told apart by their order alone, which is that of their making on every rank and in every step."""
    seen: Counter[Hashable] = Counter()
    for entry in entries:
        yield (key(entry), seen[key(entry)]), entry
        seen[key(entry)] += 1


def sum_known(values: Iterable[float | None]) -> float:
    return sum(value for value in values if value is not None)


def as_json(document: Document, predicted: dict | None = None) -> str:
    fields = {"schema": 1, **dataclasses.asdict(document)}
    fields["groups"] = [{**dataclasses.asdict(group), "served": group.reason is None} for group in document.groups]
    for key in ("bytes", "plain_bytes", "fcdp_bytes"):
        fields[key] = sum_known(getattr(group, key) for group in document.groups)
    if predicted:
        fields["predicted"] = predicted
    return json.dumps(fields, indent=1)


# ---- the table ----

HEAD = ("group", "groups", "served", "MB", "trainable MB", "gathers/step", "FSDP sends MB", "FCDP sends MB")


def natural(text: str) -> list:
    """The sort key: layers.2 comes before layers.10, and the root before both."""
    return [] if text == ROOT else [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", text)]


def _mega(value: float | None) -> str:
    return "-" if value is None else f"{value / 1e6:.3g}" if value < 1e9 else f"{value / 1e6:.0f}"


def _served(group: Group) -> str:
    """With where it is between its uses, unless that is host memory, and the device while there is room."""
    places = (("file", group.in_file), ("mapped", group.mapped), ("disk", group.on_disk))
    return "no" if group.reason is not None else ", ".join(["yes", *(name for name, there in places if there)])


def _cells(group: Group) -> tuple[str, ...]:
    return (
        _served(group),
        _mega(group.bytes),
        _mega(group.trainable_bytes),
        "-" if group.gathers is None else f"{group.gathers:.3g}",
        _mega(group.plain_bytes),
        _mega(group.fcdp_bytes),
    )


def folded(groups: list[Group]) -> Iterator[tuple[str, int, tuple[str, ...]]]:
    """(name, groups, cells) of the rows: adjacent groups whose names differ in a number alone share one, with
    the figures of each."""
    for (_, cells), same in itertools.groupby(
        sorted(groups, key=lambda group: natural(group.name)),
        key=lambda group: (re.sub(r"\d+", "#", group.name), _cells(group)),
    ):
        names = [group.name for group in same]
        yield names[0] if len(names) == 1 else f"{names[0]} ... {names[-1]}", len(names), cells


def unserved(groups: list[Group]) -> dict[str, list[str]]:
    """reason -> the names of those that are left to FSDP for it."""
    found: dict[str, list[str]] = {}
    for group in sorted(groups, key=lambda group: natural(group.name)):
        if group.reason is not None:
            found.setdefault(group.reason, []).append(group.name)
    return found


def human(value: float) -> str:
    for unit in ("B", "KB", "MB", "GB"):
        if value < 1000:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} TB"


def summary(document: Document) -> Iterator[str]:
    groups = document.groups
    served = [group for group in groups if group.reason is None]
    if not groups:
        yield "FCDP has seen no FSDP group: none was gathered."
        return
    whole, of_served = (sum_known(group.bytes for group in some) for some in (groups, served))
    sizes = f", {human(of_served)} of {human(whole)}" if whole else ""
    yield f"FCDP serves {len(served)} of {len(groups)} groups{sizes}."
    for reason, names in unserved(groups).items():
        some = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        yield f"FCDP leaves {some} to FSDP: {reason}."
    plain, sent = (sum_known(getattr(group, key) for group in served) for key in ("plain_bytes", "fcdp_bytes"))
    if plain:
        yield (
            f"Between nodes, a node's gathers of these send {human(sent)} per step instead of {human(plain)} "
            f"({100 * (1 - sent / plain):.0f} % fewer)."
        )
    if document.host_bytes:
        yield f"FCDP takes {human(document.host_bytes)} of host memory per node for that."


def _print_table(rows: list[tuple[str, ...]], caption: str) -> None:
    if Console:
        table = Table(caption=caption, caption_justify="left")
        for column in HEAD:
            is_text = column in ("group", "served")
            table.add_column(column, justify="left" if is_text else "right", overflow="fold")
        for row in rows:
            table.add_row(*row)
        Console(width=None if sys.stdout.isatty() else FILE_COLUMNS, highlight=False, markup=False).print(table)
        return
    widths = [max(len(row[i]) for row in [HEAD, *rows]) for i in range(len(HEAD))]
    for row in [HEAD, *rows]:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip())
    print(caption)


def show(document: Document, in_json: bool, predicted: dict | None = None) -> int:
    """Prints it, and what predict.py says of it; the exit status."""
    if in_json:
        print(as_json(document, predicted))
        return 0 if document.is_served else 1
    topology = f"{document.nodes} nodes x {document.ranks_per_node} ranks" if document.nodes else "topology unknown"
    rows = [(name, str(n), *cells) for name, n, cells in folded(document.groups)]
    if rows:
        _print_table(
            rows,
            f"{topology}; figures are of each group; what is sent is per step and node, between nodes: {document.measured}",
        )
    for line in (*document.notes, *summary(document)):
        print(line)
    if predicted:
        from fcdp_doctor import predict

        print("\n".join(predict.lines(predicted)))
    return 0 if document.is_served else 1
