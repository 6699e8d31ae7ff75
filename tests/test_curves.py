"""tools/bench.sh curves: what it says of losses that fcdp-lab measured, and its picture."""

import pathlib
import sys

import pytest

pytest.importorskip("matplotlib")
FOLDER = pathlib.Path(__file__).resolve().parents[1] / "tools" / "bench"
sys.path.insert(0, str(FOLDER))
import curves  # noqa: E402

PLAIN = [5.0 - 0.1 * i for i in range(20)]
LATE = [*PLAIN[:19], PLAIN[19] * 1.01]


def measured(**others):
    return {title: others.get(title, PLAIN) for title in curves.SETTINGS}


def test_a_row_says_how_far_its_losses_are_from_the_first():
    table = {row[0]: row[1:] for row in curves.rows(measured(HSDP=LATE))}
    assert table["FSDP2"] == table["FCDP=1"] == ["5.0000", "3.1000", "0", "0.0e+00"]
    at_end = 0.01 * PLAIN[19] / sum(PLAIN[10:])
    assert table["HSDP"] == ["5.0000", "3.1310", "1e-02", f"{at_end:.1e}"]


def test_a_run_that_lost_steps_has_no_row():
    with pytest.raises(ValueError, match="argument 2"):
        list(curves.rows(measured(HSDP=PLAIN[:-1])))


@pytest.mark.parametrize("losses, status", [(PLAIN, 0), (LATE, 1)])
def test_it_draws_and_fails_where_fcdp_alone_differs(monkeypatch, tmp_path, capsys, losses, status):
    monkeypatch.setattr(curves, "measured", lambda n_steps, arguments: measured(**{"FCDP=1": losses}))
    monkeypatch.setattr(sys, "argv", ["curves", "--picture", str(tmp_path / "x.svg")])
    assert curves.main() == status
    assert ("which is a fault" in capsys.readouterr().err) == bool(status)
    picture = (tmp_path / "x.svg").read_text()
    assert all(title in picture for title in curves.SETTINGS)
