"""The documents are what the code says: the generated table, links, and paths that they name."""

import ast
import pathlib
import re
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("tools/*/*.md")])
OPTIONS = ROOT / "docs" / "options.md"
MEMTRACE = ROOT / "docs" / "memtrace.md"
FOLDERS = "base|sim|alloc|tiering|comm|torch_plugin|tools|tests|examples|cmake|docs|\\.github|\\.ci"


def table(name):
    return re.compile(rf"<!-- {name}: begin -->\n(.*?)<!-- {name}: end -->", re.S)


def name_of(path):
    return path.relative_to(ROOT).as_posix()


def anchors(text):
    """The fragments under which GitHub shows a document's headings."""
    headings = re.findall(r"^#+ (.*)$", text, re.M)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_tables_of_options_are_the_codes():
    cli = pytest.importorskip("fcdp_doctor.cli", reason="the wheel is not installed in this interpreter")
    written = table("options").search(OPTIONS.read_text())[1].strip()
    assert written == cli.options_tables(), (
        "docs/options.md is not what the installed wheel says. Run: bash tools/setup.sh && "
        ".venv/bin/python tests/test_readme.py"
    )


def test_the_options_that_ranks_must_share_are_named():
    code = ast.parse((ROOT / "torch_plugin" / "fcdp" / "c10d.py").read_text())  # to import it takes torch
    alike = next(
        ast.literal_eval(line.value)
        for line in code.body
        if getattr(line, "targets", None) and line.targets[0].id == "_ALIKE"
    )
    sentence = next(part for part in OPTIONS.read_text().split("\n\n") if "must be the same on every rank" in part)
    assert set(re.findall(r"`(FCDP_\w+)`", sentence.split(", so they")[0])) == set(alike.values())


def rows(head, lines):
    cells = [[str(cell).replace("|", "\\|") for cell in line] for line in [head.split(" | "), *lines]]
    cells.insert(1, ["---"] * len(cells[0]))
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)


def tables_of_memtrace():
    """name -> the table, from the lists in the code."""
    from fcdp_memtrace import _trace

    lists = _trace.tables()
    return {
        "rules": rows("rule | what it says", [(f"`{name}`", says) for name, says in _trace.check_rules()]),
        "kinds": rows(
            "number | kind | what it says | `a` | `b`",
            [(n, f"`{name}`", says, a or "-", b or "-") for _, n, name, a, b, says in lists["events"]],
        ),
        "causes": rows("number | cause | what it says", [(n, f"`{x}`", says) for _, n, x, says in lists["causes"]]),
        "counters": rows(
            "number | counter | unit | what it is | what it counts",
            [(n, f"`{x}`", unit, what, says) for _, n, x, unit, what, says in lists["counters"]],
        ),
        "streams": rows("number | stream | what runs on it", [(n, f"`{x}`", s) for _, n, x, s in lists["streams"]]),
    }


def test_the_tables_of_memtrace_are_the_codes():
    pytest.importorskip("fcdp_memtrace", reason="the wheel is not installed in this interpreter")
    for name, made in tables_of_memtrace().items():
        written = table(name).search(MEMTRACE.read_text())[1].strip()
        assert written == made, (
            f"the {name} in docs/memtrace.md are not what the installed wheel says. Run: bash tools/setup.sh && "
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
    assert [line for line in prose.splitlines() if line.count("`") % 2] == [], "a command that cannot be copied"


def test_every_page_of_docs_is_linked_from_the_readme():
    linked = re.findall(r"\]\((docs/[^)#]+\.md)\)", (ROOT / "README.md").read_text())
    assert set(linked) == {name_of(path) for path in ROOT.glob("docs/*.md")}


def put(document, name, made):
    text = f"<!-- {name}: begin -->\n{made}\n<!-- {name}: end -->"
    document.write_text(table(name).sub(lambda _: text, document.read_text()))


def write():
    from fcdp_doctor.cli import options_tables

    put(OPTIONS, "options", options_tables())
    for name, made in tables_of_memtrace().items():
        put(MEMTRACE, name, made)


if __name__ == "__main__":
    sys.exit(write())
