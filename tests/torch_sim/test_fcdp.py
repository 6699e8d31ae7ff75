"""FCDP=1 on the simulated device, 2 nodes x 2 ranks: bit for bit as plain FSDP, and with every access ordered."""

import pytest

FCDP = {"FCDP": "1", "FCDP_LOCAL_SIZE": "2", "FCDP_TRANSPORT": "torch", "FCDP_TIMEOUT": "60", "FCDP_SIM_RACES": "1"}
ONE_QUEUE = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}  # all streams in one hardware queue, as Megatron asks for
CONFIGURATIONS = {
    "slots": {"FCDP_MAPPING": "slots"},
    "exact": {"FCDP_MAPPING": "exact"} | ONE_QUEUE,
    "exact-kept": {"FCDP_MAPPING": "exact", "FCDP_TAU": "1"},
    "nccl-slots": {"FCDP_TRANSPORT": "nccl", "FCDP_MAPPING": "slots"} | ONE_QUEUE,
    "nccl-exact": {"FCDP_TRANSPORT": "nccl", "FCDP_MAPPING": "exact"},
}
TRANSPORTS = {"torch": "gloo", "nccl": "nccl"}
NOT_NUMBERS = ("ahead", "seconds", "counts", "gathers", "transport")


def train(run_job, env):
    ranks = run_job("training_job.py", "sim", "OUT", n_ranks=4, env=env)
    if env["FCDP"] == "1":
        assert all(rank["gathers"]["avoided"] > 0 for rank in ranks), ranks[0]["gathers"]
        assert {rank["transport"] for rank in ranks} == {TRANSPORTS[env["FCDP_TRANSPORT"]]}
    return [{name: found for name, found in rank.items() if name not in NOT_NUMBERS} for rank in ranks]


@pytest.fixture(scope="module")
def plain(run_job):
    return train(run_job, {"FCDP": "0"})


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_training_is_plain_fsdps_bit_for_bit(name, run_job, plain):
    assert len(plain[0]) > 10
    assert train(run_job, FCDP | CONFIGURATIONS[name]) == plain


def test_gloo_is_given_host_memory_alone(run_job):
    """As on a GPU: copies stage what it carries. Where the host computes, it packs device memory itself."""
    assert run_job("gloo_job.py", "OUT", n_ranks=4, env=FCDP) == [["host"]] * 4


def test_a_seam_without_a_fault_raises_nothing(run_job):
    assert run_job("faults_job.py", "none", "OUT", n_ranks=4, env=FCDP) == ["nothing"] * 4


@pytest.mark.parametrize("mapping", ["slots", "exact"])
def test_the_pages_pass_on_behind_a_recorded_stream(mapping, run_job):
    name, env = "a_stream_that_was_recorded_reads_parameters", FCDP | {"FCDP_MAPPING": mapping}
    assert run_job("faults_job.py", name, "OUT", n_ranks=4, env=env) == ["nothing"] * 4


HOOK = {"FCDP_AGREE": "unshard", "FCDP_FINGERPRINT": "never", "FCDP_COALESCE": "0"}


def test_a_cast_waits_for_what_a_hook_writes(run_job):
    name = "a_hook_writes_what_the_next_gather_casts"
    assert run_job("faults_job.py", name, "OUT", n_ranks=4, env=FCDP | HOOK) == ["nothing"] * 4


FAULTS = {
    "the_compute_does_not_wait_for_the_gather": {},
    "the_pages_pass_on_before_the_compute_is_over": {},
    "the_fingerprint_does_not_wait_for_the_write": {},
    "a_stream_that_was_not_recorded_reads_parameters": {},
    # the host's wait for fingerprints, and one gather of several small groups, would hide it
    "the_gather_does_not_wait_for_the_optimizer": {"FCDP_FINGERPRINT": "never", "FCDP_COALESCE": "0"},
    "the_inputs_are_made_where_others_are_still_read": {"FCDP_COALESCE": "0"},
    "the_cast_does_not_wait_for_what_a_hook_writes": HOOK,
}


@pytest.mark.parametrize(
    "name, transport", [*((name, "torch") for name in FAULTS), ("the_compute_does_not_wait_for_the_gather", "nccl")]
)
def test_a_fault_of_order_is_found(name, transport, run_job):
    said = run_job("faults_job.py", name, "OUT", n_ranks=4, env=FCDP | FAULTS[name] | {"FCDP_TRANSPORT": transport})
    assert any("unordered accesses" in text for text in said), said
