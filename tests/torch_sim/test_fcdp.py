"""FCDP=1 on the simulated device, 2 nodes x 2 ranks: bit for bit as plain FSDP, and with every access ordered."""

import tempfile

import pytest

FCDP = {"FCDP": "1", "FCDP_LOCAL_SIZE": "2", "FCDP_TRANSPORT": "torch", "FCDP_TIMEOUT": "60", "FCDP_SIM_RACES": "1"}
ONE_QUEUE = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}  # all streams in one hardware queue, as Megatron asks for
CONFIGURATIONS = {
    "slots": {"FCDP_MAPPING": "slots"},
    "exact": {"FCDP_MAPPING": "exact", "FCDP_TAU": "0"} | ONE_QUEUE,
    "exact-kept": {"FCDP_MAPPING": "exact", "FCDP_TAU": "1"},
    "delta": {"FCDP_CODEC": "delta", "FCDP_MAPPING": "slots"} | ONE_QUEUE,
    "nccl-slots": {"FCDP_TRANSPORT": "nccl", "FCDP_MAPPING": "slots"} | ONE_QUEUE,
    "nccl-exact": {"FCDP_TRANSPORT": "nccl", "FCDP_MAPPING": "exact", "FCDP_TAU": "0"},
    "nccl-delta": {"FCDP_TRANSPORT": "nccl", "FCDP_CODEC": "delta", "FCDP_MAPPING": "slots"} | ONE_QUEUE,
    "nccl-files": {"FCDP_TRANSPORT": "nccl", "FCDP_HOST_BUDGET": "40K", "FCDP_SPILL_DIR": tempfile.gettempdir()},
}
TRANSPORTS = {"torch": "gloo", "nccl": "nccl"}
NOT_NUMBERS = ("ahead", "seconds", "counts", "gathers", "transport", "spill", "deltas")


def train(run_job, env):
    ranks = run_job("training_job.py", "sim", "OUT", n_ranks=4, env=env)
    if env["FCDP"] == "1":
        assert all(rank["gathers"]["avoided"] > 0 for rank in ranks), ranks[0]["gathers"]
        assert {rank["transport"] for rank in ranks} == {TRANSPORTS[env["FCDP_TRANSPORT"]]}
        assert all((rank["deltas"]["gathers"] > 0) == ("FCDP_CODEC" in env) for rank in ranks), ranks[0]["deltas"]
        assert all((rank["deltas"]["by_device"] > 0) == ("FCDP_CODEC" in env) for rank in ranks), ranks[0]["deltas"]
        in_files = "FCDP_SPILL_DIR" in env
        assert all((rank["spill"]["written_bytes"] > 0) == in_files and not rank["spill"]["failures"] for rank in ranks)
    return [{name: found for name, found in rank.items() if name not in NOT_NUMBERS} for rank in ranks]


@pytest.fixture(scope="module")
def plain(run_job):
    return train(run_job, {"FCDP": "0"})


FURTHER = ("exact-kept", "nccl-exact")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.further if name in FURTHER else ()) for name in CONFIGURATIONS]
)
def test_training_is_plain_fsdps_bit_for_bit(name, run_job, plain):
    assert len(plain[0]) > 10
    assert train(run_job, FCDP | CONFIGURATIONS[name]) == plain


def test_gloo_is_given_host_memory_alone(run_job):
    """As on a GPU: copies stage what it carries. Where the host computes, it packs device memory itself."""
    for rank in run_job("gloo_job.py", "OUT", n_ranks=4, env=FCDP):
        assert rank["kinds"] == ["host"] and rank["bypassed"] == [], rank
        assert not any("over gloo" in line for line in rank["said"]), rank


@pytest.mark.parametrize("codec", ["auto", "int8"])
def test_of_a_device_no_codec_but_delta_sends_anything(codec, run_job):
    for rank in run_job("gloo_job.py", "OUT", n_ranks=4, env=FCDP | {"FCDP_CODEC": codec}):
        assert (
            rank["deltas"] == {"gathers": 0, "whole": 0, "by_device": 0, "rounding_error": None}
            and not rank["bypassed"]
        ), rank


def test_where_nccl_cannot_serve_gloo_does_and_says_so(run_job):
    env = FCDP | {"FCDP_TRANSPORT": "auto", "FCDP_NCCL_LIBRARY": "/nowhere/libnccl.so.2", "FCDP_RESTORE": "slice"}
    first, *others = run_job("gloo_job.py", "OUT", n_ranks=4, env=env)
    assert first["kinds"] == ["host"] and not any("gloo" in line for rank in others for line in rank["said"]), others
    of_nccl, of_slices = (line for line in first["said"] if "gloo" in line)
    assert of_nccl.startswith("its collectives go over gloo, through host memory, as NCCL cannot carry them (rank 0: ")
    assert "/nowhere/libnccl.so.2" in of_nccl and of_nccl.endswith("); FCDP_TRANSPORT=torch silences this"), of_nccl
    assert of_slices == (
        "FCDP_RESTORE=slice is for NCCL: over gloo the ranks of a node meet in host memory, as with FCDP_RESTORE=whole"
    )


def test_over_gloo_groups_are_in_files_where_a_node_has_one_rank(run_job, tmp_path):
    """With several, they would meet in the host memory that is too small: what serves is said."""
    for local_size in ("2", "1"):
        env = FCDP | {"FCDP_LOCAL_SIZE": local_size, "FCDP_HOST_BUDGET": "40K", "FCDP_SPILL_DIR": str(tmp_path)}
        for rank in run_job("gloo_job.py", "OUT", n_ranks=4, env=env):
            if local_size == "1":
                assert rank["bypassed"] == [], rank
                continue
            why = "over gloo the ranks of a node meet in host memory, so FCDP_SPILL_DIR does not serve"
            assert rank["bypassed"] and all(why in reason for reason in rank["bypassed"]), rank
            assert "it does over NCCL, and with one rank on a node" in rank["bypassed"][0], rank


@pytest.mark.parametrize("fcdp", "01")
def test_what_plain_fsdp_orders_on_several_streams_stays_ordered(fcdp, run_job):
    for rank in run_job("streams_job.py", "all", "OUT", n_ranks=4, env=FCDP | {"FCDP": fcdp}):
        assert len(rank) == 5 and set(rank.values()) == {"ordered"}, rank


SLICES = {"FCDP_RESTORE": "slice", "FCDP_TRANSPORT": "nccl"}
FAULTS = {  # a set of faults_job.py's: its options, and how many there are
    "all": ({}, 19),
    "slices": (SLICES, 3),
    "differences": (SLICES | {"FCDP_CODEC": "delta", "FCDP_PREFETCH": "4"}, 5),
}


@pytest.mark.parametrize("which", FAULTS)
def test_every_planted_fault_of_order_is_found(which, run_job):
    """But for "none", of which nothing is to be found. A fault may also end the job; another one finds the rest."""
    options, n = FAULTS[which]
    env = FCDP | options
    names, found = which, {}
    while names:
        ranks = run_job("faults_job.py", names, "OUT", n_ranks=4, env=env)
        begun = {name: [rank.get(name, "nothing") for rank in ranks] for name in ranks[0] if name != "left"}
        assert begun
        found |= begun
        names = ",".join(ranks[0]["left"])
    words = {name: {words.split(":")[0] for words in of_ranks} for name, of_ranks in found.items()}
    assert words.pop("none", {"nothing"}) == {"nothing"}
    assert len(words) == n
    for name, by in words.items():
        assert ("bytes" if name == "a peer's words are not waited for" else "race") in by, (name, found[name])


def test_saving_does_not_wait_for_collectives_that_wait_for_python(run_job):
    """torch.save copies a storage with the GIL held; collectives over gloo want it, on the device's streams."""
    sizes = run_job("saves_job.py", "OUT", n_ranks=4, env=FCDP, timeout_s=150)
    assert len(sizes) == 4 and all(sizes)


def test_a_call_that_keeps_the_gil_may_wait_for_differences(run_job):
    """Beside NCCL no exchange needs Python. Over gloo this hangs, as docs/limits.md says."""
    env = FCDP | CONFIGURATIONS["nccl-delta"] | {"FCDP_COALESCE": "0"}
    for rank in run_job("gil_job.py", "OUT", n_ranks=4, env=env, timeout_s=100):
        assert rank["meanwhile"] > 0 and rank["python_calls"] == 0, rank
