"""Nothing but Python and torch: no NumPy, which torch does not bring along. tools/clean_machine.sh tries the
rest of that on a minimal system."""

import json

import launch
from conftest import needs_fcdp

TIMEOUT_S = 300  # the bound on a hang


def train(tmp_path, env, warm):
    job = launch.Spawned(launch.HERE / "clean_job.py", [tmp_path], tmp_path, env, warm=warm)
    assert job.wait(TIMEOUT_S), "hangs\n" + job.report()
    assert [rank.returncode for rank in job.ranks] == [0] * launch.WORLD, job.report()
    return [json.loads((tmp_path / f"result{rank}.json").read_text()) for rank in range(launch.WORLD)]


@needs_fcdp
def test_training_needs_no_numpy(tmp_path):
    """Under FCDP; plain FSDP, with which it is compared, may have it."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text("import sys\nsys.modules['numpy'] = None\n")
    plain = train(tmp_path / "plain", {}, warm=True)
    env = {"PYTHONPATH": str(tmp_path / "site"), "FCDP": "1", "FCDP_LOCAL_SIZE": "2"}
    ours = train(tmp_path / "fcdp", env, warm=False)
    assert [rank["digest"] for rank in ours] == [rank["digest"] for rank in plain]
    assert all(rank["stats"]["gathers"]["avoided"] > 0 for rank in ours)
    assert not any(rank["stats"] for rank in plain)
