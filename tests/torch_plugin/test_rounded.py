"""FCDP_CODEC=int8, 2 nodes x 2 ranks: all ranks compute with the same rounded weights, in forward and backward, run after
run; shards, full_tensor() and state dicts stay exact (rounded_job.py looks)."""

import json

import pytest

import launch
from configurations import is_whole
from conftest import needs_fcdp
from test_bad_input import on, start

pytestmark = needs_fcdp
ON = on(FCDP_CODEC="int8")


def train(folder, *arguments, **options):
    folder.mkdir()
    done = launch.forked(launch.HERE / "rounded_job.py", [folder, *arguments], folder, ON | options)
    assert not done.timed_out and done.returncode == 0, done.output
    return [json.loads((folder / f"result{rank}.json").read_text()) for rank in range(len(done.ranks))], done.output


def test_all_ranks_compute_with_the_same_weights_run_after_run(tmp_path):
    kept = {"FCDP_CACHE_DIR": str(tmp_path / "cache")}
    results, output = train(tmp_path / "bf16", "bfloat16", **kept)
    again, _ = train(tmp_path / "again", "bfloat16", FCDP_COALESCE="0", FCDP_TAU="1", **kept)
    checkpointed, _ = train(tmp_path / "checkpointed", "bfloat16", "checkpointed")
    digests = [rank["digest"] for rank in results]
    assert digests == [rank["digest"] for rank in again] == [rank["digest"] for rank in checkpointed]
    assert all(rank["stats"]["cache"]["read_bytes"] > 0 for rank in again)  # what is frozen, and nothing rounded
    for rank in results + again + checkpointed:
        deltas = rank["stats"]["deltas"]
        assert deltas["gathers"] > 0 and deltas["whole"] == 0 and rank["stats"]["bypassed"] == []
        assert 1e-3 < deltas["rounding_error"] < 2e-2
        assert rank["stats"]["wholes"]["gathered"] == 0
    assert output.count("parameters were rounded for their gathers (FCDP_CODEC=int8): by 0.") == 1, output


def test_float32_crosses_in_a_quarter_of_its_bytes(tmp_path):
    rounded, whole = (start(tmp_path / codec, on(FCDP_CODEC=codec)) for codec in ("int8", "none"))
    assert all(rank.returncode == 0 for rank in rounded.job.ranks), rounded.job.report()
    sent = [
        sum(rank["stats"]["collectives"]["gather"]["inter_bytes_sent"] for rank in one.results)
        for one in (rounded, whole)
    ]
    assert sent[0] < 0.3 * sent[1], sent  # 0.254, and what groups this small have of heads
    assert rounded.results[0]["digest"] != whole.results[0]["digest"]


@pytest.mark.parametrize(
    "options, arguments, why",
    [
        ({"FCDP_RESTORE": "slice"}, [], "parameters cross the nodes whole: FCDP_RESTORE is slice"),
        ({}, ["--fsdp1"], "FSDP1's parameters are not rounded"),
    ],
)
def test_where_they_cannot_be_rounded_training_is_exact(tmp_path, options, arguments, why):
    outcome = start(tmp_path / "on", ON | options, arguments=arguments)
    assert all(rank.returncode == 0 for rank in outcome.job.ranks), outcome.job.report()
    if is_whole():
        outcome.went_on(start(tmp_path / "plain", arguments=arguments))
    said = [line for lines in outcome.messages for line in lines if "FCDP_CODEC" in line]
    assert said and all(why in line for line in said), said
    assert all(rank["stats"]["deltas"]["rounding_error"] is None for rank in outcome.results)
