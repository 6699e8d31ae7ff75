"""Each of FCDP's connections belongs to one thread: the control group's to the thread that runs the model, a
lane's to the streams'."""

import json
import os
import subprocess
import sys

import pytest

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


@needs_fcdp
@pytest.mark.parametrize("kind", ["gather", "reduce"])
def test_a_member_that_dies_in_an_exchange_is_missed_at_once(tmp_path, kind):
    """Not only once FCDP_TIMEOUT has passed: gloo tells that a peer has ended to what waits for a message of it that
    has not begun."""
    timeout_s = 100
    job = [sys.executable, launch.HERE / "lane_death_job.py", kind]
    env = {k: v for k, v in os.environ.items() if not k.startswith("FCDP")} | {"GLOO_SOCKET_IFNAME": "lo"}
    members = [
        subprocess.Popen([*job, str(me), tmp_path / "store", str(timeout_s)], env=env, stdout=subprocess.PIPE)
        for me in range(2)
    ]
    try:
        said = json.loads(members[0].communicate(timeout=2 * timeout_s)[0])
    finally:
        for member in members:
            member.kill()
            member.wait()
            member.stdout.close()
    assert not said["came"], "all had come before the other died"
    assert said["error"] and said["seconds"] < timeout_s / 2, said
