"""check finds each inconsistency that is planted, and none where there is none."""

import pytest

from traces import (
    BACKWARD,
    CAUSE,
    COUNTER,
    GATHERED,
    KIND,
    MILLISECOND,
    POOL,
    _trace,
    a_job,
    memtrace_run,
    record,
)

ANY = 2**64 - 1


def checked(path, stall=ANY, peak=ANY, inter=ANY, first_step=0):
    return _trace.check(_trace.file_open(str(path)), stall, peak, inter, first_step)


def test_a_good_trace_passes_and_every_rule_was_applied(job):
    result = checked(job)
    assert result["violation"] is None
    assert {name for name, n in result["applied"].items() if not n} == set()
    assert result["lost"] == 0


def events(script, kind, **fields):
    """The script's events of a kind, whose fields are these."""
    found = [f for name, f in script.lines if name == "event" and f["kind"] == KIND[kind]]
    return [f for f in found if all(f.get(k) == v for k, v in fields.items())]


def remove(script, event):
    script.lines = [line for line in script.lines if line[1] is not event]


def change(script, event, **fields):
    event |= fields


def counter(script, name, value):
    next(f for kind, f in script.lines if kind == "counter" and f[0] == COUNTER[name])[1] = value


PLANTED = {
    "a use that begins twice": ("use", lambda s: remove(s, events(s, "release")[0])),
    "a use that was never begun": ("use", lambda s: remove(s, events(s, "acquire")[0])),
    "a region used after its end": (
        "life",
        lambda s: s.event("region_destroy", object=1) and s.event("invalidate", object=1),
    ),
    "a region that was never created": ("life", lambda s: remove(s, events(s, "region_create")[0])),
    "an eviction of what is not kept": (
        "kept",
        lambda s: change(s, events(s, "release", cause=CAUSE["kept"])[0], cause=CAUSE["passed_on"]),
    ),
    "a slot with two regions": (
        "slot",
        lambda s: (
            change(s, events(s, "acquire", object=2)[0], a=1)
            or change(s, events(s, "release", object=1)[0], cause=CAUSE["kept"])
        ),
    ),
    "more on the device than there is": ("state", lambda s: change(s, events(s, "state", a=1 << 20)[0], a=1 << 21)),
    "on the device, and not used": ("state", lambda s: change(s, events(s, "state", a=0, object=1)[-1], a=5)),
    "a store of what was never filled": (
        "store",
        lambda s: (
            change(s, events(s, "fill")[0], kind=KIND["pass"]) or change(s, events(s, "state", a=1 << 20)[0], a=0)
        ),
    ),
    "a load of what the host never had": (
        "load",
        lambda s: (
            [change(s, e, kind=KIND["pass"]) for e in events(s, "store")]
            and [change(s, e, b=0) for e in events(s, "state")]
        ),
    ),
    "pages from nowhere": ("held", lambda s: s.event("pages_give", bytes=100, a=GATHERED, b=3 << 20)),
    "more held than created": ("created", lambda s: s.event("pages_take", bytes=3 << 20, a=GATHERED, b=5 << 20)),
    "created bytes that do not add up": (
        "created",
        lambda s: s.event("pages_release", bytes=1 << 20, a=POOL, b=2 << 20),
    ),
    "bytes that were sent and not counted": (
        "counters",
        lambda s: counter(s, "collectives.gather.inter_bytes_sent", 5),
    ),
    "cached and held that are not created": ("created", lambda s: counter(s, "device.cached_bytes", 5)),
    "a step that is skipped": ("steps", lambda s: change(s, events(s, "step")[1], a=3)),
    "time that goes back": ("times", lambda s: change(s, events(s, "host_wait")[1], time_ns=50)),
    "one rank that gathers more often": (
        "ranks",
        lambda s: (
            counter(s, "gathers.made", 5)
            or change(s, events(s, "use", flags=BACKWARD)[0], cause=CAUSE["made"])
            or counter(s, "gathers.avoided", 3)
        ),
    ),
    "one rank that finds what the other gathers": (
        "ranks",
        lambda s: (
            counter(s, "gathers.made", 3)
            or change(s, events(s, "use", cause=CAUSE["made"])[0], cause=CAUSE["hit"])
            or counter(s, "gathers.avoided", 5)
        ),
    ),
    "one rank that does not use what the other gathers": (
        "ranks",
        lambda s: counter(s, "gathers.made", 3) or remove(s, events(s, "use", cause=CAUSE["made"])[-1]),
    ),
}


def test_a_rank_that_never_uses_what_the_others_of_its_group_gather(tmp_path):
    ranks = [a_job(0, 2, shard_group=7), a_job(1, 2, shard_group=7)]
    for use in events(ranks[1], "use", object=1):
        remove(ranks[1], use)
    counter(ranks[1], "gathers.made", 2)
    counter(ranks[1], "gathers.avoided", 2)
    record(tmp_path / "x.trace", *ranks)
    violation = checked(tmp_path / "x.trace")["violation"]
    assert violation and violation["rule"] == "ranks" and violation["process"] == "rank 1", violation
    assert "rank 0 gathered model.layers.0 1 times in step 0, and rank 1 0 times" in violation["text"]


@pytest.mark.parametrize("what", PLANTED)
def test_what_is_planted_is_found(tmp_path, what):
    rule, plant = PLANTED[what]
    ranks = [a_job(0, 2), a_job(1, 2)]
    plant(ranks[1])
    path = tmp_path / "planted.trace"
    record(path, *ranks)
    violation = checked(path)["violation"]
    assert violation and violation["rule"] == rule and violation["process"] == "rank 1", violation
    done = memtrace_run("check", path)
    assert done.returncode == 1 and f"breaks the rule {rule}: " in done.stdout and "rank 1" in done.stdout
    assert ("  event " in done.stdout) == (violation["event"] is not None)


@pytest.mark.parametrize(
    ("option", "rule", "below", "above"),
    [
        ("--max-stall", "max-stall", "0.9", "1"),
        ("--max-peak", "max-peak", "2MB", "2M"),
        ("--max-inter", "max-inter", "1.04MB", "1MiB"),
    ],
)
def test_the_gates(job, option, rule, below, above):
    done = memtrace_run("check", job, option, above)
    assert done.returncode == 0, done.stdout
    done = memtrace_run("check", job, option, below)
    assert done.returncode == 1 and f"breaks the rule {rule}: " in done.stdout and option in done.stdout, done.stdout


def test_the_first_steps_may_be_left_to_themselves(job):
    assert checked(job, stall=MILLISECOND - 1)["violation"]
    assert checked(job, stall=MILLISECOND - 1, first_step=2)["violation"] is None


def test_regions_of_one_rank_alone_are_compared_with_none(tmp_path):
    """As the stages of a pipeline have them."""
    path = tmp_path / "stages.trace"
    record(path, a_job(0, 2, regions=2), a_job(1, 2, regions=3))
    result = checked(path)
    assert result["violation"] is None and result["applied"]["ranks"] > 0


@pytest.mark.parametrize("groups", [(1, 1), (1, 2)])
def test_regions_of_one_name_are_compared_within_a_shard_group(tmp_path, groups):
    """Two shard groups of one model, as of HSDP, or two stages whose layers have one name, may differ."""
    ranks = [a_job(rank, 2, shard_group=group) for rank, group in enumerate(groups)]
    PLANTED["one rank that gathers more often"][1](ranks[1])
    path = tmp_path / "groups.trace"
    record(path, *ranks)
    violation = checked(path)["violation"]
    assert (violation["rule"] if violation else None) == ("ranks" if groups[0] == groups[1] else None)


def test_a_step_that_no_optimizer_ended_is_not_compared(tmp_path):
    """A rank may fail, and the job end, in its middle."""
    ranks = [a_job(0, 2), a_job(1, 2)]
    ranks[1].event("use", "made", object=1)
    counter(ranks[1], "gathers.made", 5)
    path = tmp_path / "failed.trace"
    record(path, *ranks)
    assert checked(path)["violation"] is None


def test_what_lost_events_would_have_said_is_not_checked(tmp_path):
    """A ring that is smaller than the job: the recording begins in the middle of it."""
    script = a_job(steps=20)
    script.segment["ring"] = 64
    path = tmp_path / "late.trace"
    record(path, script)
    result = checked(path)
    assert result["violation"] is None and result["events"] == 64


def test_a_copy_may_be_written_after_its_region_s_end(tmp_path):
    """Once the device's times are known. One that began later is of a region that is gone."""
    for begins_ms, rule in ((-1, None), (1, "life")):
        script = a_job()
        end = script.event("region_destroy", object=1)["time_ns"]
        script.event("load", stream="h2d", object=1, duration_ns=5, time_ns=end + begins_ms * MILLISECOND)
        record(tmp_path / "x.trace", script)
        violation = checked(tmp_path / "x.trace")["violation"]
        assert (violation and violation["rule"]) == rule


def test_a_damaged_file_does_not_pass(job, tmp_path):
    data = bytearray(job.read_bytes())
    data[-300] ^= 1
    path = tmp_path / "damaged.trace"
    path.write_bytes(data)
    violation = checked(path)["violation"]
    assert violation and violation["rule"] in ("file", "counters", "numbers")
