"""tools/bench/host_ahead.py: FCDP's steps are enqueued ahead of the device, and a wait of the host is named where it is not.

Its ratios are of time, and this machine may be busy: what is asserted of a run is counted."""

import argparse
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "tools" / "bench" / "host_ahead.py"
sys.path.append(str(SCRIPT.parent))
import host_ahead

SLOTS, EXACT = host_ahead.CONFIGURATIONS[1:]
ARGS = argparse.Namespace(pairs=1, steps=2, seconds=1.0)


def rank(mine=2.04, bound=2.0, **waits):
    """Of one pair; `waits`: by the label of a call."""
    return {
        "pairs": [((mine / 2, mine / 4), (bound / 2, bound / 4))],
        "calls": {"an agreement": 4},
        "seconds": {"an agreement": 1.0},
        "waits": {f"cuEventSynchronize|{where.replace('_', ' ')}": n for where, n in waits.items()},
        "waited_s": {f"cuEventSynchronize|{where.replace('_', ' ')}": 0.5 for where in waits},
    }


@pytest.mark.parametrize(
    ("configuration", "found", "said"),
    [
        (SLOTS, rank(an_agreement=4), None),
        (EXACT, rank(an_agreement=4, an_unshard=16), None),
        (EXACT, rank(mine=2.18, an_agreement=4), None),
        (SLOTS, rank(an_agreement=4, an_unshard=1), "the host must not wait in an unshard"),
        (EXACT, rank(somewhere=1), "the host must not wait in somewhere"),
        (SLOTS, rank(mine=2.12), "must not take more than 1.05 of its bound"),
        (EXACT, rank(mine=2.22), "must not take more than 1.10 of its bound"),
        (SLOTS, rank(mine=4, bound=4), "CPUs bound these steps"),
    ],
)
def test_what_must_not_be_is_named(configuration, found, said, capsys):
    assert host_ahead.report(configuration, [found] * 4, ARGS) == (said is None)
    told = capsys.readouterr().out
    assert said is None or said in told
    assert ("the host must not" in told) == bool(said and "the host must not" in said)


def test_with_slots_the_host_waits_in_agreements_alone(built):
    command = [sys.executable, SCRIPT, "--only", "slots", "--pairs", "1", "--seconds", "0.3"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode in (0, 1) and not done.stderr, done.stderr
    waits = re.findall(r"waits of the host, .* by (\w+) in (.*)", done.stdout)
    assert waits == [("cuEventSynchronize", "an agreement")], done.stdout
    assert "2.00 agreements" in done.stdout
    assert "0.00 cuMemCreate, 0.00 cuMemMap, 0.00 cuMemSetAccess, 0.00 cuMemUnmap" in done.stdout


@pytest.mark.parametrize("wrong", [["--pairs", "0"], ["--seconds", "-1"], ["--only", "nothing"]])
def test_bad_options_are_refused(wrong):
    done = subprocess.run([sys.executable, SCRIPT, *wrong], capture_output=True, text=True, timeout=100)
    assert done.returncode == 2 and wrong[0] in done.stderr and "Traceback" not in done.stderr
