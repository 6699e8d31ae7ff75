"""Draws a report document: step time, bytes sent and device bytes of every mode, side by side."""

import matplotlib
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from fcdp_lab import report

_INK, _MUTED, _GRID = "#1f2430", "#6b7280", "#e5e7eb"
_PLAIN, _ACCENT, _STATE = "#9aa3b2", "#2f6fdb", "#d9dee7"
_COLLECTIVES = (
    ("gather", "gather of stale parameters", "#2f6fdb"),
    ("restore", "restore", "#7c5cd6"),
    ("plain_gather", "gather by plain FSDP2", "#6aa2f5"),
    ("reduce_scatter", "reduce-scatter of gradients", "#e08a2e"),
    ("all_reduce", "all-reduce", "#c2553f"),
    ("agree", "agreement", "#2a9d8f"),
    (None, "not split by collective", _PLAIN),
)
_STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "fcdp-lab",
    "font.family": "sans-serif",
    "font.sans-serif": ["Helvetica Neue", "Helvetica", "Arial", "DejaVu Sans"],
    "font.size": 10,
    "text.color": _INK,
    "axes.labelcolor": _INK,
    "xtick.color": _MUTED,
    "ytick.color": _INK,
}
_HEADERS = 0.01  # of the bytes that a link carries: what a split by payload lacks is no part of the picture
_BAR = 0.62
_ROOM_FOR_LABELS = 1.62


def draw(doc, path, image_format="svg"):
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(12.5, 2.35 + 0.46 * len(doc["modes"])), layout="constrained")
        figure.get_layout_engine().set(w_pad=0.12, wspace=0.02, rect=(0, 0, 1, 0.94))
        time, sent, device = figure.subplots(1, 3, sharey=True)
        _time(time, doc)
        used = _sent(sent, doc)
        _device(device, doc)
        _frame(figure, (time, sent, device), doc)
        _legend(figure, used, any(mode["device_state_bytes"] for mode in doc["modes"]))
        metadata = {"Date": None} if image_format == "svg" else None
        figure.savefig(path, format=image_format, metadata=metadata, dpi=150, facecolor="white")


def _frame(figure, panels, doc):
    net = doc["network"]
    job = " ".join(doc["job"])
    where = f"{net['nodes']} nodes × {net['ranks_per_node']} ranks, links at {net['rate']}"
    figure.suptitle(
        f"{where}   ·   {job if len(job) <= 70 else job[:67] + '...'}",
        x=0.008,
        y=0.985,
        ha="left",
        fontsize=11,
        color=_MUTED,
    )
    names = [mode["name"] for mode in doc["modes"]]
    panels[0].set_yticks(range(len(names)), names, fontsize=11)
    panels[0].invert_yaxis()
    for axes in panels:
        axes.tick_params(length=0)
        axes.spines[["top", "right", "bottom"]].set_visible(False)
        axes.spines["left"].set_color(_MUTED)
        axes.xaxis.grid(True, color=_GRID, linewidth=0.8)
        axes.set_axisbelow(True)
        axes.locator_params(axis="x", nbins=5)


def _title(axes, text):
    axes.set_title(text, loc="left", fontsize=11.5, fontweight="bold", pad=9)


def _colour(mode):
    return _ACCENT if mode["env"].get("FCDP", "0") not in ("", "0") else _PLAIN


def _label(axes, row, value, text, ratio):
    axes.annotate(text, (value, row), (6, 0), textcoords="offset points", va="center", fontsize=10, color=_INK)
    if ratio:
        axes.annotate(
            ratio,
            (value, row),
            (6 + 6.2 * len(text) + 6, 0),
            textcoords="offset points",
            va="center",
            fontsize=9.5,
            color=_MUTED,
        )


def _ratio(values, row):
    if row == 0 or not values[0] or values[row] is None:
        return ""
    return f"{values[row] / values[0]:.2f}×"


def _bars(axes, doc, values, form):
    for row, (mode, value) in enumerate(zip(doc["modes"], values)):
        if value is None:
            _label(axes, row, 0, "not measured", "")
            continue
        axes.barh(row, value, _BAR, color=_colour(mode))
        _label(axes, row, value, form(value), _ratio(values, row))
    axes.set_xlim(0, _ROOM_FOR_LABELS * max((v for v in values if v), default=1))


def _time(axes, doc):
    values = [mode["step_s"] for mode in doc["modes"]]
    _bars(axes, doc, values, lambda v: f"{v:.2f} s" if v >= 0.1 else f"{v * 1e3:.1f} ms")
    _title(axes, "Step time")
    axes.set_xlabel("seconds" + (", on a busy machine" if report.busy(doc) else ""), color=_MUTED)


def _device(axes, doc):
    """The memory that each mode costs: gathered parameters at their peak, then a rank's own state."""
    totals = [_device_total(mode) for mode in doc["modes"]]
    for row, mode in enumerate(doc["modes"]):
        gathered, state = mode["device_gathered_peak_bytes"], mode["device_state_bytes"]
        if gathered is None:
            _label(axes, row, 0, "not measured", "")
            continue
        axes.barh(row, gathered / 1e6, _BAR, color=_colour(mode))
        axes.barh(row, (state or 0) / 1e6, _BAR, left=gathered / 1e6, color=_STATE, edgecolor="white", linewidth=0.8)
        text = f"{gathered / 1e6:.0f} + {(state or 0) / 1e6:.0f} MB"
        _label(axes, row, totals[row] / 1e6, text, _ratio(totals, row))
    axes.set_xlim(0, _ROOM_FOR_LABELS * max((t / 1e6 for t in totals if t), default=1))
    _title(axes, "Device bytes per rank")
    axes.set_xlabel("MB: peak of gathered parameters + state", color=_MUTED)


def _device_total(mode):
    gathered = mode["device_gathered_peak_bytes"]
    return None if gathered is None else gathered + (mode["device_state_bytes"] or 0)


def _sent(axes, doc):
    """Bars of the kernel's bytes; where they are split by collective, a larger rest closes the bar."""
    unit = next((mode["W_bytes"] for mode in doc["modes"] if mode["W_bytes"]), None)
    scale, name = (unit, "W") if unit else (1e6, "MB")
    totals = [mode["sent_bytes_per_step"] for mode in doc["modes"]]
    used = set()
    for row, mode in enumerate(doc["modes"]):
        if totals[row] is None:
            _label(axes, row, 0, "not measured", "")
            continue
        used |= _stack(axes, row, mode["sent_bytes_per_step_by_collective"] or {}, totals[row], scale)
        text = f"{totals[row] / scale:.2f} {name}" if unit else f"{totals[row] / 1e6:.1f} MB"
        _label(axes, row, totals[row] / scale, text, _ratio(totals, row))
    axes.set_xlim(0, _ROOM_FOR_LABELS * max((t / scale for t in totals if t), default=1))
    _title(axes, "Sent per node and step")
    axes.set_xlabel(f"W = {unit / 1e6:.0f} MB, all parameters once" if unit else "MB", color=_MUTED)
    return used


def _stack(axes, row, split, total, scale):
    left, used = 0.0, set()
    for kind, _, colour in _COLLECTIVES:
        n_bytes = max(0.0, total - sum(split.values())) if kind is None else split.get(kind, 0)
        if n_bytes < (_HEADERS if kind is None else 0.002) * total:
            continue
        axes.barh(row, n_bytes / scale, _BAR, left=left, color=colour, edgecolor="white", linewidth=0.8)
        left += n_bytes / scale
        used.add(kind)
    return used


def _legend(figure, used, has_state):
    entries = [Patch(facecolor=colour, label=label) for kind, label, colour in _COLLECTIVES if kind in used]
    if has_state:
        entries.append(Patch(facecolor=_STATE, label="shards, gradients and optimizer state"))
    if len(entries) > 1:
        figure.legend(
            handles=entries,
            loc="outside lower center",
            ncols=len(entries),
            frameon=False,
            fontsize=9.5,
            handlelength=1.0,
            handleheight=1.0,
            labelcolor=_INK,
        )
