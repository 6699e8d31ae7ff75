"""The README's generated parts are what the code says."""

import pathlib
import re
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]


def between(text, name):
    return re.search(rf"<!-- {name}: begin -->\n(.*?)<!-- {name}: end -->", text, re.S)


def test_the_table_of_options_is_the_codes():
    """After a change: python tests/test_readme.py"""
    cli = pytest.importorskip("fcdp_doctor.cli", reason="the wheel is not installed in this interpreter")
    assert between((ROOT / "README.md").read_text(), "options").group(1).strip() == cli.options_table()


def test_every_file_that_the_readme_links_to_exists():
    for target in re.findall(r"\]\(([^)#]+)\)", (ROOT / "README.md").read_text()):
        assert target.startswith("http") or (ROOT / target).exists(), target


def write():
    from fcdp_doctor.cli import options_table

    path = ROOT / "README.md"
    text = path.read_text()
    path.write_text(
        text.replace(
            between(text, "options").group(0), f"<!-- options: begin -->\n{options_table()}\n<!-- options: end -->"
        )
    )


if __name__ == "__main__":
    sys.exit(write())
