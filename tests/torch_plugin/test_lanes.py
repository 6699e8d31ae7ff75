"""Each of FCDP's connections belongs to one thread: the control group's to the thread that runs the model, a
lane's to the streams'."""

import launch
from configurations import CONFIGURATIONS
from conftest import needs_fcdp


@needs_fcdp
def test_a_lane_is_one_threads(tmp_path):
    job = launch.forked(launch.HERE / "lanes_job.py", [tmp_path], tmp_path, CONFIGURATIONS["tau0-slice"])
    assert not job.timed_out and job.returncode == 0, job.output
    for rank in job.ranks:
        assert rank.pop("control") == [True]
        assert {"node", "inter"} <= rank.keys() and all(by_model == [False] for by_model in rank.values()), rank
