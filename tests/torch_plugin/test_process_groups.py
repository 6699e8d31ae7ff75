"""What belongs to a process group goes with it: a job that destroys its groups and makes new ones holds no more
at the end."""

import pytest

import launch
from configurations import CONFIGURATIONS, PLAIN
from conftest import needs_fcdp

TIMES = 8


def run(tmp_path, configuration):
    job = launch.forked(
        launch.HERE / "process_groups_job.py", [TIMES, tmp_path], tmp_path, CONFIGURATIONS.get(configuration)
    )
    assert not job.timed_out and job.returncode == 0, job.output
    assert all(len(rank["held"]) == TIMES for rank in job.ranks)
    return job.ranks, job.output


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return run(tmp_path_factory.mktemp("plain"), PLAIN)[0]


@needs_fcdp
@pytest.mark.parametrize("configuration", ["tau0-slice", "tau1-whole"])
def test_destroying_process_groups_leaves_nothing(tmp_path, plain, configuration):
    served, output = run(tmp_path / "served", configuration)
    assert "plain FSDP2 for" not in output
    for rank, (a, b) in enumerate(zip(plain, served)):
        assert a["losses"] == b["losses"]
        third, last = b["held"][2], b["held"][-1]  # by then everything that is made once is there
        for what in ("descriptors", "threads"):
            assert last[what] <= third[what], (
                f"rank {rank}: {what} {[h[what] for h in b['held']]}; plain {[h[what] for h in a['held']]}"
            )
        grown = last["maps"] - third["maps"]
        assert grown <= max(8, a["held"][-1]["maps"] - a["held"][2]["maps"]), (
            f"rank {rank}: maps {[h['maps'] for h in b['held']]}"
        )
