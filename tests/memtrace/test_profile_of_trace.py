"""fcdp-plan profile --trace: of a device's trace, whose waits alone have times; and of traces that have no step to measure."""

import pytest

from traces import BACKWARD, MILLISECOND, Script, record

traces = pytest.importorskip("fcdp_plan.traces", reason="the wheel is not installed here (tools/setup.sh does it)")
from fcdp_plan.failure import Error  # noqa: E402


def a_step(s, n):
    """The host runs ahead: it has enqueued all of a step before the device's first wait."""
    began = s.time
    for flags, order in ((0, (1, 2)), (BACKWARD, (2,))):
        for region in order:
            s.event("use", "made", object=region, flags=flags)
    s.step(n)
    now = began + MILLISECOND
    for region, computes in ((1, 3), (2, 4), (2, 5)):  # the first region stays; a span has the step of its enqueuing
        s.event("stall", stream="compute", object=region, time_ns=now, duration_ns=MILLISECOND, step=n - 1)
        now += (1 + computes) * MILLISECOND
    s.time = now + 7 * MILLISECOND  # the optimizer, and the next batch


def test_a_device_s_seconds_are_those_between_its_waits(tmp_path):
    s = Script(0, 2)
    s.object(1, "embedding", size=6 << 10)
    s.object(2, "layer", size=4 << 10)
    for n in range(5):
        a_step(s, n + 1)
    record(tmp_path / "job.trace", s)
    profile = traces.profile_of(str(tmp_path / "job.trace"), 2, "bfloat16", 1)
    regions = profile["regions"]
    assert [(r["name"], r["trainable"] + r["frozen"], r["stays"]) for r in regions] == [
        ("embedding", 3 << 10, True),
        ("layer", 2 << 10, False),
    ]
    assert [r["forward_seconds"] for r in regions] == pytest.approx([0.003, 0.004])
    # One piece: the last backward, the optimizer, and what comes before the first forward.
    assert profile["costs"]["step_seconds"] == pytest.approx(0.005 + 0.007 + 0.001, rel=0.01)


@pytest.mark.parametrize(
    ("steps", "said"), [(0, "has no unshard: was the job run with FCDP=1"), (2, "has 0 whole steps")]
)
def test_a_trace_with_no_step_to_measure_is_said(tmp_path, steps, said):
    s = Script()
    s.object(1, "embedding", size=6 << 10)
    s.object(2, "layer", size=4 << 10)
    for n in range(steps):
        a_step(s, n + 1)
    record(tmp_path / "job.trace", s)
    with pytest.raises(Error, match=said):
        traces.profile_of(str(tmp_path / "job.trace"), 2, "bfloat16", 1)
