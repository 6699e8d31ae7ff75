"""Groups for which host memory has no room, in files (FCDP_SPILL_DIR), 2 nodes x 2 ranks: training is bit for bit the
same, and what a fresh group holds crosses the nodes once."""

import pytest

from conftest import needs_fcdp
from models import Net
from test_bad_input import on, start
from test_cache import doctor

pytestmark = needs_fcdp
ARGUMENTS = {"fsdp2": ["--freeze", 2], "fsdp1": ["--fsdp1", "--freeze", 2]}
BLOCK_BYTES = sum(p.nbytes for p in Net(dim=128, n_blocks=1).blocks.parameters())
W = sum(p.nbytes for p in Net(dim=128, n_blocks=4).parameters())
BUDGET = W * 2 // 5


def train(tmp_path, kind, **options):
    """With few buffers: what is stored in forward is read from the disk in backward."""
    return start(tmp_path, on(FCDP_PREFETCH="0", FCDP_CODEC="none", **options), arguments=ARGUMENTS[kind])


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return {kind: start(tmp_path_factory.mktemp(kind), arguments=ARGUMENTS[kind]) for kind in ARGUMENTS}


@pytest.mark.parametrize("kind", ARGUMENTS)
def test_what_host_memory_does_not_hold_is_in_a_file(tmp_path, plain, kind):
    spill = tmp_path / "spill"
    outcome = train(tmp_path / "file", kind, FCDP_HOST_BUDGET=str(BUDGET), FCDP_SPILL_DIR=str(spill))
    assert outcome.went_on(plain[kind]) == []
    in_memory = train(tmp_path / "memory", kind) if kind == "fsdp2" else outcome
    for rank, with_memory in zip(outcome.results, in_memory.results):
        stats = rank["stats"]
        assert stats["bypassed"] == []
        assert stats["saved"] == with_memory["stats"]["saved"]
        assert stats["host_bytes"]["peak"] <= BUDGET
        in_file = [group["bytes"] for group in stats["groups"] if group["in_file"]]
        assert len(in_file) == 3 and sum(in_file) / 2 <= stats["spill"]["bytes"] < sum(in_file) / 2 + 3 * 8192
        assert stats["spill"]["written_bytes"] > BLOCK_BYTES and stats["spill"]["failures"] == 0
    said = outcome.messages[0]
    assert said[0].startswith("fcdp: serving 5 of 5 groups, 3 of them ("), said
    assert "were written to FCDP_SPILL_DIR and " in said[2], said
    assert outcome.messages[1:] == [[], [], []]
    assert list(spill.iterdir()) == []  # they have no name


def test_no_host_memory_at_all(tmp_path, plain):
    outcome = train(tmp_path / "file", "fsdp2", FCDP_HOST_BUDGET="100K", FCDP_SPILL_DIR=str(tmp_path / "spill"))
    assert outcome.went_on(plain["fsdp2"]) == []
    for rank in outcome.results:
        assert rank["stats"]["bypassed"] == [] and rank["stats"]["spill"]["read_bytes"] > 0, rank["stats"]["spill"]


def test_a_directory_that_cannot_be_used_is_named_and_the_rest_goes_on(tmp_path, plain):
    """On one node alone: all ranks leave the same groups to plain FSDP."""
    nodes = ({"FCDP_SPILL_DIR": str(tmp_path / "spill")}, {"FCDP_SPILL_DIR": "/dev/null/there"})
    outcome = start(
        tmp_path / "job",
        on(FCDP_HOST_BUDGET=str(BUDGET)),
        rank_env={rank: nodes[rank // 2] for rank in range(4)},
        arguments=ARGUMENTS["fsdp2"],
    )
    outcome.went_on(plain["fsdp2"])
    left = [[group["group"] for group in rank["stats"]["bypassed"]] for rank in outcome.results]
    assert left[0] and left == left[:1] * 4, left
    said = outcome.messages[2]
    assert len(said) == 1 and "FCDP_SPILL_DIR=/dev/null/there: Not a directory" in said[0], outcome.messages
    assert "FCDP_SPILL_DIR=/dev/null/there: Not a directory" in outcome.messages[0][0], outcome.messages  # why


def test_a_directory_on_some_ranks_alone_serves_none_and_is_said_once(tmp_path, plain):
    outcome = start(
        tmp_path / "job",
        on(FCDP_HOST_BUDGET=str(BUDGET), FCDP_SPILL_DIR=str(tmp_path / "spill")),
        rank_env={rank: {"FCDP_SPILL_DIR": ""} for rank in (1, 2)},
        arguments=ARGUMENTS["fsdp2"],
    )
    outcome.went_on(plain["fsdp2"])
    assert outcome.messages[0][0] == (
        "fcdp: FCDP_SPILL_DIR is not set on ranks 1, 2, so no group is in a file on any rank; set it on every rank, or on none"
    ), outcome.messages
    assert sum("FCDP_SPILL_DIR" in line for line in outcome.messages[0]) == 1, outcome.messages
    assert outcome.messages[1:] == [[], [], []], outcome.messages
    for rank in outcome.results:
        assert len(rank["stats"]["bypassed"]) == 3 and rank["stats"]["spill"]["written_bytes"] == 0, rank["stats"]


def test_the_doctor_tells_of_the_disk(tmp_path):
    good, bad = (doctor(FCDP_SPILL_DIR=directory) for directory in (str(tmp_path), "/dev/null/there"))
    assert good.returncode == 0 and f" free in {tmp_path}: " in good.stdout, good.stdout
    assert bad.returncode == 1 and "FCDP_SPILL_DIR=/dev/null/there: Not a directory" in bad.stdout, bad.stdout


def test_without_page_locked_memory_it_says_what_to_unset(tmp_path, plain):
    outcome = train(
        tmp_path / "job",
        "fsdp2",
        FCDP_HOST_BUDGET=str(BUDGET),
        FCDP_SPILL_DIR=str(tmp_path / "spill"),
        FCDP_PIN="never",
    )
    said = outcome.went_on(plain["fsdp2"])
    assert len(said) == 1 and "needs page-locked memory, and FCDP_PIN is never; unset FCDP_PIN" in said[0], said


def test_a_disk_that_failed_is_in_the_summary():
    from fcdp.report import _disk

    spill = {"bytes": 1, "written_bytes": 2 << 20, "read_bytes": 1 << 20, "failures": 3, "wait_seconds": 0.5}
    assert _disk(spill).endswith("waited 0.50 s; its disk failed 3 times, and what was lost was gathered again")
    assert _disk(spill | {"failures": 0}).endswith("waited 0.50 s")
    assert _disk(dict.fromkeys(spill, 0)) == ""


def test_frozen_parameters_that_a_disk_lost_are_in_the_summary():
    from fcdp.report import _cache

    cache = {"read_bytes": 2 << 20, "written_bytes": 0, "failures": 3}
    assert _cache(cache).endswith("3 of them could not be written, or were damaged, and are gathered")
    assert _cache(cache | {"failures": 0}).endswith("2.1 MB came from FCDP_CACHE_DIR and 0 B were written there")
    assert _cache(dict.fromkeys(cache, 0)) == ""
