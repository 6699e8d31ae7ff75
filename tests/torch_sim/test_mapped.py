"""FCDP_HOST_MAP on the simulated device, 2 nodes x 2 ranks: an embedding that the device reads in host memory takes none
of the device's, nothing of it is restored, and training is plain FSDP's bit for bit."""

import json
import os

import pytest

FCDP = {"FCDP": "1", "FCDP_LOCAL_SIZE": "2", "FCDP_TRANSPORT": "torch", "FCDP_TIMEOUT": "60", "FCDP_SIM_RACES": "1"}
ON = FCDP | {"FCDP_POLICY": "tau", "FCDP_TAU": "0", "FCDP_HOST_MAP": "tokens"}
CASES = ("trained", "frozen")  # and "written", whose copy is gathered again where it is kept
WHOLE = os.environ.get("TEST_MATRIX") == "whole"
# With everything else that may decide where a group lives.
OTHERS = {
    "next-use, asleep": (FCDP | {"FCDP_HOST_MAP": "nothing, to*"}, "asleep"),
    "nccl-exact": (ON | {"FCDP_TRANSPORT": "nccl", "FCDP_MAPPING": "exact", "FCDP_CHECK": "3"}, ""),
    "nccl-kept": (ON | {"FCDP_TRANSPORT": "nccl", "FCDP_TAU": "1"}, "asleep"),
    "copies": (ON | {"FCDP_HOST_COPIES": "numa", "FCDP_MAPPING": "exact", "FCDP_CHECK": "3"}, ""),
}


def numbers(ranks):
    return [
        [rank[case][what] for case in (*CASES, "written") for what in ("losses", "whole", "parameters")]
        for rank in ranks
    ]


@pytest.fixture(scope="module")
def train(run_job):
    return lambda env, how="": run_job("mapped_job.py", "OUT", how, n_ranks=4, env=env)


@pytest.fixture(scope="module")
def plain(train):
    return numbers(train(FCDP | {"FCDP": "0"}))


@pytest.fixture(scope="module")
def unmapped(train):
    """Rank 1's driver has no such memory."""
    return train(ON, "refused")


@pytest.fixture(scope="module")
def mapped(train):
    return train(ON)


def test_training_is_plain_fsdps(plain, mapped):
    assert plain[0][3] != plain[0][6] and numbers(mapped) == plain
    for rank in mapped:
        assert all(rank[case]["fcdp"]["tokens"]["state"] == "mapped" for case in CASES)
        assert all(
            [name for name, is_mapped in rank[case]["fcdp"]["traced"].items() if is_mapped] == ["tokens"]
            for case in CASES
        )
        assert not any(line.startswith("FCDP_HOST_MAP") for line in rank["said"]), rank["said"]


def test_the_embedding_takes_no_device_memory_but_that_of_each_ranks_host(unmapped, mapped):
    for off, on in zip(unmapped, mapped):
        for case in CASES:
            without, having = off[case]["fcdp"], on[case]["fcdp"]
            size = having["tokens"]["bytes"]
            assert size == 10 << 20 and having["host"]["mapped_bytes"] == size and without["host"]["mapped_bytes"] == 0
            assert without["device_bytes"]["peak"] - having["device_bytes"]["peak"] == size
            assert having["host_bytes"]["current"] - without["host_bytes"]["current"] == 2 * size
            assert on[case]["after"] == {"mapped_bytes": 0, "groups": 0}  # it went with its model


def test_what_is_served_says_which_part_of_it_is_in_host_memory_alone(unmapped, mapped):
    """To rank 0, after the first step. Where no group is mapped, the line has nothing of it."""
    lines = [[line for line in rank["said"] if line.startswith("serving ")] for rank in (*mapped, unmapped[0])]
    assert [len(of_rank) for of_rank in lines] == [1, 0, 0, 0, 1], lines
    assert "serving 4 of 4 groups, 1 of them (10.5 MB) in host memory alone (FCDP_HOST_MAP); " in lines[0][0], lines
    assert "host memory alone" not in lines[4][0], lines


def test_nothing_of_the_embedding_is_restored(unmapped, mapped):
    """Each use that is not gathered is a restore of it, where it is not mapped."""
    for off, on in zip(unmapped, mapped):
        before = dict.fromkeys(("off", "on"), (0, 0))
        for case in CASES:
            tokens, made = on[case]["fcdp"]["tokens"], {}
            for name, rank in (("off", off), ("on", on)):
                moves = rank[case]["fcdp"]["moves"]
                now = moves["whole_loads"] + moves["slice_loads"], moves["h2d_bytes"]
                made[name] = [a - b for a, b in zip(now, before[name])]
                before[name] = now
            n_restores = tokens["gathers_avoided"]
            assert n_restores == (3 if case == "trained" else 5)
            assert made["off"][0] - made["on"][0] == n_restores
            assert made["off"][1] - made["on"][1] >= n_restores * tokens["bytes"]


def test_where_one_ranks_driver_refuses_none_maps(plain, unmapped):
    """In both models: each probes for itself, and the same line is said once."""
    assert numbers(unmapped) == plain
    lines = [line for line in unmapped[0]["said"] if line.startswith("FCDP_HOST_MAP")]
    assert len(lines) == 1 and "rank 1: cuMemCreate" in lines[0] and "'tokens' is not mapped" in lines[0], lines
    for rank in unmapped:
        for case in CASES:
            found = rank[case]["fcdp"]
            assert found["tokens"]["tier"] == "policy" and found["host"]["mapped_bytes"] == 0 and not found["bypassed"]


@pytest.mark.parametrize("name", OTHERS if WHOLE else [])
def test_it_agrees_with_the_other_options(name, train, plain):
    env, how = OTHERS[name]
    ranks = train(env, how)
    assert numbers(ranks) == plain
    for rank in ranks:
        assert all(rank[case]["fcdp"]["tokens"]["state"] == "mapped" for case in CASES)
    if "nothing" in env["FCDP_HOST_MAP"]:
        lines = [line for line in ranks[0]["said"] if line.startswith("FCDP_HOST_MAP")]
        assert (
            lines == [line for line in lines if "rank 0 has no group that is called 'nothing'" in line]
            and len(lines) == 1
        )


def test_a_plan_that_keeps_it_on_the_device_is_as_exact(train, plain, tmp_path):
    """FCDP_PLAN: what the program writes into a group must not outlive its reshard, whatever FCDP_TAU says."""
    sizes = {"": (64 * 129, 0), "tokens": (0, 20480 * 128), "blocks.0": (128 * 129, 0), "blocks.1": (128 * 129, 0)}
    regions = [
        {
            "name": name,
            "trainable": trained,
            "frozen": frozen,
            "tier": "device" if name in ("tokens", "blocks.0") else "host",
        }
        for name, (trained, frozen) in sizes.items()
    ]
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps({"schema": "fcdp-plan-plan/1", "regions": regions}))
    ranks = train(FCDP | {"FCDP_POLICY": "tau", "FCDP_TAU": "0", "FCDP_PLAN": str(plan)})
    assert numbers(ranks) == plain
    for rank in ranks:
        assert [rank[case]["fcdp"]["tokens"]["state"] for case in ("frozen", "written")] == ["device"] * 2
