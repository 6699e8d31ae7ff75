"""What a gather reads, a cast or an upload of each shard, is made beside the compute and not in front of it."""

import pytest

FCDP = {"FCDP": "1", "FCDP_LOCAL_SIZE": "2", "FCDP_TRANSPORT": "torch", "FCDP_TIMEOUT": "60", "FCDP_SIM_RACES": "1"}
OPTIONS = {
    "each": {"FCDP_COALESCE": "0", "FCDP_PREFETCH": "2"},
    "together": {},  # the small groups, from a staging buffer
    "exact": {"FCDP_COALESCE": "0", "FCDP_MAPPING": "exact", "FCDP_PREFETCH": "0"},
}


@pytest.fixture(scope="module")
def plain(run_job):
    return run_job("inputs_job.py", "OUT", n_ranks=4, env={"FCDP": "0"})


@pytest.mark.parametrize("name", OPTIONS)
def test_the_compute_stream_makes_no_inputs(name, plain, run_job):
    for without, with_fcdp in zip(plain, run_job("inputs_job.py", "OUT", n_ranks=4, env=FCDP | OPTIONS[name])):
        for case, expected in without.items():
            assert with_fcdp[case]["numbers"] == expected["numbers"], case
        assert [found["launched"] for found in with_fcdp.values()] == [{}] * len(with_fcdp), with_fcdp
        made = [found["gathers"] for found in with_fcdp.values()]
        assert all(before < after for before, after in zip([0, *made], made)), made


@pytest.mark.parametrize("mapping", ["slots", "exact"])
def test_the_pages_pass_on_behind_a_recorded_stream(mapping, run_job):
    name, env = "a_stream_that_was_recorded_reads_parameters", FCDP | {"FCDP_MAPPING": mapping}
    assert run_job("side_job.py", name, "OUT", n_ranks=4, env=env) == ["nothing"] * 4


HOOK = {"FCDP_AGREE": "unshard", "FCDP_FINGERPRINT": "never", "FCDP_COALESCE": "0"}


def test_a_cast_waits_for_what_a_hook_writes(run_job):
    name = "a_hook_writes_what_the_next_gather_casts"
    assert run_job("side_job.py", name, "OUT", n_ranks=4, env=FCDP | HOOK) == ["nothing"] * 4


FAULTS = {
    "a_stream_that_was_not_recorded_reads_parameters": {},
    "the_cast_does_not_wait_for_what_a_hook_writes": HOOK,
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_order_is_found(name, run_job):
    said = run_job("side_job.py", name, "OUT", n_ranks=4, env=FCDP | FAULTS[name])
    assert any("unordered accesses" in text for text in said), said
