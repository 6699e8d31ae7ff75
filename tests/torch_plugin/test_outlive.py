"""Memory that outlives its reshard where no storage raises: the job dies as it would, by SIGSEGV, and says of what."""

import signal

import pytest

import launch
from conftest import needs_fcdp
from leftovers import Leftovers

TIMEOUT_S = 300
PARAMETER = {"numpy": ["blocks.1.down.weight"], "backward": ["blocks.1.gate", "blocks.1.down.weight"]}


@needs_fcdp
@pytest.mark.parametrize("what", PARAMETER)
def test_a_fault_names_the_parameter(tmp_path, what):
    before = Leftovers(tmp_path)
    # Exact, as is chosen where torch cannot make a storage raise. In a slot, memory past torch's reach reads what is
    # there now.
    env = {"FCDP": "1", "FCDP_LOCAL_SIZE": "1", "FCDP_TIMEOUT": "60", "FCDP_MAPPING": "exact"}
    job = launch.Spawned(launch.HERE / "outlive_job.py", [what], tmp_path, env, n_ranks=2, warm=True)
    assert job.wait(TIMEOUT_S), "hangs\n" + job.report()
    died = [rank for rank in job.ranks if rank.returncode == -signal.SIGSEGV]
    assert died and all(rank.returncode for rank in job.ranks), job.report()  # the other one may lose its peer first
    for rank in died:
        lines = rank.err.splitlines()
        ours = [i for i, line in enumerate(lines) if line.startswith("fcdp: SIGSEGV: 0x")]
        assert len(ours) == 1, rank.err
        assert any(f"gathered parameter {name} of blocks.1, " in lines[ours[0]] for name in PARAMETER[what]), lines[
            ours[0]
        ]
        assert "unshard()" in lines[ours[0]] and "clone()" in lines[ours[0]]
        # And then what would have been said without it.
        assert any("Fatal Python error: Segmentation fault" in line for line in lines[ours[0] :]), rank.err
        assert "went on" not in rank.out
    assert job.left_alive == [] and before.found() == []
