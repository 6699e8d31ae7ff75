"""The training cases on torch.device("sim"), 2 nodes x 2 ranks, with every access ordered: FCDP=1 bit for bit as plain FSDP
on the CPU; where the device has numbers of its own, as plain FSDP there. Some of the cases, fixed
(configurations.py), each in one mapping; TEST_MATRIX=whole: all, in both, and plain FSDP there as on the CPU.
TEST_CASES=REGEX: of these those alone."""

import os
import re

import pytest

import cases  # noqa: F401
import launch
import run
from configurations import NOT_THERE, ON_SIM, PLAIN, SIM_PLAIN, THERE, TRAINED, TRAINED_ON_SIM, in_one_mapping, is_whole
from conftest import needs_fcdp

pytestmark = [needs_fcdp, pytest.mark.usefixtures("sim_built")]

# Which numbers are drawn, which operators autocast takes, and its name in a pickle, are the device's own.
# From a device, FSDP1 does not accumulate gradients that it offloads. FSDP2 moves a frozen parameter of a tensor subclass
# there as one that is trained. A device has a thread of its own for backward, and autograd numbers operators per thread:
# what a second derivative is made of runs behind FSDP2's hook there, so some gradients come too late for its reduction.
OWN_NUMBERS = re.compile(
    r"dropout|autocast|random_numbers|fsdp1_checkpoint|groups_without_parameters|pickled|fsdp1_cpu_offload"
    r"|all_gather_extension_frozen|gradient_penalty"
)
ASKED = re.compile(os.environ.get("TEST_CASES", ""))
NAMES = [name for name in TRAINED_ON_SIM if ASKED.search(name)]
# First in each job: a DTensor's pickle has as many meshes as torch has cached of the cases before. And torch keeps what
# an operator made of a mesh for equal ones, whose process groups have ended with their case.
NAMES.sort(key=lambda name: (name != "parameters_are_pickled", "pickled" not in name, name != "whole_over_replicas"))
# Of these, writes that no signal but the bytes tells of are no part.
SIGNALLED = [
    name for name in NAMES if re.search("^(lora|frozen|checkpoint_(ar|wr|pa)|fsdp1_(cpu|full_sh|param|bf|tr))", name)
]
KEPT = [
    name
    for name in NAMES
    if re.search("^(lora|accumulate|fsdp1_trains|reshard_after_forward|prefetch|whole_of_what)", name)
]
DIFFERING = [name for name in NAMES if re.search("^(lora|frozen|edits|exception|full_)", name)]
LARGE = [name for name in ("memory_whole_pages", "memory_odd_sizes") if ASKED.search(name)]  # of tensors of MiBs
OF = {
    "sim-slots": in_one_mapping(NAMES, "slots"),
    "sim-exact": in_one_mapping(NAMES, "exact"),
    "sim-next-use": KEPT,
    "sim-exact-kept": KEPT,
    "sim-signals": SIGNALLED,
    "sim-quarantine": [*(name for name in KEPT if "sync" in name or "lora" in name), *LARGE],
    "sim-delta": DIFFERING,
}
PLAIN_THERE = [name for name in NAMES if is_whole() or OWN_NUMBERS.search(name)] + LARGE


def of_plain(launches):
    return launches.get(PLAIN_THERE, SIM_PLAIN)


def of(launches, configuration):
    return launches.get(OF[configuration], configuration)


def numbers(ranks):
    """What a case recorded, but for what a CPU does not have."""
    return [{**rank, "events": [event for event in rank["events"] if event[0] != "device rng"]} for rank in ranks]


@pytest.mark.parametrize("name", [name for name in TRAINED if name not in THERE and ASKED.search(name)])
def test_what_the_device_does_not_have(name):
    pytest.skip(f"the simulated device has no {next(what for why, what in NOT_THERE.items() if re.search(why, name))}")


def test_some_are_of_each_file():
    files = {case.__module__ for case in THERE.values()}
    assert {run.CASES[name].__module__ for name in TRAINED_ON_SIM} == files and len(files) > 12


@pytest.mark.parametrize("name", PLAIN_THERE)
def test_plain_fsdp_trains_there(launches, name):
    """Without an error, and without two accesses that nothing orders."""
    for rank, result in enumerate(of_plain(launches)[0][name]):
        if result.get("unsupported"):
            pytest.skip(result["unsupported"])
        assert not result["error"], f"rank {rank}: {result['error']}\n{result.get('traceback')}"
        assert result["events"]


@pytest.mark.parametrize("name", [name for name in PLAIN_THERE if name in NAMES and not OWN_NUMBERS.search(name)])
def test_its_numbers_are_the_cpus(launches, name):
    expected = launches.get(NAMES, PLAIN)[0][name]
    if expected[0].get("unsupported"):
        pytest.skip(expected[0]["unsupported"])
    difference = launch.first_difference(expected, numbers(of_plain(launches)[0][name]))
    assert difference is None, difference


@pytest.mark.parametrize("configuration, name", [(c, name) for c in OF for name in OF[c]])
def test_bitwise_equal(launches, configuration, name):
    got = of(launches, configuration)[0][name]
    if name in PLAIN_THERE:
        expected = of_plain(launches)[0][name]
    else:
        expected, got = launches.get(NAMES, PLAIN)[0][name], numbers(got)
    if expected[0].get("unsupported"):
        pytest.skip(expected[0]["unsupported"])
    difference = launch.first_difference(expected, got)
    assert difference is None, difference


def n_plans(results):
    """Of what to keep, in all cases."""
    stats = [result["stats"] for ranks in results.values() for result in ranks if result.get("stats")]
    return sum(after["moves"].get("plans", 0) - before["moves"].get("plans", 0) for before, after in stats)


@pytest.mark.parametrize("configuration", OF)
def test_fcdp_was_really_on(launches, configuration):
    """Equal results prove nothing if the groups were left to FSDP2."""
    if "accumulate_with_sync" not in OF[configuration]:
        pytest.skip("it looks at the case accumulate_with_sync")
    results, jobs = of(launches, configuration)
    assert all(rank["head"]["enabled"] for job in jobs for rank in job.ranks)
    for result in results["accumulate_with_sync"]:
        before, after = (stats["gathers"] for stats in result["stats"])
        assert after["made"] > before["made"] and after["avoided"] > before["avoided"]
        assert after["backward"] == before["backward"]
    if configuration == "sim-next-use":
        assert n_plans(results), "no step was known"


@pytest.mark.skipif(not DIFFERING, reason="TEST_CASES names none")
def test_differences_crossed(launches):
    stats = [r["stats"] for ranks in of(launches, "sim-delta")[0].values() for r in ranks if r.get("stats")]
    crossed = [after["deltas"]["gathers"] - before["deltas"]["gathers"] for before, after in stats]
    assert sum(n > 0 for n in crossed) >= len(crossed) / 2, crossed


assert set(OF) | {SIM_PLAIN} == set(ON_SIM)
