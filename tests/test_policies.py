"""tools/bench.sh policies: its bytes are those of a schedule that can be counted by hand, and its optimum is one."""

import pathlib
import subprocess
import sys

import pytest

pytest.importorskip("scipy", reason="scipy is not installed (tools/setup.sh)")
pytestmark = pytest.mark.slow  # it imports torch
ROOT = pathlib.Path(__file__).resolve().parent.parent
FOLDER = ROOT / "tools" / "bench" / "policies"
PROGRAM = ROOT / "build" / "dev" / "tools" / "bench" / "policies" / "fcdp-policies"
sys.path.insert(0, str(FOLDER))
import table  # noqa: E402

PAGE = table.PAGE_BYTES


def step(n_groups, frozen=False):
    """Forward and backward of groups of a page each, all of them frozen or none."""
    order = [*range(n_groups), *reversed(range(n_groups))]
    return table.schedule_of(
        [
            {"group": group, "bytes": PAGE, "load": 0 if fills else PAGE, "store": PAGE if fills else 0}
            for i, group in enumerate(order)
            for fills in [i < n_groups and not frozen]
        ]
    )


def test_nothing_kept_moves_all_of_it():
    assert step(4).moved([False] * 8) == 8 * PAGE  # a store and a load of each
    assert step(4, frozen=True).moved([False] * 8) == 8 * PAGE  # two loads
    assert step(4).moved([True] * 8) == 0
    assert step(4).moved([True] * 4 + [False] * 4) == 4 * PAGE  # kept to backward, and stored behind it


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("budget", [2, 3, 4, 6])
def test_tau_is_never_below_the_optimum(frozen, budget):
    schedule = step(4, frozen)
    taus = [table.moved_by_tau(schedule, budget, tau) for tau in table.TAUS]
    assert max(taus) == taus[0] == 8 * PAGE
    assert table.least_moved(schedule, budget) <= min(taus)


@pytest.mark.skipif(not PROGRAM.exists(), reason=f"{PROGRAM} is not built (cmake --preset dev)")
@pytest.mark.parametrize("frozen", [False, True])
def test_a_plan_is_read_and_is_optimal_here(frozen):
    schedule, budgets = step(4, frozen), [2, 3, 4, 6]
    plans = table.planned(schedule, budgets, PROGRAM)
    assert [schedule.moved(plan) for plan in plans] == [table.least_moved(schedule, budget) for budget in budgets]


@pytest.mark.skipif(not PROGRAM.exists(), reason=f"{PROGRAM} is not built (cmake --preset dev)")
def test_a_schedule_that_ends_early_is_refused():
    done = subprocess.run([PROGRAM], input="3 1 4096 1 8\n0 1 0 0 1\n", capture_output=True, text=True)
    assert done.returncode == 2 and "no such schedule" in done.stderr


def test_help_says_what_it_prints():
    done = subprocess.run([sys.executable, FOLDER / "table.py", "--help"], capture_output=True, text=True)
    assert (
        done.returncode == 0 and "optimum" in done.stdout and done.stdout.startswith("usage: tools/bench.sh policies")
    )
