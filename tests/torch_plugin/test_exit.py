"""What a job does when its interpreter ends: FCDP serves until all of that is done."""

import json

import launch
from conftest import needs_fcdp
from leftovers import Leftovers

TIMEOUT_S = 300  # the bound on a hang


def run(tmp_path, env, warm):
    before = Leftovers(tmp_path)
    job = launch.Spawned(launch.HERE / "exit_job.py", [tmp_path], tmp_path, env, n_ranks=2, warm=warm)
    assert job.wait(TIMEOUT_S), "hangs\n" + job.report()
    assert [rank.returncode for rank in job.ranks] == [0, 0], job.report()
    assert job.left_alive == [] and before.found() == []
    results = [tmp_path / f"result{rank}.json" for rank in range(2)]
    assert all(path.exists() for path in results), job.report()
    return job, [json.loads(path.read_text()) for path in results]


@needs_fcdp
def test_a_model_is_evaluated_at_exit(tmp_path):
    """By a function that was registered with atexit before FSDP was imported, so it runs last."""
    _, plain = run(tmp_path / "plain", {}, warm=True)
    job, ours = run(tmp_path / "fcdp", {"FCDP": "1", "FCDP_LOCAL_SIZE": "1", "FCDP_TIMEOUT": "60"}, warm=False)
    assert [rank["digests"] for rank in ours] == [rank["digests"] for rank in plain]
    gathers = ours[0]["stats"]["gathers"]
    said = [line for line in job.ranks[0].err.splitlines() if line.startswith("fcdp: saved")]
    n_gathers = gathers["made"] + gathers["avoided"]  # what it gathered then is in the line too
    assert len(said) == 1 and f"{gathers['avoided']} of {n_gathers} gathers" in said[0], job.report()
