"""How often a cached unshard and reshard go from Python to C: once each for the unshard, the wait and the reshard."""

import launch
from conftest import CONFIGURATIONS, needs_fcdp


@needs_fcdp
def test_a_cached_unshard_and_reshard_cross_three_times(tmp_path):
    job = launch.forked(launch.HERE / "crossings_job.py", [tmp_path], tmp_path, CONFIGURATIONS["tau0-whole"])
    assert not job.timed_out and job.returncode == 0, job.output
    for pairs in job.ranks:
        assert len(pairs) == 9, pairs
        assert all(sum(calls.values()) <= 3 for calls in pairs), pairs
        assert all(calls["unshard"] == 1 for calls in pairs), pairs
