"""Gathers of differences (FCDP_CODEC), 2 nodes x 2 ranks: fewer bytes between the nodes, and the same training."""

import pytest

from conftest import needs_fcdp
from test_bad_input import on, start

pytestmark = needs_fcdp
ALONE = {"FCDP_COALESCE": "0"}
KINDS = {
    "fsdp2": (["--freeze", 1], ALONE, ("delta", "auto")),
    "fsdp1": (["--fsdp1"], ALONE, ("delta", "auto")),
    "together": (["--freeze", 1], {}, ("delta",)),  # small groups cross in one gather
}


def sent(outcome):
    return sum(rank["stats"]["collectives"]["gather"]["inter_bytes_sent"] for rank in outcome.results)


@pytest.mark.parametrize("kind", KINDS)
def test_differences_are_fewer_bytes_and_the_same_training(tmp_path, kind):
    arguments, options, codecs = KINDS[kind]
    outcomes = {
        codec: start(tmp_path / codec, on(FCDP_CODEC=codec, **options), arguments=arguments)
        for codec in ("none", *codecs)
    }
    whole = outcomes.pop("none")
    for codec, outcome in outcomes.items():
        assert outcome.went_on(whole) == [], codec
        for rank, with_all in zip(outcome.results, whole.results):
            stats = rank["stats"]
            assert stats["gathers"] == with_all["stats"]["gathers"] and stats["bypassed"] == []
            assert stats["deltas"]["gathers"] > 0, (codec, stats["deltas"])  # auto tries them
            assert stats["saved"]["plain_bytes"] == with_all["stats"]["saved"]["plain_bytes"]
    for rank, with_all in zip(outcomes["delta"].results, whole.results):
        deltas, saved = rank["stats"]["deltas"], rank["stats"]["saved"]["gather_bytes"]
        assert deltas["whole"] == 0 and saved < with_all["stats"]["saved"]["gather_bytes"]
    assert sent(outcomes["delta"]) < sent(whole) * 0.92, (sent(outcomes["delta"]), sent(whole))


def test_where_rounded_numbers_cannot_be_the_job_says_so(tmp_path):
    outcome = start(tmp_path, on(FCDP_CODEC="int8", FCDP_RESTORE="slice", FCDP_TIMEOUT="60"))
    said = [line for lines in outcome.messages for line in lines if "FCDP_CODEC" in line]
    assert len(said) == 2 and all(line.endswith("cross the nodes whole: FCDP_RESTORE is slice") for line in said), said
    assert all(
        rank["stats"]["deltas"] == {"gathers": 0, "whole": 0, "by_device": 0, "rounding_error": None}
        for rank in outcome.results
    )


def test_of_slices_they_are_differences_too(tmp_path):
    """And the job says of copies in each NUMA node that restores by slice do not need them, and on CPUs of groups that are
    to be in host memory alone that they cannot be."""
    options = on(
        FCDP_CODEC="delta", FCDP_HOST_COPIES="numa", FCDP_RESTORE="slice", FCDP_HOST_MAP="*", FCDP_TIMEOUT="60"
    )
    outcome = start(tmp_path, options)
    assert not any("FCDP_CODEC" in line for lines in outcome.messages for line in lines), outcome.messages
    for rank in outcome.results:
        assert rank["stats"]["deltas"]["gathers"] > rank["stats"]["deltas"]["whole"] == 0, rank["stats"]["deltas"]
    said = [[line for line in lines if "FCDP_HOST_COPIES" in line] for lines in outcome.messages]
    assert [len(lines) for lines in said] == [1, 0, 0, 0] and "=numa changes nothing: " in said[0][0], said
    assert [rank["stats"]["host"]["copies"] for rank in outcome.results] == [1] * 4
    said = [[line for line in lines if "FCDP_HOST_MAP" in line] for lines in outcome.messages]
    assert [len(lines) for lines in said] == [1, 0, 0, 0] and "'(root)'" in said[0][0], said
    assert "not mapped, and served as without it (rank 0: models on CPUs have" in said[0][0], said
    assert all(group["tier"] == "policy" for rank in outcome.results for group in rank["stats"]["groups"])
