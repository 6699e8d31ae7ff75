"""FCDP trains bit for bit as plain FSDP does, on four ranks that stand for two nodes of two: every third case, and of
those that are alike every eighth, each in one configuration (configurations.py). TEST_MATRIX=whole: every case, in all.
TEST_CASES=REGEX: of these cases alone."""

import os
import re

import pytest

import cases  # noqa: F401
import launch
from configurations import COLD, CONFIGURATIONS, PLAIN, TRAINED, configurations_of
from conftest import needs_fcdp

# Cases after which plain FSDP2's model is alive as well (the hooks of CommDebugMode are in a cycle through autograd's
# nodes); they run last.
KEPT_BY_TORCH = ("counted_by_comm_debug_mode",)
ASKED = re.compile(os.environ.get("TEST_CASES", ""))
# Cases that run first: what DTensor has cached of others, such as their meshes, would be in the files that they write.
WRITE_FILES = re.compile("_are_pickled")
NAMES = sorted(filter(ASKED.search, TRAINED), key=lambda name: (name in KEPT_BY_TORCH, not WRITE_FILES.search(name)))


def names_of(configuration):
    return [name for name in NAMES if configuration == PLAIN or configuration in configurations_of(name)]


def of_matrix(launches, configuration):
    """The results of its cases, and the jobs that they came from."""
    return launches.get(names_of(configuration), configuration, warm=configuration != COLD)


def each_in_its_configurations(names):
    """Of a test: its parameters `configuration` and `name`. By configuration, as each is one job."""
    together = [(c, name) for c in CONFIGURATIONS for name in names if name in names_of(c)]
    return pytest.mark.parametrize("configuration, name", together, ids=["-".join(pair) for pair in together])


@pytest.fixture(scope="session")
def plain(launches):
    return of_matrix(launches, PLAIN)


@pytest.mark.parametrize("name", NAMES)
def test_plain_fsdp2_runs_the_case(plain, name):
    """What FCDP is compared with is a run that FSDP2 itself finished."""
    results, _ = plain
    for rank, result in enumerate(results[name]):
        if result.get("unsupported"):
            pytest.skip(result["unsupported"])
        assert not result["error"], f"rank {rank}: {result['error']}\n{result.get('traceback')}"
        assert result["events"]


def test_unset_nothing_of_ours_is_imported(plain):
    for job in plain[1]:
        for rank in job.ranks:
            assert rank["head"]["modules"] == [] and rank["head"]["mapped"] == []
        assert "fcdp:" not in job.output


@needs_fcdp
@each_in_its_configurations(NAMES)
def test_bitwise_equal(plain, launches, configuration, name):
    expected = plain[0][name]
    if expected[0].get("unsupported"):
        pytest.skip(expected[0]["unsupported"])
    got = of_matrix(launches, configuration)[0][name]
    difference = launch.first_difference(expected, got)
    assert difference is None, difference


@needs_fcdp
@pytest.mark.parametrize("configuration", CONFIGURATIONS)
def test_fcdp_was_really_on(launches, configuration):
    """Equal results prove nothing if the groups were left to FSDP2."""
    if "accumulate_with_sync" not in NAMES:
        pytest.skip("it looks at the case accumulate_with_sync")
    results, jobs = of_matrix(launches, configuration)
    for job in jobs:
        assert all(rank["head"]["enabled"] for rank in job.ranks)
    tau, restore = configuration.split("-")
    for rank, result in enumerate(results["accumulate_with_sync"]):
        before, after = result["stats"]
        assert after["enabled"]
        topology = after["topology"]
        assert (topology["nodes"], topology["ranks_per_node"]) == (2, 2)
        assert (topology["node"], topology["local_rank"]) == divmod(rank, 2)
        change = {k: after["gathers"][k] - before["gathers"][k] for k in ("made", "avoided", "forward", "backward")}
        assert change["made"] > 0 and change["avoided"] > change["made"] and change["backward"] == 0, change
        has_copies = "FCDP_HOST_COPIES" in CONFIGURATIONS[configuration] and len(os.sched_getaffinity(0)) > 1
        assert after["host"]["copies"] == 1 + has_copies
        moved = {k: after["moves"][k] - before["moves"][k] for k in ("h2d_bytes", "d2h_bytes")}
        restored = after["collectives"].get("restore", {}).get("calls", 0) - before["collectives"].get(
            "restore", {}
        ).get("calls", 0)
        if tau == "tau0":
            assert moved["d2h_bytes"] > 0 and moved["h2d_bytes"] > 0, moved
            assert (restored > 0) == (restore == "slice"), restored


OUTLIVED = {
    "backward_of_a_block_left_sharded": ["blocks.1.2.weight"],
    "backward_of_a_root_left_sharded": ["head.weight"],
    "views_that_outlive_a_reshard": ["blocks.1.up.weight"],
    "a_tensor_that_autograd_saved": ["blocks.0.up.weight"],
    "an_evaluation_between_the_views_and_their_use": ["blocks.0.up.weight", "embed.weight"],
}


@needs_fcdp
@each_in_its_configurations(OUTLIVED)
def test_what_outlives_a_reshard_is_named(launches, configuration, name):
    """Plain FSDP2 raises there too (it is in the record that is compared); FCDP also says which parameter that was."""
    for result in of_matrix(launches, configuration)[0][name]:
        if result.get("unsupported"):
            pytest.skip(result["unsupported"])
        assert result["extra"], "nothing was raised"
        for text in result["extra"].values():
            assert any(f"gathered parameter {parameter} was used" in text for parameter in OUTLIVED[name]), text


@needs_fcdp
@each_in_its_configurations(["a_reduction_that_the_backend_refuses"])
def test_an_error_of_fsdp2s_own_is_followed_by_what_fcdp_knows(launches, configuration, name):
    """Its own words first: those are in the record that is compared."""
    for result in of_matrix(launches, configuration)[0][name]:
        if result.get("unsupported"):
            pytest.skip(result["unsupported"])
        assert any(note.startswith("fcdp: the gradients of blocks.1.") for note in result["extra"]["notes"]), result[
            "extra"
        ]


@needs_fcdp
@each_in_its_configurations(["two_parameter_groups_of_one_block"])
def test_groups_of_one_block_have_names_that_differ(launches, configuration, name):
    for result in of_matrix(launches, configuration)[0][name]:
        if result.get("unsupported"):
            pytest.skip(result["unsupported"])
        groups = [group for group, _ in result["extra"]["groups"]]
        assert groups == [f"{block}[{i} of 2]" for block in ("", "blocks.0 ", "blocks.1 ", "blocks.2 ") for i in (1, 2)]
        # the root's stay gathered
        assert all(avoided for group, avoided in result["extra"]["groups"] if not group.startswith("["))


@needs_fcdp
@pytest.mark.parametrize("configuration", CONFIGURATIONS)
def test_three_lines_from_one_rank(launches, configuration):
    for job in of_matrix(launches, configuration)[1]:
        if job.returncode == 0:
            lines = [
                line
                for line in job.output.splitlines()
                if line.startswith("fcdp:") and not re.search(r"plain FSDP\d runs", line)
            ]
            assert [line.split()[1] for line in lines] == ["serving", "saved", "cost"], lines


@needs_fcdp
@pytest.mark.parametrize("configuration", CONFIGURATIONS)
def test_a_dead_model_holds_no_bytes(launches, configuration):
    """After every case its models are gone: what is in use must not grow from case to case."""
    results, jobs = of_matrix(launches, configuration)
    if len(jobs) > 1:
        pytest.skip("the job was started more than once")
    if not results:
        pytest.skip("none of the cases that were asked for train in it")
    ordered = [results[name] for name in results if name not in KEPT_BY_TORCH and not results[name][0].get("error")]
    for rank in range(launch.WORLD):
        device = [r[rank]["stats"][1]["device_bytes"]["current"] for r in ordered]
        host = [r[rank]["stats"][1]["host_bytes"]["current"] for r in ordered]
        # Exceptions and compiled code may keep one model alive for a while; a leak keeps them all.
        assert min(device[-10:]) == 0, device[-10:]
        if rank % 2 == 0:  # the node's first rank gives host memory back, when it is asked; others may have read before
            assert min(host[-10:]) == 0, host[-10:]
