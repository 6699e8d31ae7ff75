"""Wrong options and machines that cannot serve: a clear message, and then either plain FSDP, bit for bit, or a stop
before the first step.  Never a wrong number, never a hang."""

import functools
import json
import os
import re

import pytest

import launch
from conftest import needs_fcdp
from leftovers import Leftovers

TIMEOUT_S = 300  # the bound on a hang; most of it is for importing torch on a loaded machine
SCRIPT = launch.HERE / "plain_script.py"


class Outcome:
    def __init__(self, job, tmp):
        self.job = job
        self.messages = [[line for line in (r.err + r.out).splitlines() if "fcdp:" in line.lower()] for r in job.ranks]
        self.results = [
            json.loads(p.read_text()) if (p := tmp / f"result{i}.json").exists() else None
            for i in range(len(job.ranks))
        ]

    def stopped(self):
        """Every rank ended with an error before its first step; what it said."""
        for rank, result in zip(self.job.ranks, self.results):
            assert rank.returncode > 0 and "step" not in rank.out and result is None, self.job.report()
        return self.job.ranks[0].err

    def went_on(self, plain):
        """Every rank trained to the end, bit for bit as plain FSDP2; what rank 0 said, once."""
        for rank, result, expected in zip(self.job.ranks, self.results, plain.results):
            assert rank.returncode == 0, self.job.report()
            assert result["digest"] == expected["digest"], "training differs\n" + self.job.report()
        return [line for line in self.messages[0] if re.search(r"plain fsdp\d", line.lower())]


def start(tmp_path, env=None, arguments=(), warm=True, **kwargs):
    before = Leftovers(tmp_path)
    job = launch.Spawned(SCRIPT, [tmp_path, *arguments], tmp_path, env, warm=warm, **kwargs)
    assert job.wait(TIMEOUT_S), "hangs\n" + job.report()
    assert job.left_alive == [] and before.found() == []
    return Outcome(job, tmp_path)


def started_once(folders, arguments):
    """By kind: what plain FSDP makes of the script with `arguments[kind]`, which is started when it is first asked for."""

    @functools.cache
    def get(kind):
        return start(folders.mktemp(kind), arguments=arguments[kind])

    return get


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    outcome = start(tmp_path_factory.mktemp("plain"))
    for rank, messages in zip(outcome.job.ranks, outcome.messages):
        assert rank.returncode == 0 and not messages, outcome.job.report()
    return outcome


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """The same on two ranks, each a node: for jobs that start cold, which is 4 s of a core for each."""
    return start(tmp_path_factory.mktemp("pair"), n_ranks=2)


@pytest.fixture(scope="module")
def plain_fsdp1(tmp_path_factory):
    return start(tmp_path_factory.mktemp("fsdp1"), arguments=["--fsdp1"])


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The same on one rank."""
    return start(tmp_path_factory.mktemp("alone"), n_ranks=1)


def on(**options):
    return {"FCDP": "1", "FCDP_LOCAL_SIZE": "2", "FCDP_TIMEOUT": "60", **options}


def test_the_script_runs_plain(plain):
    assert all(result["digest"] for result in plain.results)


@needs_fcdp
@pytest.mark.parametrize("way", ["warm", "cold"])
def test_the_script_runs_under_fcdp(request, tmp_path, way):
    """Two nodes of two ranks, and, as an interpreter's start turns FCDP on, of one."""
    is_warm = way == "warm"
    expected = request.getfixturevalue("plain" if is_warm else "pair")
    n_ranks = len(expected.results)
    outcome = start(tmp_path, on(FCDP_LOCAL_SIZE=str(n_ranks // 2)), warm=is_warm, n_ranks=n_ranks)
    assert outcome.went_on(expected) == []
    assert outcome.results[0]["stats"]["gathers"]["avoided"] > 0
    assert [len(m) for m in outcome.messages] == [3] + [0] * (n_ranks - 1), outcome.messages


WRONG = {
    "FCDP=maybe": ({"FCDP": "maybe"}, ["FCDP=maybe", "0 or 1"]),
    "FCDP_TAU=1.5": (on(FCDP_TAU="1.5"), ["FCDP_TAU=1.5", "from 0 to 1"]),
    "FCDP_TAU=half": (on(FCDP_TAU="half"), ["FCDP_TAU=half", "from 0 to 1"]),
    "FCDP_TAU=nan": (on(FCDP_TAU="nan"), ["FCDP_TAU=nan", "from 0 to 1"]),
    "FCDP_TAUU=0.5": (on(FCDP_TAUU="0.5"), ["FCDP_TAUU", "FCDP_TAU"]),
    "FCDP_RESTOR=whole": (on(FCDP_RESTOR="whole"), ["FCDP_RESTOR", "FCDP_RESTORE"]),
    "FCDP_RESTORE=slices": (on(FCDP_RESTORE="slices"), ["FCDP_RESTORE=slices", "slice", "whole"]),
    "FCDP_LOCAL_SIZE=-1": (on(FCDP_LOCAL_SIZE="-1"), ["FCDP_LOCAL_SIZE=-1"]),
    "FCDP_LOCAL_SIZE=2.5": (on(FCDP_LOCAL_SIZE="2.5"), ["FCDP_LOCAL_SIZE=2.5", "whole number"]),
    "FCDP_DRIVER=gpu": (on(FCDP_DRIVER="gpu"), ["FCDP_DRIVER=gpu", "cuda", "sim"]),
    "FCDP_HOST_BUDGET=lots": (on(FCDP_HOST_BUDGET="lots"), ["FCDP_HOST_BUDGET=lots", "8G"]),
}


@needs_fcdp
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_option_stops_before_the_first_step(tmp_path, name):
    env, words = WRONG[name]
    said = start(tmp_path, env, n_ranks=1, warm=name != "FCDP=maybe").stopped()
    line = said.strip()
    assert "\n" not in line and line.startswith("fcdp.OptionError: "), said
    for word in words:
        assert word in line, f"{word!r} is not in the error: {line}"


@needs_fcdp
@pytest.mark.parametrize("name", ["FCDP=maybe", "FCDP_TAU=1.5", "FCDP_TAUU=0.5"])
def test_a_wrong_option_stops_every_rank(tmp_path, name):
    env, words = WRONG[name]
    outcome = start(tmp_path, env)
    assert all(word in outcome.stopped() for word in words)


@needs_fcdp
def test_an_option_on_one_rank_alone_is_wrong_everywhere(tmp_path, plain):
    """The ranks must not go separate ways: all stop, or all go on alike."""
    outcome = start(tmp_path, on(FCDP_TIMEOUT="10"), rank_env={2: {"FCDP_TAU": "1.5"}}, arguments=["--timeout", 10])
    assert outcome.job.ranks[2].returncode > 0 and "FCDP_TAU=1.5" in outcome.job.ranks[2].err
    for rank, result in zip(outcome.job.ranks, outcome.results):
        assert rank.returncode > 0 and result is None, outcome.job.report()


@needs_fcdp
def test_off_says_nothing(tmp_path, plain):
    outcome = start(tmp_path, {"FCDP": "0", "FCDP_TAUU": "1"})
    outcome.went_on(plain)
    assert outcome.messages == [[], [], [], []]


def has_cuda():
    return os.path.exists("/dev/nvidiactl")


GOES_ON = {
    "cuda_without_a_gpu": (
        on(FCDP_DRIVER="cuda"),
        {},
        ["FCDP_DRIVER=cuda, but the model is on the CPU", "use FCDP_DRIVER=auto, or sim"],
    ),
    "local_size_that_does_not_divide": (on(FCDP_LOCAL_SIZE="3"), {}, ["ranks per node", "FCDP_LOCAL_SIZE"]),
    "nodes_of_different_size": (
        {"FCDP": "1"},
        {
            0: {"LOCAL_WORLD_SIZE": "3"},
            1: {"LOCAL_WORLD_SIZE": "3"},
            2: {"LOCAL_WORLD_SIZE": "3"},
            3: {"LOCAL_WORLD_SIZE": "1"},
        },
        ["ranks per node differ: the group's ranks say [3, 3, 3, 1]; FCDP needs the same number on every node"],
    ),
    "a_rank_that_no_launcher_tells": (
        {"FCDP": "1", "LOCAL_WORLD_SIZE": "2"},
        {1: {"LOCAL_WORLD_SIZE": ""}},
        ["rank 1 does not know how many ranks its node has; set FCDP_LOCAL_SIZE on every rank"],
    ),
    "one_node": (
        {"FCDP": "1"},
        {},
        ["all 4 ranks of the shard group are on one node", "fcdp-lab emulates nodes on this"],
    ),
    "host_memory_too_small": (on(FCDP_HOST_BUDGET="4K"), {}, ["host", "FCDP_HOST_BUDGET"]),
    "device_memory_too_small": (
        on(FCDP_DEVICE_BUDGET="2M"),
        {},
        ["FCDP_DEVICE_BUDGET, 2.1 MB, is too small", "largest group", "would do"],
    ),
}


@needs_fcdp
@pytest.mark.parametrize("name", GOES_ON)
def test_what_cannot_be_served_trains_as_plain_fsdp2(tmp_path, plain, name):
    if name == "cuda_without_a_gpu" and has_cuda():
        pytest.skip("this machine has a GPU")
    env, rank_env, words = GOES_ON[name]
    outcome = start(tmp_path, env, rank_env=rank_env)
    said = outcome.went_on(plain)
    assert len(said) == 1 and said[0].startswith("fcdp: served 0 of 5 groups: "), outcome.messages[0]
    assert not any("plain fsdp2" in line.lower() for messages in outcome.messages[1:] for line in messages)
    assert len(outcome.results[0]["stats"]["bypassed"]) == 5
    for word in words:
        assert word.lower() in said[0].lower(), f"{word!r} is not in: {said[0]}"


@needs_fcdp
@pytest.mark.parametrize("name", ["local_size_that_does_not_divide", "host_memory_too_small"])
def test_what_cannot_be_served_trains_as_plain_fsdp1(tmp_path, plain_fsdp1, name):
    env, rank_env, words = GOES_ON[name]
    said = start(tmp_path, env, rank_env=rank_env, arguments=["--fsdp1"]).went_on(plain_fsdp1)
    assert len(said) == 1 and said[0].startswith("fcdp: served 0 of 5 groups: "), said
    assert said[0].endswith("; plain FSDP1 runs") and all(word.lower() in said[0].lower() for word in words), said


@needs_fcdp
def test_the_script_runs_with_fsdp1_under_fcdp(tmp_path, plain_fsdp1):
    outcome = start(tmp_path, on(), arguments=["--fsdp1"])
    assert outcome.went_on(plain_fsdp1) == []
    assert outcome.results[0]["stats"]["gathers"]["avoided"] > 0
    assert [len(m) for m in outcome.messages] == [3, 0, 0, 0], outcome.messages


@needs_fcdp
def test_a_torch_with_another_fsdp1(tmp_path):
    (tmp_path / "plain").mkdir()
    plain = start(tmp_path / "plain", arguments=["--fsdp1"], n_ranks=2)
    paths = [str(launch.HERE / "other_seams"), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = on(FCDP_LOCAL_SIZE="1", OTHER_SEAM="_reduce_grad", PYTHONPATH=os.pathsep.join(paths))
    outcome = start(tmp_path, env, arguments=["--fsdp1"], n_ranks=2)
    outcome.went_on(plain)
    said = outcome.messages[0]
    assert len(said) == 1 and "does not have FSDP1 as FCDP knows it (_reduce_grad(state, handle))" in said[0], said
    assert outcome.messages[1:] == [[]]


@needs_fcdp
def test_the_device_budget_that_is_named_would_do(tmp_path, plain):
    (tmp_path / "first").mkdir()
    said = start(tmp_path / "first", on(FCDP_DEVICE_BUDGET="2M")).went_on(plain)[0]
    named = re.search(r"FCDP_DEVICE_BUDGET=(\d+MB) would do", said)
    assert named, said
    outcome = start(tmp_path, on(FCDP_DEVICE_BUDGET=named[1]))
    assert outcome.went_on(plain) == [] and outcome.results[0]["stats"]["gathers"]["avoided"] > 0


@needs_fcdp
def test_one_rank_is_served_by_fsdp2(tmp_path, alone):
    outcome = start(tmp_path, {"FCDP": "1"}, n_ranks=1)
    outcome.went_on(alone)


@needs_fcdp
@pytest.mark.parametrize(
    "seam", [pytest.param("foreach_all_gather", marks=pytest.mark.further), "foreach_all_gather_copy_out"]
)
def test_a_torch_with_other_seams(tmp_path, pair, seam):
    paths = [str(launch.HERE / "other_seams"), *filter(None, [os.environ.get("PYTHONPATH")])]
    outcome = start(tmp_path, on(FCDP_LOCAL_SIZE="1", OTHER_SEAM=seam, PYTHONPATH=os.pathsep.join(paths)), n_ranks=2)
    said = outcome.went_on(pair)
    assert len(said) == 1 and seam in said[0], outcome.messages[0]
    assert outcome.job.ranks[1].returncode == 0 and not outcome.messages[1]


def with_little_memlock(tmp_path, *ranks, **options):
    """On two ranks, each a node."""
    return start(tmp_path, on(FCDP_LOCAL_SIZE="1", **options), ["--little-memlock", *ranks], n_ranks=2)


@needs_fcdp
def test_memlock_too_small_trains_unpinned(tmp_path, pair):
    outcome = with_little_memlock(tmp_path, 0, 1)
    outcome.went_on(pair)
    said = [line for line in outcome.messages[0] if "pin" in line]
    assert said and any(word in said[0] for word in ("memlock", "RLIMIT_MEMLOCK", "ulimit -l")), outcome.messages[0]


@needs_fcdp
def test_memlock_too_small_where_pinning_is_required(tmp_path):
    """It stops, on every rank."""
    outcome = with_little_memlock(tmp_path, 0, 1, FCDP_PIN="require")
    outcome.stopped()
    for rank in outcome.job.ranks:
        last = rank.err.strip().splitlines()[-1]
        assert "OptionError" in last and "FCDP_PIN=require" in last and "RLIMIT_MEMLOCK" in last, rank.err


@needs_fcdp
def test_pinning_that_one_rank_cannot_do_stops_all(tmp_path):
    outcome = with_little_memlock(tmp_path, 1, FCDP_PIN="require")
    outcome.stopped()
    for i, rank in enumerate(outcome.job.ranks):
        last = rank.err.strip().splitlines()[-1]
        assert "OptionError" in last and "FCDP_PIN=require" in last and ("fcdp: rank 1: " in last) == (i != 1), last
