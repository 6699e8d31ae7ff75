"""What `top` shows: the text and styles of every line, for a frame, a view and a size. Nothing here knows a terminal.

A frame is what _trace.top_frame gives (tools/memtrace/frame.h). A line is a list of (style, text).
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

Frame = dict[str, Any]
Line = list[tuple[str, str]]

MIN_WIDTH, MIN_HEIGHT = 72, 12
KINDS = {
    "evict": "evicted",
    "pressure": "memory short",
    "oom": "out of memory",
    "native_allocator": "given to PyTorch's allocator",
    "fail": "failed",
    "sleep": "put to sleep",
    "wake": "woken up",
    "spill_write": "not written to FCDP_SPILL_DIR",
    "spill_read": "not read from FCDP_SPILL_DIR",
    "cache_write": "not written to FCDP_CACHE_DIR",
    "cache_read": "not read from FCDP_CACHE_DIR",
}
OF_DISKS = ("spill_write", "spill_read", "cache_write", "cache_read")
QUIET = ("evict", "pressure", "native_allocator", "sleep", "wake")  # nothing is wrong
# What a strip's letters stand for, with the style of each.
TIERS = {"#": "both", "D": "device", "H": "host", "M": "mapped", "F": "file", ".": "nowhere"}
LINKS = (("inter", "INTER/s"), ("node", "NODE/s"), ("to_host", "D2H/s"), ("to_device", "H2D/s"))
SORTS: dict[str, Callable[[dict], Any]] = {
    "order": lambda row: 0,  # as the model has them
    "name": lambda row: natural(row["name"]),
    "size": lambda row: -row["bytes"],
    "device": lambda row: -row["device_bytes"],
    "traffic": lambda row: -sum(row["per_s"].values()),
    "evictions": lambda row: -row["evictions"],
}
FILTERS: dict[str, Callable[[dict], Any]] = {
    "all": lambda row: True,
    "device": lambda row: row["device_bytes"],
    "host": lambda row: row["host_bytes"] and not row["device_bytes"],
    "nowhere": lambda row: not row["device_bytes"] + row["host_bytes"] + row["file_bytes"],
    "moving": lambda row: row["moving"] or sum(row["per_s"].values()),
    "evicted": lambda row: row["evictions"],
    "file": lambda row: row["file_bytes"],
}
HELP = """\
 WHERE is a strip of the region's bytes, of all ranks that are shown:
   D on the device   H on the host   # on both   F in a file   . nowhere
   M on the host, which is mapped at the region's addresses (FCDP_HOST_MAP)
 * in use   k kept on the device between uses   ~ moving   b left to FSDP2
 INTER, NODE: bytes sent between nodes and within the node, per second; the
   line above the table counts FSDP2's own collectives (gradients) as well.
 D2H, H2D: copied to the host and to the device. EV: times it was evicted.

 up down PgUp PgDn Home   choose a region        q        quit
 s S    next order, and the other way round      f        next filter
 /      search a module's name; n N next, previous; Esc ends the search
 r R    next, previous rank     a  all ranks     j        next job
 space  pause, go on            left right       a moment back, forward
 [ ]    10 seconds back, forward                 l        live again
 p      what was resident when most device memory was held
 Other users' jobs cannot be looked at. FCDP_TRACE=0 switches a job's off."""


def natural(name: str) -> list[tuple[int, Any]]:
    """layers.2 before layers.10."""
    return [(0, int(part)) if part.isdigit() else (1, part) for part in name.split(".")]


def human(value: float) -> str:
    """A decimal size, as in FCDP's own messages; at most 5 columns and a unit."""
    for unit in ("", "K", "M", "G", "T"):
        if value < 999.5:
            return f"{value:.3g}{unit}" if unit else f"{value:.0f}"
        value /= 1000
    return f"{value:.3g}P"


def bytes_text(value: float) -> str:
    text = human(value)
    return f"{text[:-1]} {text[-1]}B" if text[-1].isalpha() else f"{text} B"


def milliseconds(value: float) -> str:
    return f"{value:.1f}" if value < 100 else f"{value:.0f}"


@dataclass
class View:
    """What the user has chosen."""

    sort: str = "order"
    reverse: bool = False
    filter: str = "all"
    search: str = ""
    typing: bool = False  # the search
    selected: str = ""  # a region's name
    first: int = 0  # the row at the top
    rank_pid: int = 0  # 0: all
    at_ns: int | None = None  # None: live
    at_peak: bool = False
    help: bool = False
    message: str = ""

    def rows(self, frame: Frame) -> list[dict]:
        rows = [row for row in frame["regions"] if FILTERS[self.filter](row)]
        rows.sort(key=SORTS[self.sort])
        return rows[::-1] if self.reverse else rows

    def matches(self, row: dict) -> bool:
        return bool(self.search) and self.search.lower() in row["name"].lower()


def who(rank: dict) -> str:
    """A process without FSDP2 has no rank."""
    return f"rank {rank['rank']}" if rank["rank"] >= 0 else f"pid {rank['pid']}"


def shown_ranks(frame: Frame, view: View) -> list[dict]:
    return [rank for rank in frame["ranks"] if view.rank_pid in (0, rank["pid"])]


# --- the lines at the top -------------------------------------------------------------------------------------------


# Of milliseconds waited: what for.
WAITS = {
    "stall": "regions",
    "host_computes": "regions",
    "memory": "device memory",
    "end": "the job's end",
    "fingerprint_wait": "fingerprints",
}


def saved_line(frame: Frame) -> Line:
    """The one line that a user needs: what FCDP saves, and what it costs."""
    plain, sent = frame["plain_bytes"], frame["gather_bytes"]
    if plain:
        line = [
            ("good", f" {bytes_text(plain - sent)} saved"),
            ("plain", f" between nodes ({1 - sent / plain:.0%}); "),
        ]
    else:
        line = [("plain", " nothing gathered between nodes yet; ")]
    worst = frame["ranks"][frame["worst"]]
    if not worst["waited_ms"]:
        return [*line, ("plain", "no waits")]
    cause = max(worst["waits_ms"], key=worst["waits_ms"].get)
    per = "ms/step" if worst["waited_steps"] else "ms"
    line += [("warn", f"waited {milliseconds(worst['waited_ms'])} {per}")]
    return [*line, ("plain", f" for {WAITS.get(cause, cause)} ({who(worst)})")]


def fate(frame: Frame) -> tuple[str, str]:
    n, killed = len(frame["ranks"]), frame["killed"]
    if frame["running"]:
        return ("bad", f"{killed} of {n} ranks KILLED") if killed else ("good", "running")
    return ("bad", "KILLED, this is its last state") if killed else ("warn", "ENDED, this is its last state")


def job_line(frame: Frame) -> Line:
    ranks = frame["ranks"]
    first = ranks[0]
    known = first["world_size"]
    of = f"{len(ranks)} of {known} ranks" if known else f"{len(ranks)} process{'es' * (len(ranks) > 1)}"
    nodes = f", {first['n_nodes']} nodes" if first["n_nodes"] > 1 else ""
    step_ms = max(rank["step_ms"] for rank in ranks)
    steps = f", {milliseconds(step_ms)} ms each" if step_ms else ""
    others = f"[job {frame['job'] + 1}/{frame['jobs']}] " if frame["jobs"] > 1 else ""
    style, text = fate(frame)
    return [
        ("plain", " " + others),
        ("bold", short_command(first["command"])),
        ("plain", " "),
        (style, text),
        ("plain", f"; {of}{nodes}, step {max(rank['step'] for rank in ranks)}{steps}"),
    ]


def short_command(command: str) -> str:
    """The script's name and as many of its arguments as fit, without its folder and the interpreter."""
    words = command.split()
    if words and words[0].rsplit("/", 1)[-1].startswith("python"):
        words.pop(0)
        while words and words[0].startswith("-") and words[0] != "-m":
            words.pop(0)
        words = words[words[:1] == ["-m"] :]
    if words:
        words[0] = words[0].rsplit("/", 1)[-1]
    text = " ".join(words) or "a job"
    return text if len(text) <= 20 else text[:17] + "..."


def counter(rank: dict, name: str) -> int:
    return rank["counters"].get(name, 0)


def budget_line(frame: Frame, view: View, width: int) -> Line:
    """The memory line of the rank with the fullest budget, since that rank will evict first."""
    rank = frame["ranks"][frame["fullest"]]
    budget, held = counter(rank, "device.budget_bytes"), rank["held_bytes"]
    whose = f" {who(rank)}" if view.rank_pid == 0 and len(frame["ranks"]) > 1 else ""
    line = [("plain", f" device{whose} ")]
    parts = [("tensors", "tensors_bytes"), ("gathered", "gathered_bytes")]
    texts = "  ".join(f"{name} {bytes_text(rank[key])}" for name, key in parts if rank[key])
    if not budget:
        return [*line, ("plain", f"{bytes_text(held)} held; {texts or 'nothing held'}; its budget is not known yet")]
    share = held / budget
    style = "bad" if share > 0.95 else "warn" if share > 0.8 else "plain"
    n = max(10, min(40, width - 68))
    line += [("plain", "["), (style, bar(share, n)), ("plain", "] ")]
    return [*line, (style, f"{share:.0%}"), ("plain", f" of {bytes_text(budget)}  {texts}")]


def bar(share: float, n: int) -> str:
    full = min(n, round(share * n))
    return "|" * full + " " * (n - full)


def device_line(frame: Frame, view: View) -> Line:
    """The whole GPU, as far as the trace knows it."""
    rank = frame["ranks"][frame["fullest"]]
    total, others = counter(rank, "device.total_bytes"), counter(rank, "device.others_bytes")
    sums = {
        name: sum(counter(r, name) for r in shown_ranks(frame, view)) for name in ("device.pressures", "device.ooms")
    }
    short = f" short of memory {sums['device.pressures']} times"
    if sums["device.ooms"]:
        short += f", in vain {sums['device.ooms']}"
    line = [("plain", f" {rank['device'] or 'GPU'}")]
    if not total:
        line += [("plain", ": others' share unknown;")]
    else:
        line += [("plain", f" {bytes_text(total)}: others and NCCL {bytes_text(others)} ({others / total:.0%});")]
    return [*line, ("warn" if sums["device.pressures"] else "plain", short)]


def links_line(frame: Frame, view: View) -> Line:
    if view.at_peak:
        whose = "that rank" if view.rank_pid or len(frame["ranks"]) == 1 else "each rank, by itself,"
        return [("warn", f" The moment in which {whose} held the most device memory. Rates have none.")]
    names = {"inter": "inter-node", "node": "in node", "to_host": "to host", "to_device": "to device"}
    texts = [f"{names[link]} {bytes_text(frame['per_s'][link])}/s" for link, _ in LINKS]
    return [("plain", " " + "  ".join(texts))]


# --- the table ------------------------------------------------------------------------------------------------------


def strip(row: dict, n: int) -> Line:
    """n columns of where the bytes are. A copy on the host is taken to be of what the device has as well: that is what a
    store leaves."""
    size = row["bytes"] or 1
    device, host, file = (min(1.0, row[f"{tier}_bytes"] / size) for tier in ("device", "host", "file"))
    alone = "M" if row["mapped"] else "H"
    shares = {"#": min(device, host), "D": device - min(device, host), alone: host - min(device, host)}
    shares["F"] = max(0.0, min(file, 1 - max(device, host)))
    out, done, at = [], 0.0, 0
    for letter, share in shares.items():
        done += share
        end = min(n, max(at + (share > 0), round(done * n)))
        if end > at:
            out.append((TIERS[letter], letter * (end - at)))
            at = end
    return [*out, (TIERS["."], "." * (n - at))] if at < n else out


def columns(width: int) -> tuple[int, int]:
    """Of the name and of the strip; the rest is fixed."""
    spare = width - 46
    name = max(16, min(48, spare * 6 // 10))
    return name, max(8, min(64, spare - name))


def heading(width: int) -> Line:
    name, n = columns(width)
    text = f"   {'REGION':<{name}} {'WHERE':<{n}} {'SIZE':>5}"
    for _, title in LINKS:
        text += f" {title:>7}"
    return [("head", f"{text} {'EV':>3}".ljust(width))]


def flag(row: dict) -> str:
    return "b" if row["bypassed"] else "*" if row["in_use"] else "~" if row["moving"] else "k" if row["kept"] else " "


def cut_name(name: str, room: int) -> str:
    """The end tells modules apart."""
    return name if len(name) <= room else "~" + name[len(name) - room + 1 :]


def region_line(row: dict, view: View, width: int) -> Line:
    name, n = columns(width)
    chosen = row["name"] == view.selected
    style = "selected" if chosen else "match" if view.matches(row) else "plain"
    line = [(style, f"{'>' if chosen else ' '}{flag(row)} {cut_name(row['name'], name):<{name}} "), *strip(row, n)]
    rest = f" {human(row['bytes']):>5}"
    for link, _ in LINKS:
        rest += f" {human(row['per_s'][link]) if row['per_s'][link] else '-':>7}"
    return [*line, ("plain", f"{rest} {row['evictions'] or '-':>3}")]


def scroll(view: View, rows: list[dict], room: int) -> None:
    """The chosen row stays in sight."""
    names = [row["name"] for row in rows]
    if rows and view.selected not in names:
        view.selected = names[min(view.first, len(names) - 1)]
    at = names.index(view.selected) if rows else 0
    view.first = max(0, min(view.first, at, len(rows) - room), at - room + 1)


# --- the lines at the bottom ----------------------------------------------------------------------------------------


def grouped(notes: list[dict]) -> list[tuple[dict, set[int]]]:
    """Joins the notes of several ranks on the same event within a second into one, with those ranks."""
    groups: list[tuple[dict, set[int]]] = []
    for note in notes:
        for first, ranks in groups:
            same = all(first[key] == note[key] for key in ("kind", "cause", "region", "bytes"))
            if same and note["ago_s"] - first["ago_s"] < 1 and note["rank"] not in ranks:
                ranks.add(note["rank"])
                break
        else:
            groups.append((note, {note["rank"]}))
    return groups


def note_line(note: dict, ranks: set[int]) -> Line:
    what = KINDS.get(note["kind"], note["kind"])
    whose = f" {len(ranks)} ranks" if len(ranks) > 1 else f" rank {note['rank']}" if note["rank"] >= 0 else ""
    text = f" {ago(note['ago_s'])}{whose} {what}"
    if note["region"]:
        text += f" {note['region']}"
    if note["bytes"] and note["kind"] not in OF_DISKS:  # the line is long, and the table has the size
        text += f" {bytes_text(note['bytes'])}"
    if note["kind"] == "evict":
        text += f": {(note['cause'] or 'unknown').replace('_', ' ')}" + (
            ", written to the host first" if note["b"] else ""
        )
    elif note["kind"] in ("pressure", "oom"):
        text += f": {bytes_text(note['a'])} of {bytes_text(note['b'])} are held"
    elif note["kind"] in ("sleep", "wake"):
        text += f", {bytes_text(note['b'])} copied"
    elif note["kind"] in OF_DISKS[:2]:
        text += f": {os.strerror(int(note['a']))}" if note["a"] != errno.EBADMSG else ": it is not what was written"
    return [("plain" if note["kind"] in QUIET else "warn", text)]


def ago(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:5.1f} s ago"
    return f"{seconds / 60:3.0f} min ago"


def time_text(frame: Frame, view: View) -> tuple[str, str]:
    if view.at_peak:
        return "warn", f"AT THE PEAK, {ago((frame['now_ns'] - frame['at_ns']) / 1e9).strip()}"
    if view.at_ns is not None:
        back = ago((frame["now_ns"] - frame["at_ns"]) / 1e9).strip()
        return "warn", f"PAUSED, {back} (history {(frame['now_ns'] - frame['oldest_ns']) / 1e9:.0f} s)"
    return "good", "live"


def status_line(frame: Frame | None, view: View, width: int) -> Line:
    if view.typing:
        return [("bold", f" search: {view.search}_   (Enter keeps, Esc ends)"[:width])]
    if frame is None:
        return [("head", " q quit  ? help".ljust(width))]
    rank = next((r for r in frame["ranks"] if r["pid"] == view.rank_pid), None)
    ranks = f"{who(rank)} (pid {rank['pid']})" if rank else "all ranks"
    chosen = f"  order: {view.sort}{' reversed' * view.reverse}  filter: {view.filter}"
    if view.search:
        chosen += f"  /{view.search}"
    style, when = time_text(frame, view)
    text = view.message or f"{ranks}{chosen}"
    room = max(0, width - len(when) - len("  ? help ") - 2)
    return [("plain", f" {text[:room]:<{room}} "), (style, when), ("plain", "  ? help")]


def lost_line(frame: Frame) -> Line | None:
    if not frame["events_lost"] + frame["events_dropped"]:
        return None
    parts = []
    if frame["events_lost"]:
        parts.append(
            f"{frame['events_lost']} events were overwritten before they were read (FCDP_TRACE_BUFFER: more room)"
        )
    if frame["events_dropped"]:
        parts.append(f"{frame['events_dropped']} were dropped by the job")
    return [("warn", " " + "; ".join(parts))]


# --- the whole ------------------------------------------------------------------------------------------------------


def nothing_here(scan: tuple[int, int], pid: int, height: int) -> list[Line]:
    n, refused = scan
    what = "No job with FCDP is running here."
    if pid:
        what = (
            f"Process {pid} runs, and no job with FCDP in it yet."
            if n
            else f"Process {pid} is gone, and no job was in it."
        )
    lines = [
        "",
        what,
        "",
        "One appears by itself once a process runs under FCDP=1 and has its first",
        "FSDP2 module (not with FCDP_TRACE=0).",
        "",
        f"{n} processes were looked at" + (f"; {refused} of other users cannot be." if refused else "."),
    ]
    return [[("bold" if i == 1 else "plain", "  " + text)] for i, text in enumerate(lines)][: height - 1]


def too_small(width: int, height: int) -> list[Line]:
    return [
        [("plain", f"{width} x {height} is too small"[:width])],
        [("plain", f"at least {MIN_WIDTH} x {MIN_HEIGHT}"[:width])],
    ]


def render(frame: Frame | None, view: View, width: int, height: int, scan=(0, 0), pid: int = 0) -> list[Line]:
    """At most `height` lines, of at most `width` columns each. `scan` and `pid` are for the case that there is no job: how
    many processes were looked at, and refused, and the one that it was to be in."""
    if width < MIN_WIDTH or height < MIN_HEIGHT:
        return [clip(line, width) for line in too_small(width, height)[:height]]
    if view.help:
        lines: list[Line] = [[("plain", text)] for text in HELP.splitlines()[: height - 1]]
    elif frame is None:
        lines = nothing_here(scan, pid, height)
    else:
        lines = job_screen(frame, view, width, height)
    lines += [[] for _ in range(height - 1 - len(lines))]
    return [clip(line, width) for line in [*lines, status_line(frame, view, width)]]


def job_screen(frame: Frame, view: View, width: int, height: int) -> list[Line]:
    top = [
        saved_line(frame),
        job_line(frame),
        budget_line(frame, view, width),
        device_line(frame, view),
        links_line(frame, view),
    ]
    top.append(heading(width))
    lost = lost_line(frame)
    rows = view.rows(frame)
    spare = height - 1 - len(top) - len(rows) - bool(lost)
    notes = grouped(frame["notes"])[: max(2, (height - 12) // 5, spare - 1)]
    bottom = [note_line(*note) for note in notes] + ([lost] if lost else [])
    room = height - 1 - len(top) - len(bottom)
    scroll(view, rows, room)
    table = [region_line(row, view, width) for row in rows[view.first : view.first + room]]
    if not rows:
        what = "no region passes this filter (f: next)" if frame["regions"] else "no regions yet"
        table = [[("plain", f"  {what}")]]
    table += [[] for _ in range(room - len(table))]
    return [*top, *table, *bottom]


def clip(line: Iterable[tuple[str, str]], width: int) -> Line:
    out, room = [], width
    for style, text in line:
        if room > 0 and text:
            out.append((style, text[:room]))
            room -= len(text)
    return out
