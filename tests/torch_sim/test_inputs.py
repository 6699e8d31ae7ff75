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
