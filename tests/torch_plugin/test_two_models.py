"""Two models on process groups of their own, a thread each: what one waits for never waits for the other, in
whatever order a rank comes to them."""

import pytest

import launch
from conftest import needs_fcdp

pytestmark = needs_fcdp
ON = {"FCDP": "1", "FCDP_LOCAL_SIZE": "2", "FCDP_TIMEOUT": "30"}


def run(tmp_path, arguments, env=None):
    job = launch.forked(launch.HERE / "two_models_job.py", [tmp_path, *arguments], tmp_path, env)
    assert not job.timed_out and job.returncode == 0, job.output
    return job


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plain")
    return {start: run(folder / start, [start, "plain"]).ranks for start in ("cold", "warm")}


@pytest.mark.parametrize(
    "options", [{}, {"FCDP_PREFETCH": "3", "FCDP_RESTORE": "slice", "FCDP_COALESCE": "0"}], ids=["default", "ahead"]
)
@pytest.mark.parametrize("start", ["cold", "warm"])
def test_a_thread_for_each_model(tmp_path, plain, start, options):
    job = run(tmp_path, [start], {**ON, **options})
    for expected, rank in zip(plain[start], job.ranks):
        assert rank["errors"] == [None, None] and rank["stats"]["bypassed"] == [], job.output
        assert (rank["losses"], rank["digests"]) == (expected["losses"], expected["digests"])
        assert rank["stats"]["gathers"]["avoided"] > 0
