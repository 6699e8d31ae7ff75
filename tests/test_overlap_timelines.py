"""tools/bench/overlap/timelines.py: which step it takes, and that it draws every stream."""

import json
import pathlib
import re
import subprocess
import sys

import pytest

pytest.importorskip("matplotlib")
TOOL = pathlib.Path(__file__).resolve().parents[1] / "tools" / "bench" / "overlap" / "timelines.py"
STREAMS = ["compute", "inter 0", "inter 1", "node", "d2h", "h2d", "reduce-scatter"]


def timeline(path, durations_ms):
    """One step after another, of these durations: each is a forward on every stream, a kernel of FCDP's behind one of
    them, and an optimizer of 1 ms at its end."""
    events = [
        {"name": "thread_name", "ph": "M", "pid": 1, "tid": i, "args": {"name": name}} for i, name in enumerate(STREAMS)
    ]

    def operation(stream, name, begin_us, duration_us):
        args = {"bytes": 1, "ready_us": begin_us, "modelled_us": duration_us}
        events.append(
            {
                "name": name,
                "cat": "kernel",
                "ph": "X",
                "ts": begin_us,
                "dur": duration_us,
                "pid": 1,
                "tid": stream,
                "args": args,
            }
        )

    now = 5e9
    for duration in durations_ms:
        for stream in range(len(STREAMS)):
            operation(stream, "forward 3", now, 2000)
        operation(1, "fcdp_delta_encode", now + 2000, 5)
        now += duration * 1e3
        operation(0, "optimizer", now - 1000, 1000)
    events.append(
        {
            "name": "forward 3",
            "cat": "wait for event",
            "ph": "X",
            "ts": 0,
            "dur": 1,
            "pid": 1,
            "tid": 0,
            "args": {"bytes": 0},
        }
    )
    path.write_text(json.dumps(events))


def draw(tmp_path, durations_ms):
    timeline(tmp_path / "in.json", durations_ms)
    return subprocess.run(
        [sys.executable, TOOL, tmp_path / "out.svg", "one step", tmp_path / "in.json"], capture_output=True, text=True
    )


def test_the_median_step_is_drawn_with_every_stream(tmp_path):
    done = draw(tmp_path, [900] * 5 + [70, 50, 500])  # of the last three 70 is the median
    assert done.returncode == 0, done.stderr
    svg = (tmp_path / "out.svg").read_text()
    for name in (
        "one step",
        "compute",
        "between nodes 0",
        "between nodes 1",
        "within the node",
        "to the host",
        "from the host",
        "reduce-scatter",
    ):
        assert f">{name}<" in svg
    ticks = [int(n) for n in re.findall(r">(\d+)</text>", svg)]
    assert 60 <= max(ticks) <= 70
    assert len(re.findall(r'id="FillBetweenPolyCollection|id="PolyCollection', svg)) == len(STREAMS)


def test_too_few_steps_are_refused(tmp_path):
    done = draw(tmp_path, [10] * 5)
    assert done.returncode == 1
    assert "5 optimizer steps in the timeline: more than 5 are needed" in done.stderr
