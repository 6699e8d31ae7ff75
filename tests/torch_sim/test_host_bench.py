"""tools/bench/host.py: what it counts and says, for a small model."""

import json
import pathlib
import re
import subprocess
import sys

BENCH = pathlib.Path(__file__).resolve().parents[2] / "tools" / "bench" / "host.py"


def test_the_parts_of_a_pair(built, tmp_path):
    figures = tmp_path / "figures.json"
    command = [sys.executable, BENCH, "--layers", "3", "--steps", "3", "--rounds", "1", "--json", figures]
    job = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert job.returncode == 0, job.stdout + job.stderr
    said = json.loads(figures.read_text())
    assert said["calls"] <= 3
    # FSDP2 with a gather takes twice what it does without; three steps on a busy machine are no measurement
    assert 0 < said["bare_us"] < said["plain_us"]
    last = re.fullmatch(
        r"host per unshard and reshard: fcdp ([\d.]+) us plain ([\d.]+) us", job.stdout.splitlines()[-1]
    )
    assert [float(us) for us in last.groups()] == [round(said["fcdp_us"], 1), round(said["plain_us"], 1)]
