"""A file that is cut, damaged, foreign or still growing: what can be read is shown, and a note says what is missing."""

import fcntl
import json
import os
import random
import struct

import pytest

from traces import Process, Script, _trace, a_job, memtrace_run, record

FILE_HEADER, CHUNK = 64, 64


def chunks(data):
    """(offset, type, bytes of the body) of each."""
    at, found = FILE_HEADER, []
    while data[at : at + 4] == b"chnk":
        kind = struct.unpack_from("<H", data, at + 4)[0]
        n_bytes = struct.unpack_from("<Q", data, at + 16)[0]
        found.append((at, kind, n_bytes))
        at += CHUNK + n_bytes
    return found


def opened(path):
    file = _trace.file_open(str(path))
    report = _trace.report(file)
    return _trace.file_summary(file), report


def test_what_was_written_is_read(job):
    summary, report = opened(job)
    assert summary["is_complete"] and not summary["is_growing"] and summary["notes"] == []
    assert summary["processes"] == 2
    assert sum(report["kinds"].values()) == summary["events"] > 100
    assert {r["name"] for r in report["regions"]} == {"model.layers.0", "model.layers.1"}


def test_a_file_that_is_cut_is_read_up_to_its_last_whole_chunk(job, tmp_path):
    data = job.read_bytes()
    everything = opened(job)[0]["events"]
    found = chunks(data)
    for cut in [len(data) - 1, found[-1][0] + 10, found[-2][0] + 100, found[3][0], found[2][0] + 1, FILE_HEADER]:
        path = tmp_path / "cut.trace"
        path.write_bytes(data[:cut])
        summary, report = opened(path)
        whole = [c for c in found if c[0] + CHUNK + c[2] <= cut and c[1] != 5]
        assert summary["chunks"] == len(whole) and not summary["is_complete"]
        assert sum(report["kinds"].values()) == summary["events"] <= everything
        assert len(summary["notes"]) == 1 and ("cut" in summary["notes"][0] or "damaged" in summary["notes"][0])


def test_a_damaged_chunk_is_left_out_and_named(job, tmp_path):
    data = bytearray(job.read_bytes())
    at, _, _ = next(c for c in chunks(data) if c[1] == 3)
    data[at + CHUNK + 100] ^= 1
    path = tmp_path / "damaged.trace"
    path.write_bytes(data)
    summary, report = opened(path)
    assert summary["is_complete"]
    assert 0 < sum(report["kinds"].values()) < summary["events"]
    assert len(summary["notes"]) == 1 and f"byte {at}" in summary["notes"][0] and "checksum" in summary["notes"][0]


def damaged(job, tmp_path, kind):
    """The job's file with one bit changed in the body of its last chunk of a kind; that chunk's place and size."""
    data = bytearray(job.read_bytes())
    at, _, n_bytes = [c for c in chunks(data) if c[1] == kind][-1]
    data[at + CHUNK + 100] ^= 1
    path = tmp_path / "damaged.trace"
    path.write_bytes(data)
    return path, at, CHUNK + n_bytes


READERS = [
    ["report"],
    ["report", "--json"],
    ["diff", "--skip-steps", "0"],
    ["diff", "--json"],
    ["check"],
    ["check", "--json"],
    ["export"],
    ["plot", "--rank", "1"],
]


@pytest.mark.parametrize("command", READERS, ids=" ".join)
def test_damage_is_told_by_whatever_reads_the_file(job, tmp_path, command):
    """On stderr, and by the exit status: sums lack what could not be read."""
    if command[0] == "plot":
        pytest.importorskip("matplotlib")
    path, at, n_bytes = damaged(job, tmp_path, 3)
    files = {"diff": [job, path], "plot": [path, "-o", tmp_path / "x.svg"]}.get(command[0], [path])
    done = memtrace_run(command[0], *files, *command[1:])
    assert done.returncode == 1, done.stdout + done.stderr
    assert f"{path}: the chunk at byte {at} " in done.stderr and "events of rank 1) is damaged" in done.stderr
    assert f"{n_bytes} of {path.stat().st_size} bytes could not be read" in done.stderr
    if "--json" in command and command[0] != "diff":
        of_file = json.loads(done.stdout)["file"]
        assert of_file["unreadable_bytes"] == n_bytes and len(of_file["notes"]) == 1
    if command == ["check"]:
        assert "breaks the rule file: " in done.stdout and f"byte {at} " in done.stdout, done.stdout


def test_where_the_last_counters_are_damaged_those_before_are_shown(job, tmp_path):
    path, at, n_bytes = damaged(job, tmp_path, 4)
    summary, _ = opened(path)
    assert summary["unreadable_bytes"] == n_bytes
    assert f"byte {at} " in summary["notes"][0] and "counters and regions of rank 1" in summary["notes"][0]
    process = _trace.file_processes(_trace.file_open(str(path)))[1]
    assert process["counters"] == process["first_counters"] != {}


def test_chunks_behind_damage_are_found_without_the_index(job, tmp_path):
    data = bytearray(job.read_bytes())
    found = chunks(data)
    data[found[1][0] : found[1][0] + 8] = b"\xff" * 8
    path = tmp_path / "damaged.trace"
    path.write_bytes(data[: found[-1][0]])
    summary, _ = opened(path)
    assert summary["chunks"] == len(found) - 2  # without the damaged one, and the index
    assert summary["unreadable_bytes"] == CHUNK + found[1][2]
    assert any(f"from byte {found[1][0]} on are no chunk" in note for note in summary["notes"])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda d: d.__setitem__(slice(8, 12), struct.pack("<I", 7)), "version 7"),
        (lambda d: d.__setitem__(slice(0, 4), b"PK\3\4"), "is not a trace"),
        (lambda d: d.__delitem__(slice(20, None)), "is not a trace"),
        (lambda d: d.__delitem__(slice(0, None)), "is not a trace"),
    ],
    ids=["another version", "another format", "a few bytes", "nothing"],
)
def test_a_foreign_file_is_refused_by_name(job, tmp_path, change, said):
    data = bytearray(job.read_bytes())
    change(data)
    path = tmp_path / "foreign.trace"
    path.write_bytes(data)
    with pytest.raises(_trace.Error) as error:
        _trace.file_open(str(path))
    assert str(path) in str(error.value) and said in str(error.value)


@pytest.mark.parametrize("path", ["no/such/file", "/", "/dev/null"])
def test_what_is_no_file_is_refused(path):
    with pytest.raises(_trace.Error) as error:
        _trace.file_open(path)
    assert path in str(error.value)


def test_a_file_that_grows_is_read_as_far_as_it_is(tmp_path):
    path = tmp_path / "growing.trace"
    process = Process(a_job())
    recorder = _trace.recorder_create(str(path), [], [process.pid])
    process.end()
    progress = _trace.recorder_poll(recorder, 0)
    summary, report = opened(path)
    assert summary["is_growing"] and not summary["is_complete"] and not summary["unreadable_bytes"]
    done = memtrace_run("report", path)
    assert done.returncode == 0 and "still being written" in done.stderr
    assert "still being written" in summary["notes"][0]
    assert sum(report["kinds"].values()) == progress["events"]
    _trace.recorder_close(recorder)
    assert opened(path)[0]["is_complete"]


def test_a_chunk_that_is_still_being_written_is_no_damage(job):
    """The writer's lock says so. What is behind the last whole chunk of a file without a writer is."""
    data = job.read_bytes()
    job.write_bytes(data[: chunks(data)[-2][0] + 100])
    with open(job, "rb") as writer:
        fcntl.flock(writer, fcntl.LOCK_EX)
        done = memtrace_run("report", job)
        assert done.returncode == 0 and "still being written" in done.stderr
    done = memtrace_run("report", job)
    assert done.returncode == 1 and "the last 100 bytes are part of one" in done.stderr


def test_any_damage_is_survived(job, tmp_path):
    """Random bytes changed, cut, doubled; every function of a file is called on the result."""
    seed = int(os.environ.get("FCDP_TEST_SEED", random.randrange(1 << 32)))
    print(f"FCDP_TEST_SEED={seed}")
    rng = random.Random(seed)
    original = job.read_bytes()
    path = tmp_path / "damaged.trace"
    n_read = 0
    for _ in range(150):
        data = bytearray(original)
        for _ in range(rng.randrange(1, 8)):
            at = rng.randrange(len(data))
            how = rng.randrange(4)
            if how == 0:
                data[at] ^= 1 << rng.randrange(8)
            elif how == 1:
                data[at : at + 8] = rng.choice([b"\xff" * 8, b"\0" * 8, rng.randbytes(8)])
            elif how == 2:
                del data[at : at + rng.randrange(1, 200)]
            else:
                data[at:at] = data[max(0, at - 128) : at]
        path.write_bytes(data)
        try:
            file = _trace.file_open(str(path))
        except _trace.Error:
            continue
        n_read += 1
        _trace.file_processes(file)
        _trace.report(file)
        _trace.check(file, 2**64 - 1, 2**64 - 1, 2**64 - 1, 0)
        for i in range(_trace.file_summary(file)["processes"]):
            _trace.series(file, i, 50)
        with open(os.devnull, "w") as null:
            _trace.chrome_write(file, null.fileno(), 0, repr)
    assert n_read > 50


def test_names_are_kept_where_a_number_serves_again(tmp_path):
    """Another region with the same number: what came before keeps its name."""
    first = Script()
    first.object(3, "old")
    first.event("region_create", object=3, bytes=10)
    first.event("region_destroy", object=3)
    path = tmp_path / "names.trace"
    process = Process(first)
    recorder = _trace.recorder_create(str(path), [], [process.pid])
    _trace.recorder_poll(recorder, 0)
    second = Script()
    second.time = first.time
    second.object(3, "new")
    second.event("region_create", object=3, bytes=20)
    process.write(second.lines)
    process.end()
    _trace.recorder_poll(recorder, 0)
    _trace.recorder_close(recorder)
    regions = {r["name"]: r["bytes"] for r in opened(path)[1]["regions"]}
    assert regions == {"old": 10, "new": 20}


@pytest.mark.parametrize("looks_first", [False, True])
def test_a_region_that_no_look_of_the_recorder_met_has_its_name(tmp_path, looks_first):
    """On a busy machine a recorder may get no core while a region lives."""
    before, life = Script(), Script()
    before.event("step")
    life.time = before.time
    life.event("region_create", object=3, bytes=10)
    life.event("region_destroy", object=3)
    life.object(3, "brief", size=10, state=0)
    path = tmp_path / "names.trace"
    process = Process(before)
    if not looks_first:
        process.write(life.lines)
    recorder = _trace.recorder_create(str(path), [], [process.pid])
    _trace.recorder_poll(recorder, 0)
    if looks_first:
        process.write(life.lines)
    process.end()
    _trace.recorder_poll(recorder, 0)
    _trace.recorder_close(recorder)
    assert [r["name"] for r in opened(path)[1]["regions"]] == ["brief"]


def test_a_kind_that_is_not_known_is_shown_by_its_number(tmp_path):
    script = Script()
    script.event(200, bytes=5)
    script.counter(127, 42)
    record(tmp_path / "x.trace", script)
    file = _trace.file_open(str(tmp_path / "x.trace"))
    assert _trace.report(file)["kinds"] == {"kind 200": 1}
    assert _trace.file_processes(file)[0]["counters"]["counter 127"] == 42
