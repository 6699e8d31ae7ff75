"""sim/gpu/merge_timelines.py: several processes' timelines in one file."""

import json
import pathlib
import subprocess
import sys

TOOL = pathlib.Path(__file__).resolve().parents[2] / "sim" / "gpu" / "merge_timelines.py"


def timeline(pid, *times):
    events = [{"name": "process_name", "ph": "M", "pid": pid, "tid": 0, "args": {"name": f"process {pid}"}}]
    events += [{"name": "gemm", "ph": "X", "ts": ts, "dur": 1.5, "pid": pid, "tid": 1, "args": {}} for ts in times]
    return "[\n" + ",\n".join(json.dumps(e) for e in events) + "\n]\n"


def merged(tmp_path, *arguments):
    out = tmp_path / "out.json"
    subprocess.run([sys.executable, TOOL, out, *arguments], check=True)
    return json.loads(out.read_text())


def test_times_begin_at_zero_and_processes_get_names(tmp_path):
    (tmp_path / "a").write_text(timeline(7, 1000.25, 1010))
    (tmp_path / "b").write_text(timeline(8, 1003))
    events = merged(tmp_path, f"rank 0={tmp_path}/a", tmp_path / "b")
    assert [(e["pid"], e["ts"]) for e in events if e["ph"] == "X"] == [(7, 0), (7, 9.75), (8, 2.75)]
    assert [e["args"]["name"] for e in events if e["ph"] == "M"] == ["rank 0", "process 8"]


def test_a_killed_process_s_timeline_is_taken_as_far_as_it_goes(tmp_path):
    whole = timeline(7, 1, 2, 3)
    for cut in (whole[: -len("\n]\n")], whole[:-20]):
        (tmp_path / "a").write_text(cut)
        events = merged(tmp_path, tmp_path / "a")
        assert [e["ts"] for e in events if e["ph"] == "X"] == [0, 1, 2][: 3 if cut.endswith("}") else 2]


def test_without_inputs_it_says_how(tmp_path):
    done = subprocess.run([sys.executable, TOOL, "out"], capture_output=True, text=True)
    assert done.returncode != 0
    assert "NAME=" in done.stderr
