"""report, diff, export and plot say what the events say."""

import json
import os
import resource
import xml.etree.ElementTree as tree

import pytest

from traces import GATHERED, KIND, MILLISECOND, STREAM, Process, Script, _trace, a_job, memtrace_run, record

SIZE = 1 << 20
N_USES = 2 * 2 * 2  # ranks, steps, regions


def test_sums(job):
    done = memtrace_run("report", job, "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    total = report["total"]
    assert total["gathers"] == total["restores"] == total["stores"] == total["loads"] == total["made"] == N_USES
    assert total["inter_bytes"] == total["d2h_bytes"] == total["h2d_bytes"] == N_USES * SIZE // 2
    assert total["intra_bytes"] == N_USES * (64 + SIZE // 2)
    assert total["stall_ns"] == N_USES * MILLISECOND and total["host_wait_ns"] == 4 * MILLISECOND // 2
    assert total["moved_ns"] == N_USES * 7 * MILLISECOND
    assert total["exposed_ns"] + total["hidden_ns"] == total["moved_ns"]
    for part in (report["steps"], report["regions"]):
        for key in ("inter_bytes", "h2d_bytes", "moved_ns", "stall_ns"):
            assert sum(row["sums"][key] for row in part) == total[key]
    assert {r["name"]: r["bytes"] for r in report["regions"]} == {"model.layers.0": SIZE, "model.layers.1": SIZE}
    assert report["regions"][0]["causes"] == {"optimizer": 4, "memory_short": 4}


def test_counters_are_those_of_the_job(job):
    report = json.loads(memtrace_run("report", job, "--json").stdout)
    said = a_job(0, 2).said
    for process in report["processes"]:
        assert process["counters"] == said
    assert report["counters"]["collectives.gather.inter_bytes_sent"] == 2 * said["collectives.gather.inter_bytes_sent"]


def test_what_a_node_saved_is_counted_once(tmp_path):
    """Each rank of a node counts what the whole node sent."""
    path = tmp_path / "job.trace"
    record(path, *(a_job(rank, 4) for rank in range(4)))
    said = a_job(0, 4).said
    counters = json.loads(memtrace_run("report", path, "--json").stdout)["counters"]
    assert counters["collectives.gather.inter_bytes_sent"] == 4 * said["collectives.gather.inter_bytes_sent"]
    assert counters["saved.plain_bytes"] == said["saved.plain_bytes"] == 8 * SIZE
    assert counters["saved.gather_bytes"] == said["saved.gather_bytes"] == 2 * SIZE
    assert "would have sent 8.39 MB per node in place of 2.1 MB" in memtrace_run("report", path).stdout


def test_jobs_that_follow_each_other_saved_both(tmp_path):
    path = tmp_path / "jobs.trace"
    record(path, a_job(0, 2), a_job(1, 2), a_job(0, 2, steps=3), a_job(1, 2, steps=3))
    counters = json.loads(memtrace_run("report", path, "--json").stdout)["counters"]
    assert counters["saved.gather_bytes"] == (2 + 3) * 2 * SIZE // 2


def test_the_text(job):
    done = memtrace_run("report", job)
    assert done.returncode == 0 and not done.stderr
    for said in ("rank 0", "rank 1", "model.layers.1", "75 % saved", "exposed", "longest waits", "optimizer 8"):
        assert said in done.stdout, said
    assert max(map(len, done.stdout.splitlines())) <= 140


def test_what_came_from_disks(tmp_path):
    script = Script()
    for name, value in {
        "spill.written_bytes": 3_000_000,
        "spill.read_bytes": 9_000_000,
        "spill.wait_ns": 12 * MILLISECOND,
        "spill.failures": 1,
        "cache.read_bytes": 5_000_000,
        "cache.failures": 2,
    }.items():
        script.counter(name, value)
    script.step(1)
    record(tmp_path / "x.trace", script)
    said = memtrace_run("report", tmp_path / "x.trace").stdout
    assert "3 MB written, 9 MB read, 12.0 ms of waits for it; 1 slice lost and gathered again" in said, said
    assert "FCDP_CACHE_DIR  5 MB of frozen parameters read, 0 B written; 2 slices not written, or damaged" in said, said


def wait(kind="stall", cause=None, before=(), move=None, **fields):
    """The longest wait of a script with a wait that begins at 50 ms and takes 5 ms."""
    script = Script()
    script.object(1, "layer", size=4 * SIZE)
    for event, values in before:
        script.event(event, object=1, **values)
    if move:
        stream = {"gather": "inter 0", "load": "h2d", "restore": "node"}[move[0]]
        script.event(move[0], stream=stream, object=1, **move[1])
    stream = "compute" if kind == "stall" else None
    script.event(kind, cause, stream, object=1, time_ns=50 * MILLISECOND, duration_ns=5 * MILLISECOND, **fields)
    return script


def at(ms, to, **fields):
    return {"time_ns": ms * MILLISECOND, "duration_ns": (to - ms) * MILLISECOND} | fields


@pytest.mark.parametrize(
    ("script", "option"),
    [
        (wait(move=("gather", at(50, 55, bytes=4 * SIZE, a=SIZE))), "FCDP_PREFETCH"),
        (wait(move=("gather", at(20, 55, bytes=4 * SIZE, a=SIZE))), "FCDP_PREFETCH"),
        (wait(move=("gather", at(20, 55, bytes=1000, a=1000))), "FCDP_COALESCE"),
        (wait(move=("gather", at(20, 55, bytes=4 * SIZE, a=SIZE, flags=2))), "FCDP_HOST_BUDGET"),
        (wait(move=("load", at(30, 55, bytes=SIZE))), "FCDP_TAU"),
        (wait(before=[("evict", {"time_ns": MILLISECOND})], move=("load", at(30, 55))), "FCDP_DEVICE_BUDGET"),
        (wait(move=("restore", at(30, 55, bytes=SIZE))), "FCDP_TAU"),
        (wait("host_wait", "memory"), "FCDP_DEVICE_BUDGET"),
        (wait("host_wait", "agreement"), "FCDP_AGREE"),
        (wait("host_wait", "fingerprint_wait"), "FCDP_FINGERPRINT"),
        (wait("host_wait", "host_computes", move=("load", at(30, 55))), "FCDP_TAU"),
        (wait("host_wait", "end"), ""),
        (wait(move=("load", at(1, 2))), ""),
        (wait(move=("load", at(54, 55))), ""),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_option_that_would_shorten_a_wait(tmp_path, script, option):
    record(tmp_path / "x.trace", script)
    report = _trace.report(_trace.file_open(str(tmp_path / "x.trace")))
    (stall,) = report["stalls"]
    assert stall["option"] == option and stall["region"] == "layer" and stall["duration_ns"] == 5 * MILLISECOND


def test_an_advice_is_given_once_per_cause(tmp_path):
    """Three of four waits have one cause: its advice stands above them once, and their sum comes first."""
    script = Script()
    script.object(1, "layer", size=4 * SIZE)
    for i in range(3):
        script.event("gather", stream="inter 0", object=1, **at(50 + 20 * i, 55 + 20 * i, bytes=4 * SIZE, a=SIZE))
        script.event("stall", stream="compute", object=1, **at(50 + 20 * i, 55 + 20 * i))
    script.event("host_wait", "memory", duration_ns=6 * MILLISECOND)
    record(tmp_path / "x.trace", script)
    said = memtrace_run("report", tmp_path / "x.trace").stdout
    assert said.count("FCDP_PREFETCH: a larger one") == 1 and said.count("began only when it was needed") == 1
    assert said.index("15.0 ms in 3 waits") < said.index("6.0 ms in 1 wait: device pages lacked")
    assert said.count("gather of 4.19 MB, 5.0 ms") == 3


def test_the_longest_ten_in_order(tmp_path):
    script = Script()
    for i in [3, 9, 1, 12, 7, 5, 2, 8, 4, 11, 6, 10]:
        script.event("stall", stream="compute", duration_ns=i * MILLISECOND)
    record(tmp_path / "x.trace", script)
    report = _trace.report(_trace.file_open(str(tmp_path / "x.trace")))
    assert [s["duration_ns"] // MILLISECOND for s in report["stalls"]] == list(range(12, 2, -1))


def test_diff(job, tmp_path):
    record(tmp_path / "b.trace", a_job(0, 2, regions=4), a_job(1, 2, regions=4))
    done = memtrace_run("diff", job, tmp_path / "b.trace")
    assert done.returncode == 0 and "2.00" in done.stdout and "model.layers.3" in done.stdout, done.stdout
    difference = json.loads(memtrace_run("diff", job, tmp_path / "b.trace", "--json").stdout)
    assert difference["b"]["inter_bytes"] == 2 * difference["a"]["inter_bytes"] > 0
    same = memtrace_run("diff", job, job).stdout
    assert "model.layers" not in same and "2.00" not in same


def test_diff_divides_by_the_steps_that_it_compares(job, tmp_path):
    """Not by the step that the last optimizer's step begins, nor by those of --skip-steps, whose bytes are not in it."""
    path = tmp_path / "b.trace"
    ranks = [a_job(rank, 2, steps=6) for rank in range(2)]
    for script in ranks:
        gathers = [fields for name, fields in script.lines if name == "event" and fields["kind"] == KIND["gather"]]
        gathers[0]["a"] *= 10
        script.event("pass")
    record(path, *ranks)
    for skip, steps in (1, 5), (4, 2):
        done = memtrace_run("diff", path, path, "--json", "--skip-steps", skip)
        difference = json.loads(done.stdout)
        assert difference["a"]["steps"] == steps
        per_step = [region["a"]["inter_bytes"] for region in difference["regions"]]
        assert per_step == [2 * SIZE // 2] * 2  # of two ranks


def test_diff_leaves_out_steps_that_not_all_processes_recorded(tmp_path):
    path = tmp_path / "b.trace"
    record(path, a_job(0, 2, steps=6), a_job(1, 2, steps=3))
    difference = json.loads(memtrace_run("diff", path, path, "--json").stdout)
    assert difference["a"]["steps"] == 2 and difference["a"]["inter_bytes"] == 2 * 2 * SIZE // 2


def test_diff_says_where_the_numbers_of_processes_differ(job, tmp_path):
    record(tmp_path / "one.trace", a_job(0, 1))
    done = memtrace_run("diff", job, tmp_path / "one.trace")
    assert "A is of 2 processes, B of 1" in done.stdout, done.stdout
    assert "processes, B of" not in memtrace_run("diff", job, job).stdout
    done = memtrace_run("diff", job, job, "--skip-steps", 9)
    assert "A has no whole step" in done.stdout and "B has no whole step" in done.stdout


# What Chrome's JSON asks of each event, by its phase (the Trace Event Format): required fields and their types.
NUMBER = (int, float)
PHASES = {
    "X": {"name": str, "cat": str, "ts": NUMBER, "dur": NUMBER, "pid": int, "tid": int, "args": dict},
    "i": {"name": str, "cat": str, "ts": NUMBER, "pid": int, "tid": int, "s": str, "args": dict},
    "C": {"name": str, "ts": NUMBER, "pid": int, "tid": int, "args": dict},
    "M": {"name": str, "pid": int, "tid": int, "args": dict},
    "s": {"name": str, "cat": str, "ts": NUMBER, "pid": int, "tid": int, "id": int},
    "f": {"name": str, "cat": str, "ts": NUMBER, "pid": int, "tid": int, "id": int, "bp": str},
}


def test_chrome(job, tmp_path):
    out = tmp_path / "x.json"
    done = memtrace_run("export", "--chrome", job, "-o", out)
    assert done.returncode == 0, done.stderr
    trace = json.loads(out.read_text())
    events = trace["traceEvents"]
    for event in events:
        fields = PHASES[event["ph"]]
        assert all(isinstance(event[name], kind) for name, kind in fields.items()), event
        assert event.keys() <= fields.keys() | {"ph"}, event
        assert event.get("dur", 0) >= 0 and (event["ph"] == "M" or event["ts"] > 0)
        if event["ph"] == "C":
            assert all(isinstance(v, NUMBER) and v >= 0 for v in event["args"].values())
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    for said in ("stream inter 0", "stream h2d", "stream compute", "model.layers.0", "steps"):
        assert list(names.values()).count(said) == 2, said
    assert all((e["pid"], e["tid"]) in names for e in events if e["ph"] in "Xi")
    assert {e["args"]["name"].split(" (")[0] for e in events if e["name"] == "process_name"} == {"rank 0", "rank 1"}
    gathers = [e for e in events if e.get("args", {}).get("kind") == "gather"]
    assert len(gathers) == N_USES and all(e["dur"] == 3000 for e in gathers)
    assert {e["name"] for e in gathers} == {"gather model.layers.0", "gather model.layers.1"}
    assert {e["args"]["region"] for e in gathers} == {"model.layers.0", "model.layers.1"}
    assert all(e["args"]["bytes that this rank sent between nodes"] == SIZE // 2 for e in gathers)
    assert not any(e.get("args", {}).keys() & {"a", "b", "0", ""} for e in events)
    tiers = [e for e in events if e.get("cat") == "region"]
    assert {e["name"] for e in tiers} == {"in use", "kept on the device", "host"}
    rates = [e for e in events if e["name"] == "link between nodes"]
    assert max(e["args"]["bytes per second"] for e in rates) == pytest.approx(SIZE // 2 / 3e-3, rel=1e-3)


def arrows_of(path):
    """[(name, the slice where it begins, the slice where it ends)] as a viewer finds them: by track and time."""
    events = json.loads(path.read_text())["traceEvents"]
    ends = [{e["id"]: e for e in events if e["ph"] == phase} for phase in "sf"]
    assert ends[0].keys() == ends[1].keys() and 2 * len(ends[0]) == sum(e["ph"] in "sf" for e in events)

    def slice_at(at):
        (found,) = (
            e["name"]
            for e in events
            if (e["ph"], e["pid"], e["tid"]) == ("X", at["pid"], at["tid"])
            and e["ts"] <= at["ts"] <= e["ts"] + e["dur"]
        )
        return found

    assert all(s["name"] == f["name"] and s["ts"] <= f["ts"] for s, f in zip(ends[0].values(), ends[1].values()))
    return [(start["name"], slice_at(start), slice_at(ends[1][number])) for number, start in ends[0].items()]


def test_chrome_has_an_arrow_from_each_gather_to_its_use(job, tmp_path):
    """The job's backward has no waits: what it loads is not the next step's, whose wait comes next."""
    assert memtrace_run("export", job, "-o", tmp_path / "x.json").returncode == 0
    found = sorted(arrows_of(tmp_path / "x.json"))
    layers = [f"model.layers.{i}" for i in (0, 1) for _ in range(N_USES // 2)]
    assert found == [("gather to use", f"gather {name}", f"stall {name}") for name in layers]


@pytest.mark.parametrize("is_late", [False, True], ids=["written before the use", "written after it"])
def test_an_arrow_ends_at_the_use_that_the_bytes_are_for(tmp_path, is_late):
    """Of three uses by the program (CPU tensors), the second waits for a load that began ahead."""
    script = Script()
    script.object(1, "layer", size=SIZE)
    waits = [("host_wait", "host_computes", None, at(ms, ms + 2)) for ms in (10, 50, 90)]
    load = ("load", None, "h2d", at(30, 45, bytes=SIZE))
    for kind, cause, stream, fields in [
        *waits[:1],
        *([] if is_late else [load]),
        waits[1],
        *([load] if is_late else []),
    ]:
        script.event(kind, cause, stream, object=1, **fields)
    script.event(*waits[2][:3], object=1, **waits[2][3])
    script.event("host_wait", "host_computes", object=1, **at(120, 122))
    record(tmp_path / "x.trace", script)
    assert memtrace_run("export", tmp_path / "x.trace", "-o", tmp_path / "x.json").returncode == 0
    assert arrows_of(tmp_path / "x.json") == [("load to use", "load layer", "host_wait layer")]
    events = json.loads((tmp_path / "x.json").read_text())["traceEvents"]
    begin, end = (next(e["ts"] for e in events if e["ph"] == phase) for phase in "sf")
    assert end - begin == pytest.approx(20000)


def test_chrome_is_on_the_clock_of_pytorch_s_profiler(job, tmp_path):
    """As kineto: microseconds from baseTimeNanoseconds on, which is the last quarter of an average year."""
    file = _trace.file_open(str(job))
    process = _trace.file_processes(file)[0]
    base = process["start_real_ns"] // (7889238 * 10**9) * (7889238 * 10**9)
    profile = {
        "baseTimeNanoseconds": base + 10**9,
        "traceEvents": [{"ph": "X", "name": "aten::mm", "ts": 5.0, "dur": 1, "pid": 1, "tid": 1}],
    }
    (tmp_path / "profile.json").write_text(json.dumps(profile))
    done = memtrace_run("export", job, "--beside", tmp_path / "profile.json")
    assert done.returncode == 0, done.stderr
    trace = json.loads((tmp_path / "job.trace.json").read_text())
    assert trace["baseTimeNanoseconds"] == base
    of_profile = next(e for e in trace["traceEvents"] if e["name"] == "aten::mm")
    assert of_profile["ts"] == 10**6 + 5
    created = next(e for e in trace["traceEvents"] if e["name"] == "region_create model.layers.0")
    begun = (process["start_real_ns"] - base) / 1e3
    assert 0 < created["ts"] - begun < 10**6


@pytest.mark.parametrize("what", ["export", "plot"])
def test_no_input_is_replaced(job, tmp_path, what):
    if what == "plot":
        pytest.importorskip("matplotlib")
    profile, link = tmp_path / "profile.json", tmp_path / "link.svg"
    profile.write_text('{"traceEvents": []}')
    link.symlink_to(job)
    before = job.read_bytes(), profile.read_bytes()
    outputs = {"plot": [link], "export": [job, link, profile]}[what]
    more = ["--beside", profile] if what == "export" else []
    for out in outputs:
        done = memtrace_run(what, job, *more, "-o", out)
        assert done.returncode == 1 and f"{out} is the file that is read" in done.stderr, done.stderr
    assert (job.read_bytes(), profile.read_bytes()) == before


@pytest.mark.parametrize("fails_in", ["the trace", "the profile"])
def test_an_export_that_fails_leaves_what_was_there(job, tmp_path, fails_in):
    """By a limit of a file's size, as on a full disk."""
    out, profile = tmp_path / "out.json", tmp_path / "profile.json"
    assert memtrace_run("export", job, "-o", out).returncode == 0
    limit = out.stat().st_size - 1000 if fails_in == "the trace" else out.stat().st_size + 1000
    profile.write_text(json.dumps({"traceEvents": [{"ph": "M", "name": "x" * 10**6}]}))
    out.write_text("before")
    out.chmod(0o640)
    files = sorted(tmp_path.iterdir())
    limits = (limit, resource.RLIM_INFINITY)
    options = ["--beside", profile, "-o", out]
    done = memtrace_run("export", job, *options, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, limits))
    assert done.returncode == 1 and "cannot write" in done.stderr and "File too large" in done.stderr, done.stderr
    assert out.read_text() == "before" and sorted(tmp_path.iterdir()) == files
    assert memtrace_run("export", job, *options).returncode == 0
    assert out.stat().st_size > 10**6 and out.stat().st_mode & 0o777 == 0o640


def test_what_is_no_file_is_not_replaced(tmp_path):
    from fcdp_memtrace.replace import replacing

    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with replacing(str(pipe)) as part:
        assert part == str(pipe)
    assert pipe.is_fifo()


def test_a_name_with_any_characters(tmp_path):
    script = Script()
    script.object(1, 'quote" back\\slash\n tab\t \u00e9', size=5)
    script.event("gather", stream="inter 0", object=1, duration_ns=5)
    record(tmp_path / "x.trace", script)
    assert memtrace_run("export", tmp_path / "x.trace").returncode == 0
    trace = json.loads((tmp_path / "x.trace.json").read_text())
    assert any(e["args"].get("region") == 'quote" back\\slash\n tab\t \u00e9' for e in trace["traceEvents"])


def test_the_residency_of_each_region(tmp_path):
    """In use for a tenth, kept for three, on the host for the rest."""
    script = Script()
    script.object(1, "layer", size=100)
    n = 1_000_000_000
    script.event("region_create", object=1, bytes=100, time_ns=0)
    script.state(1, 100, 0, 2, time_ns=1)
    script.state(1, 100, 0, 4, time_ns=n // 10)
    script.state(1, 0, 100, 0, time_ns=4 * n // 10)
    script.event("gather", stream="inter 0", a=1000, duration_ns=n // 2, time_ns=0)
    script.event("region_destroy", object=1, time_ns=n)
    record(tmp_path / "x.trace", script)
    series = _trace.series(_trace.file_open(str(tmp_path / "x.trace")), 0, 100)
    (row,) = series["rows"]
    share = {name: row["tiers"].count(i) for i, name in enumerate(_trace.tiers())}
    # the recording may have gone on a while behind the last event
    assert row["name"] == "layer" and share["in use"] == pytest.approx(share["kept on the device"] / 3, abs=2)
    assert share["host"] == pytest.approx(2 * share["kept on the device"], abs=3)
    assert STREAM["inter 0"] == 64


def test_device_memory_where_the_recording_begins_late(tmp_path):
    """Of one pool some events come, of another none; what both had before was said by events that are overwritten."""
    second = 1_000_000_000
    script = Script(ring=4)
    script.counter("device.gathered_bytes", 7 * SIZE)
    script.event("pages_take", bytes=5 * SIZE, a=GATHERED, b=5 * SIZE)
    for _ in range(4):
        script.event("pass")
    later = Script()
    later.event("pages_give", bytes=SIZE, a=GATHERED, b=4 * SIZE, time_ns=second)
    later.event("pages_take", bytes=SIZE, a=GATHERED, b=5 * SIZE, time_ns=2 * second)
    later.event("pass", time_ns=3 * second)
    process = Process(script)
    recorder = _trace.recorder_create(str(tmp_path / "x.trace"), [], [process.pid])
    process.write(later.lines)
    process.end()
    _trace.recorder_close(recorder)
    series = _trace.series(_trace.file_open(str(tmp_path / "x.trace")), 0, 30)
    held = [list(memoryview(column).cast("Q")) for column in series["columns"][1]]
    assert [held[1][i] for i in (0, 8, 12, 18, 22, 29)] == [SIZE * n for n in (7, 7, 6, 6, 7, 7)]
    assert not any(held[0])


def test_what_has_no_duration_has_no_rate(tmp_path):
    """Else it is a spike of all its bytes in a moment, beside which no gather can be seen."""
    script = Script()
    second = 1_000_000_000
    script.event("pass", time_ns=0)
    script.event("gather", stream="inter 0", a=1000, duration_ns=second, time_ns=0)
    script.event("reduce_scatter", bytes=900, a=900, b=2, time_ns=second)
    script.event("reduce_scatter", bytes=800, a=0, b=2, duration_ns=second, time_ns=second)
    script.event("pass", time_ns=2 * second)
    record(tmp_path / "x.trace", script)
    series = _trace.series(_trace.file_open(str(tmp_path / "x.trace")), 0, 100)
    (mark,) = series["marks"]
    assert mark == (series["first_ns"] + second, "reduce_scatter", "between nodes", 900)
    moved = {name: memoryview(data).cast("d") for name, data in series["columns"][0].items()}
    assert sum(moved["between nodes"]) == pytest.approx(1000) and max(moved["between nodes"]) < 25
    assert sum(moved["within the node"]) == pytest.approx(800) and not any(moved["within the node"][:49])


@pytest.mark.parametrize("suffix", [".svg", ".png"])
def test_plot(job, tmp_path, suffix):
    pytest.importorskip("matplotlib")
    out = tmp_path / f"x{suffix}"
    done = memtrace_run("plot", job, "-o", out, "--rank", "1")
    assert done.returncode == 0, done.stderr
    if suffix == ".png":
        assert out.read_bytes().startswith(b"\x89PNG")
    else:
        assert tree.parse(out).getroot().tag.endswith("svg")
        assert "rank 1" in out.read_text() or "<!-- rank 1" in out.read_text()


def test_plot_names_what_it_cannot_do(job, tmp_path):
    assert memtrace_run("plot", job, "-o", tmp_path / "x.pdf").returncode == 2
    done = memtrace_run("plot", job, "-o", tmp_path / "x.svg", "--rank", "7")
    assert done.returncode == 1 and "no rank 7; it has 0, 1" in done.stderr


def test_a_colour_means_one_thing_in_a_plot():
    from fcdp_memtrace import plot

    colours = [*plot.TIERS.values(), plot.LINK, *plot.OWNERS.values()]
    assert len(set(colours)) == len(colours)


@pytest.mark.parametrize(
    ("budget", "said"), [(3 * SIZE, ">budget, 3.15 MB<"), (9 * SIZE, "the budget is 9.44 MB"), (0, "by owner<")]
)
def test_plot_shows_the_budget_and_each_link(tmp_path, budget, said):
    pytest.importorskip("matplotlib")
    script = a_job()
    script.counter("device.budget_bytes", budget)
    script.event("reduce_scatter", bytes=900, a=900, b=2)
    record(tmp_path / "x.trace", script)
    assert memtrace_run("plot", tmp_path / "x.trace", "-o", tmp_path / "x.svg").returncode == 0
    drawn = (tmp_path / "x.svg").read_text()
    assert said in drawn
    for name in ("between nodes", "within the node", "to the host", "to the device", "gathered parameters"):
        assert f">{name}<" in drawn, name
    assert drawn.count(">reduce_scatter: when, not how long<") == 1
