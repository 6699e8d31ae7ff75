"""fcdp.sleep() and fcdp.wake() between the steps of a training on the simulated device, 2 nodes x 2 ranks: bit for bit
the training that does not sleep, and nothing on the device while it does."""

import pytest

from test_device_memory import FCDP, RACES, numbers

MODES = {
    "plain": RACES,
    "slots": FCDP,
    "default": FCDP | {"FCDP_TAU": ""},
    "exact-kept": FCDP | {"FCDP_MAPPING": "exact", "FCDP_TAU": "1"},
}


@pytest.fixture(scope="module")
def train(run_job):
    return lambda name, env: run_job("sleep_job.py", name, "OUT", n_ranks=4, env=env)


@pytest.fixture(scope="module")
def well(train):
    return numbers(train("twenty_steps", RACES))


@pytest.mark.parametrize("mode", MODES)
def test_a_job_sleeps_between_its_steps(mode, train, well):
    ranks = train("sleeps_between_steps", MODES[mode])
    assert numbers(ranks) == well
    for rank in ranks:
        for night in rank["nights"]:
            assert night["before"] > 12 << 20 and night["asleep"] == 0, night
            assert night["away"] == night["down"]["freed_bytes"] and night["parameters"] == (mode != "plain"), night
            assert 0 < night["down"]["copied_bytes"] <= night["down"]["live_bytes"], night
            assert night["up"]["copied_bytes"] == night["down"]["live_bytes"] - (12 << 20), night
            assert night["again"]["copied_bytes"] == 0, night
            assert "tensors are asleep: call fcdp.wake()" in night["said"], night
            assert night["changed"] == (
                "fcdp.changed(): tensors of this process are asleep, and their bytes cannot be read. Call fcdp.wake() first"
            ), night
            if mode == "plain":
                continue
            assert "'blocks.0' cannot be gathered: FCDP is asleep" in night["unsharded"], night["unsharded"]
            assert "fcdp.wake()" in night["unsharded"], night["unsharded"]
            assert len(night["read"]) == 3 and all("asleep" in said and "fcdp.wake()" in said for said in night["read"])


@pytest.mark.parametrize("mode", ["plain", "default"])
def test_tagged_tensors_sleep_while_the_job_trains(mode, train, well):
    assert numbers(train("tagged_tensors_sleep", MODES[mode])) == well


def test_a_sleep_that_fails_leaves_what_it_found(train, well):
    assert numbers(train("sleeps_that_fail", MODES["default"])) == well


@pytest.mark.parametrize("mode", ["plain", "default"])
def test_a_job_may_end_asleep(mode, train):
    train("ends_asleep", MODES[mode])


def test_a_peer_that_dies_asleep_is_named(train):
    ranks = train("a_peer_dies_asleep", FCDP | {"FCDP_TIMEOUT": "10"})
    assert len(ranks) == 3 and all("did not come: rank 3" in rank["said"] for rank in ranks), ranks
