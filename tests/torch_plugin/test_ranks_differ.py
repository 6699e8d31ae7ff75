"""FCDP is on on some ranks alone, or its options differ between the ranks: plain FSDP on all of them, or an error on
all of them that says what differs. Never a hang, and never collectives that do not meet."""

import json

import pytest

import launch
from conftest import needs_fcdp
from test_bad_input import Outcome, on, start

pytestmark = needs_fcdp


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return start(tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="module")
def plain_fsdp1(tmp_path_factory):
    return start(tmp_path_factory.mktemp("fsdp1"), arguments=["--fsdp1"])


def off(*ranks):
    return {rank: {"FCDP": "0"} for rank in ranks}


@pytest.mark.parametrize("fsdp", ["FSDP2", "FSDP1"])
def test_fcdp_on_some_ranks_is_plain_fsdp_on_all(request, tmp_path, fsdp):
    arguments = ["--fsdp1"] if fsdp == "FSDP1" else []
    expected = request.getfixturevalue("plain_fsdp1" if arguments else "plain")
    outcome = start(tmp_path, on(), arguments, rank_env=off(2))
    said = outcome.went_on(expected)
    why = "FCDP is off on rank 2; set FCDP=1 on every rank"
    assert said == [f"fcdp: served 0 of 5 groups: {why}; plain {fsdp} runs"], outcome.messages
    assert outcome.messages[1:] == [[], [], []]
    bypassed = [entry["reason"] for entry in outcome.results[1]["stats"]["bypassed"]]
    assert bypassed == [why] * 5 and outcome.results[2]["stats"] is None


def test_another_rank_says_so_where_rank_0_has_no_fcdp(tmp_path, plain):
    outcome = start(tmp_path, on(), rank_env=off(0, 3))
    outcome.went_on(plain)
    line = "fcdp: FCDP is off on ranks 0, 3; set FCDP=1 on every rank; plain FSDP runs"
    assert outcome.messages == [[], [line], [], []]


def test_a_rank_that_turns_fcdp_on_late_is_waited_for(tmp_path, plain):
    """By a gather of FSDP's own, which FCDP makes again."""
    job = launch.Spawned(launch.HERE / "late_job.py", [tmp_path], tmp_path, on(), rank_env={1: {"FCDP": ""}}, warm=True)
    assert job.wait(300), "hangs\n" + job.report()
    outcome = Outcome(job, tmp_path)
    assert outcome.went_on(plain) == []
    for result in outcome.results:
        gathers = result["stats"]["gathers"]
        assert result["stats"]["bypassed"] == [] and gathers["plain"] == 1 and gathers["avoided"] > 0, gathers


DIFFERENT = {
    "FCDP_AGREE": ("forward", "unshard"),
    "FCDP_COALESCE": ("1048576", "0"),
    "FCDP_CODEC": ("delta", "none"),
    "FCDP_HOST_COPIES": ("node", "numa"),
    "FCDP_PREFETCH": ("1", "3"),
    "FCDP_REDUCE": ("flat", "hierarchical"),
    "FCDP_REDUCE_DTYPE": ("same", "int8"),
    "FCDP_RESTORE": ("slice", "whole"),
    "FCDP_TRANSPORT": ("auto", "torch"),
    "FCDP_WHOLE_TENSORS": ("1", "0"),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_an_option_that_must_be_the_same_on_every_rank(tmp_path, name):
    first, other = DIFFERENT[name]
    outcome = start(tmp_path, on(**{name: first}), rank_env={2: {name: other}})
    outcome.stopped()
    for rank in outcome.job.ranks:
        last = [line for line in rank.err.splitlines() if "OptionError: fcdp: " in line]
        wanted = f"{name} is {first} on rank 0 and {other} on rank 2; set the same value on every rank"
        assert last and last[-1].endswith(wanted), rank.err


def test_what_each_rank_decides_for_itself_may_differ(tmp_path, plain):
    mine = {"FCDP_TAU": "1", "FCDP_FINGERPRINT": "never", "FCDP_MAPPING": "exact", "FCDP_TIMEOUT": "50"}
    for restore in ("slice", "whole"):
        folder = tmp_path / restore
        folder.mkdir()
        others = {1: mine, 2: {"FCDP_DEVICE_BUDGET": "64M"}, 3: {"FCDP_POLICY": "next-use"}}
        outcome = start(folder, on(FCDP_RESTORE=restore), rank_env=others)
        assert outcome.went_on(plain) == [], json.dumps(outcome.messages)
        stats = [result["stats"] for result in outcome.results]
        assert stats[0]["gathers"]["avoided"] > 0
        assert [rank["policy"] for rank in stats] == ["tau", "tau", "tau", "next-use"]  # auto is tau on CPUs
