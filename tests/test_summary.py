"""The end of tools/test.sh tells of every step, and says why what was skipped was."""

import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
CTEST = """<testsuite><testcase name="one" time="1"/>
<testcase name="two" time="2"><skipped message="SKIP_RETURN_CODE=77"/><system-out>it looks
no hugepages here</system-out></testcase>{more}</testsuite>"""
C_FAILS = '<testcase name="three" time="3"><failure message=""/><system-out>a.c:7: 1 != 2</system-out></testcase>'
PYTEST = """<testsuites><testsuite><testcase classname="tests.a" name="one"/>
<testcase classname="tests.a" name="two"><skipped message="needs root">tests/a.py:3: needs root</skipped></testcase>
<testcase classname="tests.a" name="three"><skipped message="needs root">tests/a.py:9: needs root</skipped></testcase>{more}
</testsuite></testsuites>"""
PYTHON_FAILS = (
    '<testcase classname="tests.a" name="four"><failure message="assert 0">def four():\nE assert 0</failure></testcase>'
)


def summary(folder, *steps):
    """Of steps: (status, log, title, report)."""
    lines = []
    for status, log, title, report in steps:
        (folder / f"{log}.log").write_text(f"{log} said\nsomething\n")
        if report:
            (folder / f"{log}.xml").write_text(report)
        lines.append(f"{status}\t7\t{folder / log}.log\t{title}\n")
    (folder / "steps").write_text("".join(lines))
    done = subprocess.run(
        [sys.executable, ROOT / "tools" / "summary.py", folder / "steps"], capture_output=True, text=True
    )
    assert not done.stderr
    return done.returncode, done.stdout


def test_what_was_skipped_is_listed_with_its_reason(tmp_path):
    c, python = CTEST.format(more=""), PYTEST.format(more="")
    steps = (
        (0, "c", "C", c),
        (0, "py", "Python", python),
        (77, "lint", "Lint", None),
        (5, "none", "None", "<testsuites/>"),
    )
    assert summary(tmp_path, *steps) == (
        0,
        "Skipped:\n  C: no hugepages here\n  Python: needs root (2 times)\n  Lint: something\n  None: something\nSummary:\n"
        f"  {'C':<38} passed   2 tests, of them 1 skipped (7 s)\n  {'Python':<38} passed   3 tests, of them 2 skipped (7 s)\n"
        f"  {'Lint':<38} skipped  (7 s)\n  {'None':<38} skipped  (7 s)\nAll that ran passed.\n",
    )


@pytest.mark.parametrize(
    ("report", "said"),
    [
        (CTEST.format(more=C_FAILS), ["Failed: X: three", "a.c:7: 1 != 2"]),
        (PYTEST.format(more=PYTHON_FAILS), ["Failed: X: tests.a four", "def four():", "E assert 0"]),
        (None, ["Failed: X: x.log", "x said", "something"]),
        (CTEST.format(more=""), ["Failed: X: x.log", "x said", "something"]),
    ],
)
def test_what_failed_is_shown(tmp_path, report, said):
    status, told = summary(tmp_path, (1, "x", "X", report), (0, "y", "Y", None))
    lines = [line.strip() for line in told.splitlines()]
    at = lines.index(said[0].replace("x.log", f"{tmp_path / 'x.log'}"))
    assert status == 1 and lines[at + 1 : at + len(said)] == said[1:] and lines[-1] == "FAILED."
    assert lines[-3] == lines[at].removeprefix("Failed: X: ")  # again, behind its step
    assert f"  {'Y':<38} passed   (7 s)" in told


def test_nothing_ran(tmp_path):
    assert summary(tmp_path, (77, "x", "X", None))[1].endswith("Nothing ran.\n")
