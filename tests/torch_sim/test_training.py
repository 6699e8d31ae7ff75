"""FSDP trains on the simulated device as on the CPU, bit for bit, and behind the host."""

import statistics

import pytest

AS_ON_THE_CPU = (
    "fsdp2",
    "fsdp2_clip",
    "fsdp2_bf16",
    "fsdp2_keep",
    "fsdp2_checkpoint",
    "fsdp2_lora",
    "fsdp2_meta",
    "fsdp1",
)


@pytest.fixture(scope="module")
def on_sim(run_job):
    """With every access checked: what these jobs do on several streams is ordered."""
    return run_job("training_job.py", "sim", "OUT", n_ranks=2, env={"FCDP_SIM_RACES": "1"})


@pytest.fixture(scope="module")
def on_cpu(run_job):
    return run_job("training_job.py", "cpu", "OUT", n_ranks=2)


@pytest.mark.parametrize("name", AS_ON_THE_CPU)
def test_training_is_the_cpus_bit_for_bit(name, on_cpu, on_sim):
    assert [rank[name] for rank in on_sim] == [rank[name] for rank in on_cpu]
    assert len(set(on_sim[0][name]["losses"])) == 3  # it trained


def test_activation_checkpointing_repeats_dropout(on_sim):
    for rank in on_sim:
        assert rank["dropout"] == rank["dropout_checkpoint"] != rank["fsdp2"]


def test_autocast_trains(on_sim):
    for rank in on_sim:
        assert rank["autocast"]["losses"] != rank["fsdp2"]["losses"]


def test_the_host_is_ahead_of_the_device(on_sim):
    """Most of a step is still to be computed when the host has enqueued all of it."""
    for rank in on_sim:
        assert statistics.median(rank["ahead"]) > 0.3, rank["ahead"]


def test_every_collective_is_gloos(run_job):
    for rank in run_job("collectives_job.py", "OUT", n_ranks=2, env={"FCDP_SIM_RACES": "1"}):
        assert {name: said for name, said in rank.items() if said != "equal"} == {}
