"""tools/bench.sh overlap: a stand-in takes the place of the program that it runs."""

import subprocess

import pytest

from test_commands import ROOT, environment, started
from test_left_behind import SET_UP, put


@pytest.mark.parametrize("option", ["--plans", "--budgets"])
def test_the_bench_says_all_that_its_program_says(tmp_path, option):
    """Where the program writes no timelines."""
    put(tmp_path / "tools" / "setup.sh", SET_UP)
    put(tmp_path / "tools" / "bench.sh", (ROOT / "tools" / "bench.sh").read_text())
    put(tmp_path / "bin" / "cmake", "#!/bin/sh\n")
    program = '#!/bin/sh\n[ "$*" = "$EXPECTED" ] || exit 9\necho head\necho "last row"\nexit 3\n'
    put(tmp_path / "build" / "release" / "tools" / "bench" / "overlap" / "fcdp-overlap", program)
    command = ["bash", tmp_path / "tools" / "bench.sh", "overlap", "--steps", "2", option]
    env = environment(STAND_IN_ROOT=str(tmp_path), EXPECTED=f"--steps 2 {option}")
    with started(command, env, stdout=subprocess.PIPE) as process:
        said = process.communicate(timeout=60)[0].splitlines()
    assert process.returncode == 3 and said[-2:] == ["head", "last row"], said
