"""The host tier in real jobs, 2 nodes x 2 ranks: how much it takes, in how many copies, when it page-locks, and where its
threads run."""

import os

import pytest

from described import describe

FCDP = {"FCDP": "1", "FCDP_LOCAL_SIZE": "2", "FCDP_TIMEOUT": "60", "FCDP_FINGERPRINT": "auto"}
JOBS = {
    "cpu": ("cpu", {}),
    "gloo": ("sim", {"FCDP_TRANSPORT": "torch", "FCDP_HOST_COPIES": "numa"}),
    "nccl": ("sim", {"FCDP_TRANSPORT": "nccl", "FCDP_HOST_COPIES": "numa", "FCDP_PIN_CPU": "off"}),
}
COPIES = {"cpu": 1, "gloo": 2, "nccl": 1}  # over NCCL each rank restores its slice alone


@pytest.fixture(scope="module")
def machine(tmp_path_factory):
    """Two NUMA nodes, which share this machine's CPUs."""
    cpus = sorted(os.sched_getaffinity(0))
    halves = cpus[: len(cpus) // 2], cpus[len(cpus) // 2 :]
    return describe(tmp_path_factory.mktemp("machine"), *halves), halves


@pytest.fixture(scope="module", params=JOBS)
def job(request, run_job, machine):
    device, env = JOBS[request.param]
    ranks = run_job("host_job.py", device, "OUT", n_ranks=4, env=FCDP | env | {"FCDP_SIM_ROOT": str(machine[0])})
    return request.param, ranks


@pytest.fixture(scope="module")
def digests():
    return {}


def test_each_copy_takes_w_and_at_most_3_percent_more(job):
    name, ranks = job
    for rank in ranks:
        last, expected = rank["steps"][-1], COPIES[name] * rank["w"]
        assert rank["w"] > 30 << 20 and last["copies"] == COPIES[name]
        assert expected <= last["bytes"] <= 1.03 * expected, last
        assert 0.97 * expected <= last["physical"] <= 1.03 * expected, last


def test_nothing_is_pinned_or_unpinned_after_the_first_step(job):
    for rank in job[1]:
        first, *later = [(step["pins"], step["unpins"], step["pinned_bytes"]) for step in rank["steps"]]
        assert first[0] - first[1] >= 4 and first[2] >= 0.2 * rank["w"], first  # 3 blocks and the root
        assert later == [first] * 2


def test_threads_run_on_the_devices_node(job, machine):
    name, ranks = job
    halves = machine[1]
    if not halves[0]:
        pytest.skip("needs 2 CPUs")
    for i, rank in enumerate(ranks):
        last = rank["steps"][-1]
        everywhere = [str(sorted(halves[0] + halves[1]))]
        assert rank["threads"] == rank["threads_after"]
        assert last["numa_node"] == (i % 2)
        if name == "gloo":
            assert rank["cpus"] == [str(halves[i % 2])] and last["cpus"] and "threads are bound" in last["binding"]
        else:
            assert rank["cpus"] == everywhere and last["cpus"] == ""
            assert {"cpu": "the model computes on CPUs", "nccl": "FCDP_PIN_CPU=off"}[name] in last["binding"]


def test_training_is_the_same_wherever_threads_run_and_copies_lie(job, digests):
    name, ranks = job
    digests[name] = [rank["parameters"] for rank in ranks]
    assert len({*map(tuple, digests.values())}) == 1
