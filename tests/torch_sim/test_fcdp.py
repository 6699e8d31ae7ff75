"""FCDP=1 on the simulated device, 2 nodes x 2 ranks: bit for bit as plain FSDP, and with every access ordered."""

import pytest

FCDP = {"FCDP": "1", "FCDP_LOCAL_SIZE": "2", "FCDP_TRANSPORT": "torch", "FCDP_TIMEOUT": "60", "FCDP_SIM_RACES": "1"}
CONFIGURATIONS = {
    "slots": {"FCDP_MAPPING": "slots"},
    "exact": {"FCDP_MAPPING": "exact"},
    "exact-kept": {"FCDP_MAPPING": "exact", "FCDP_TAU": "1"},
}
NOT_NUMBERS = ("ahead", "seconds", "counts", "gathers")


def train(run_job, env):
    ranks = run_job("training_job.py", "sim", "OUT", n_ranks=4, env=env)
    assert env["FCDP"] == "0" or all(rank["gathers"]["avoided"] > 0 for rank in ranks), ranks[0]["gathers"]
    return [{name: found for name, found in rank.items() if name not in NOT_NUMBERS} for rank in ranks]


@pytest.fixture(scope="module")
def plain(run_job):
    return train(run_job, {"FCDP": "0"})


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_training_is_plain_fsdps_bit_for_bit(name, run_job, plain):
    assert len(plain[0]) > 10
    assert train(run_job, FCDP | CONFIGURATIONS[name]) == plain


def test_a_seam_without_a_fault_raises_nothing(run_job):
    assert run_job("faults_job.py", "none", "OUT", n_ranks=4, env=FCDP) == ["nothing"] * 4


FAULTS = {
    "the_compute_does_not_wait_for_the_gather": {},
    "the_pages_pass_on_before_the_compute_is_over": {},
    "the_fingerprint_does_not_wait_for_the_write": {},
    # the host's wait for fingerprints, and one gather of several small groups, would hide it
    "the_gather_does_not_wait_for_the_optimizer": {"FCDP_FINGERPRINT": "never", "FCDP_COALESCE": "0"},
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_order_is_found(name, run_job):
    said = run_job("faults_job.py", name, "OUT", n_ranks=4, env=FCDP | FAULTS[name])
    assert any("unordered accesses" in text for text in said), said


def test_saving_does_not_wait_for_collectives_that_wait_for_python(run_job):
    """torch.save copies a storage with the GIL held; collectives over gloo want it, on the device's streams."""
    sizes = run_job("saves_job.py", "OUT", n_ranks=4, env=FCDP, timeout_s=150)
    assert len(sizes) == 4 and all(sizes)
