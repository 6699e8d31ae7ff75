"""Memory of trainings on the simulated device, 2 nodes x 2 ranks: an out-of-memory is torch's own exception and training
goes on behind it; every view of the allocator's figures says the same."""

import pathlib

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]

RACES = {"FCDP": "0", "FCDP_SIM_RACES": "1"}
FCDP = RACES | {"FCDP": "1", "FCDP_LOCAL_SIZE": "2", "FCDP_TAU": "0", "FCDP_TRANSPORT": "torch", "FCDP_TIMEOUT": "60"}
MODES = {
    "plain": RACES,
    "slots": FCDP | {"FCDP_MAPPING": "slots"},
    "exact-kept": FCDP | {"FCDP_MAPPING": "exact", "FCDP_TAU": "1"},
}
SMALL = {"FCDP_DEVICE_BUDGET": "64M"}
BURSTS_BUDGET = "44M"  # plain FSDP2 needs 36
MIB = 1 << 20


@pytest.fixture(scope="module")
def train(run_job):
    def run(name, env):
        return run_job("memory_job.py", name, "OUT", n_ranks=4, env=env)

    return run


def numbers(ranks):
    return [{name: rank[name] for name in ("losses", "parameters")} for rank in ranks]


@pytest.fixture(scope="module")
def well(train):
    ranks = numbers(train("nothing_fails", RACES))
    assert len(set(ranks[0]["losses"])) == 5  # it trained
    return ranks


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["allocations_fail_between", "forwards_fail", "backwards_fail"])
def test_training_goes_on_behind_an_out_of_memory(name, mode, train, well):
    """Bit for bit as a run without the failed attempts."""
    assert numbers(train(name, MODES[mode])) == well


@pytest.mark.parametrize("mode", MODES)
def test_a_failed_attempt_leaves_nothing_behind(mode, train):
    for rank in train("nothing_leaks", MODES[mode]):
        assert len(set(rank["well"] + rank["failed"])) == 1, rank


def test_a_gather_without_memory_is_torchs_out_of_memory(train):
    """As plain FSDP2's, whose gathers are tensors."""
    ranks = {mode: numbers(train("gathers_fail", MODES[mode] | SMALL)) for mode in MODES}
    assert ranks["slots"] == ranks["exact-kept"] == ranks["plain"]


def test_a_storage_that_grows_does_not_wait_for_collectives_with_the_gil(train):
    assert all(rank["bytes"] == 40 << 20 for rank in train("a_storage_grows", FCDP | SMALL))


def test_an_emptied_cache_does_not_wait_for_collectives_with_the_gil(train):
    assert all(rank["given_back"] > 0 for rank in train("a_cache_is_emptied", FCDP | SMALL))


def test_kept_groups_go_before_a_tensor_is_refused(train):
    plain = train("kept_groups_make_room", RACES | SMALL)
    ranks = train("kept_groups_make_room", MODES["exact-kept"] | SMALL)
    assert numbers(ranks) == numbers(plain)
    for rank in ranks:
        before, during = rank["before"], rank["during"]
        assert before["device_bytes"]["current"] > 0 == during["device_bytes"]["current"], rank
        assert during["moves"]["evictions"] > before["moves"]["evictions"], rank
        assert rank["n_ooms"] == 1 and "gathered parameters 0 B" in rank["said"], rank


@pytest.mark.parametrize("mode, prefetch", [("slots", "1"), ("slots", "2"), ("exact", "1")])
def test_a_restore_that_finds_no_memory_ahead_of_its_use_is_put_off(mode, prefetch, train, well):
    """By a rank alone: it is a copy from host memory."""
    ranks = train(
        "restores_are_put_off", FCDP | {"FCDP_MAPPING": mode, "FCDP_RESTORE": "whole", "FCDP_PREFETCH": prefetch}
    )
    assert numbers(ranks) == well
    assert [rank["n_refused"] > 5 for rank in ranks] == [False, True, True, False], ranks


@pytest.mark.parametrize("mode", MODES)
def test_every_view_of_the_memory_agrees(mode, train):
    """memory_stats() of torch.sim and of torch.accelerator, a snapshot, and what fcdp-memtrace reads."""
    for rank in train("every_view_agrees", MODES[mode] | {"FCDP_TRACE": "2"}):
        at_the_peak, at_the_end, reset = rank["views"]
        for view in rank["views"]:
            check_current(view["told"], view["traced"])
        for view in (at_the_peak, at_the_end):
            check_peaks(view["told"]["stats"], view["traced"])
        assert (
            at_the_peak["told"]["stats"]["allocated_bytes.all.current"]
            > 1.2 * (at_the_end["told"]["stats"]["allocated_bytes.all.current"])
        )
        stats = reset["told"]["stats"]
        assert stats["allocated_bytes.all.peak"] == stats["allocated_bytes.all.current"] < rank["peak_before_reset"]
        assert stats["num_ooms"] == stats["allocation.all.allocated"] == 0


def check_current(told, traced):
    stats, counters, snapshot = told["stats"], traced["counters"], told["snapshot"]
    assert told["accelerator_stats"] == stats and told["accelerator"] == told["sim"]
    assert stats["allocated_bytes.all.current"] == traced["allocated"] == snapshot["allocated"]
    assert stats["requested_bytes.all.current"] == snapshot["requested"]
    assert stats["allocation.all.current"] == traced["n_live"] == snapshot["n_live"]
    reserved = stats["reserved_bytes.all.current"]
    assert reserved == traced["reserved"] == counters["device.tensors_bytes"] == snapshot["reserved"]


def check_peaks(stats, traced):
    counters = traced["counters"]
    assert 0 <= traced["most_allocated"] - stats["allocated_bytes.all.peak"] < 4 * MIB  # of 3 arenas, all but one
    reserved = stats["reserved_bytes.all.peak"]
    assert reserved == traced["most_reserved"] == counters["device.tensors_peak_bytes"]
    assert reserved < 64 * MIB  # an allocation in vain has had none
    assert stats["allocation.all.allocated"] == traced["n_allocated"]
    assert stats["num_ooms"] == counters["device.ooms"] > 0


def test_tensors_take_hardly_more_pages_than_bytes(run_job):
    """The demo's GPT by plain FSDP2 over 2 ranks, with 707 MiB of tensors at its peak, in the memory of 720."""
    options = ("--dim", "1008", "--heads", "8", "--layers", "6", "--seq", "16", "--steps", "2")
    env = {"FCDP": "0", "FCDP_DEVICE_BUDGET": "720M"}
    for rank in run_job(ROOT / "tools/bench/pressure/job.py", "OUT", *options, n_ranks=2, env=env):
        assert rank["tensors_peak_bytes"] > 700 * MIB
        assert rank["reserved_peak_bytes"] <= 1.02 * rank["tensors_peak_bytes"], rank


def test_policies_share_the_memory_with_tensors_that_come_and_go(run_job):
    """The demo's GPT in hardly more memory than plain FSDP2 needs, with random allocations beside it: no policy runs out
    of memory, and all train bit for bit the same."""
    options = ("--dim", "168", "--layers", "4", "--steps", "6", "--batch", "2")
    job = ROOT / "tools/bench/pressure/job.py"
    env = {"PRESSURE_BURSTS": "1", "FCDP_DEVICE_BUDGET": BURSTS_BUDGET}
    policies = {"plain": {"FCDP": "0"}, "tau": FCDP | {"FCDP_TAU": "1"}, "next-use": FCDP | {"FCDP_TAU": ""}}
    found = {name: run_job(job, "OUT", *options, n_ranks=4, env=env | policies[name]) for name in policies}
    for name in ("tau", "next-use"):
        assert numbers(found[name]) == numbers(found["plain"])
        assert {rank["policy"] for rank in found[name]} == {name}
        assert all(rank["gathers"]["avoided"] > 0 for rank in found[name])
    assert all(rank["moves"]["plans"] > 0 for rank in found["next-use"])
