"""The documents are what the code says: the generated table, links, and paths that they name."""

import pathlib
import re
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("tools/*/*.md")])
OPTIONS = ROOT / "docs" / "options.md"
TABLE = re.compile(r"<!-- options: begin -->\n(.*?)<!-- options: end -->", re.S)
FOLDERS = "alloc|tiering|comm|torch_plugin|tools|tests|cmake|docs|\\.github|\\.ci"


def name_of(path):
    return path.relative_to(ROOT).as_posix()


def anchors(text):
    """The fragments under which GitHub shows a document's headings."""
    headings = re.findall(r"^#+ (.*)$", text, re.M)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_table_of_options_is_the_codes():
    cli = pytest.importorskip("fcdp_doctor.cli", reason="the wheel is not installed in this interpreter")
    written = TABLE.search(OPTIONS.read_text())[1].strip()
    assert written == cli.options_table(), (
        "docs/options.md is not what the installed wheel says. Run: bash tools/setup.sh && "
        ".venv/bin/python tests/test_readme.py"
    )


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_what_a_document_links_to_exists(document):
    for target in re.findall(r"\]\(([^)]+)\)", document.read_text()):
        if target.startswith("http"):
            continue
        path, _, fragment = target.partition("#")
        linked = document.parent / path if path else document
        assert linked.exists(), target
        assert not fragment or fragment in anchors(linked.read_text()), target


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_the_paths_that_a_document_names_exist(document):
    named = re.findall(rf"`((?:{FOLDERS})/[\w./-]+)[ `]", document.read_text())
    assert [path for path in named if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_paragraphs_wrap_at_110_columns(document):
    prose = re.sub(r"^```.*?^```$", "", document.read_text(), flags=re.M | re.S)
    wide = [line for line in prose.splitlines() if len(line) > 110 and not line.startswith(("|", "    "))]
    assert wide == []


def test_every_page_of_docs_is_linked_from_the_readme():
    linked = re.findall(r"\]\((docs/[^)#]+)\)", (ROOT / "README.md").read_text())
    assert set(linked) == {name_of(path) for path in ROOT.glob("docs/*.md")}


def write():
    from fcdp_doctor.cli import options_table

    table = f"<!-- options: begin -->\n{options_table()}\n<!-- options: end -->"
    OPTIONS.write_text(TABLE.sub(lambda _: table, OPTIONS.read_text()))


if __name__ == "__main__":
    sys.exit(write())
