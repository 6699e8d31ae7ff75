"""What keeps a reader out of C code, within limits: helpers that are called once, long functions that nothing explains,
wide headers, files that are two things. `python tests/test_style.py` prints the table; with -v also what it counts."""

import pathlib
import re
import shutil
import sys
from collections import Counter, defaultdict

ROOT = pathlib.Path(__file__).resolve().parents[1]
LAYERS = ("alloc", "tiering", "comm", "torch_plugin")
LONG = 15  # lines between the braces
WIDE = 110  # columns
MOST_CALLED_ONCE, LEAST_EXPLAINED = 0.35, 0.90

# clang-format's layout: a definition begins in column 0 and ends with a brace in column 0.
DEFINITION = re.compile(r"^(?P<head>[a-zA-Z_][^;{}#=]*?\b(?P<name>\w+)\([^;{}]*\)) \{\n(?P<body>.*?)^\}$", re.M | re.S)
COMMENT = re.compile(r"/\*.*?\*/", re.S)
STRING = re.compile(r'"(?:\\.|[^"\\\n])*"')


class Function:
    def __init__(self, path, match, text):
        self.path, self.name, self.body = path, match["name"], match["body"]
        self.is_static = match["head"].startswith("static ")
        self.n_lines = self.body.count("\n")
        above = text[: match.start()].rstrip("\n").rsplit("\n", 1)[-1]
        self.has_comment = above.endswith("*/") and not above.startswith("/* ----")


def without_comments(text):
    """Without its comments and strings, and with as many lines."""
    text = COMMENT.sub(lambda m: "\n" * m[0].count("\n"), text)
    return STRING.sub('""', text)


def sources(root, suffix):
    return [path for layer in LAYERS for path in sorted((root / layer).rglob(f"*{suffix}"))]


def functions(root):
    found = []
    for path in sources(root, ".c"):
        text = path.read_text()
        found += [Function(path, match, text) for match in DEFINITION.finditer(text)]
    return found


def called_once(all_functions):
    """(static helpers called from one place alone, static helpers that are called). What is passed on as a pointer is
    neither: it has to be a function."""
    by_file = defaultdict(list)
    for function in all_functions:
        by_file[function.path].append(function)
    once, called = [], []
    for path, of_file in by_file.items():
        text = without_comments(path.read_text())
        uses = Counter(re.findall(r"\b\w+\b", text))
        calls = Counter(re.findall(r"\b(\w+)\(", text))
        heads = Counter(re.findall(r"^static [^;{}]*?\b(\w+)\(", text, re.M))
        for function in of_file:
            name = function.name
            n_calls = calls[name] - heads[name]
            if function.is_static and n_calls == uses[name] - heads[name] > 0:
                called.append(function)
                if n_calls == 1:
                    once.append(function)
    return once, called


def explained(root, all_functions):
    """(long functions with a comment above them, or above their declaration; long functions)"""
    headers = "\n".join(path.read_text() for path in sources(root, ".h"))
    long = [function for function in all_functions if function.n_lines > LONG]
    declared = {
        name
        for block in re.finditer(r"\*/\n((?:[^\n]+\n)+)", headers)
        for name in re.findall(r"\b(\w+)\(", without_comments(block[1]))
    }
    return [f for f in long if f.has_comment or (not f.is_static and f.name in declared)], long


def first_sentence(path):
    match = re.match(r"/\* (.*?)(?:\.\s|\*/)", path.read_text(), re.S)
    return re.sub(r"\s+\*?\s*", " ", match[1]) if match else ""


def wide_lines(root):
    return [
        f"{path.relative_to(root)}:{i}"
        for path in sources(root, ".h")
        for i, line in enumerate(path.read_text().splitlines(), 1)
        if len(line) > WIDE
    ]


def two_things(root):
    """Files whose first sentence joins two subjects: "the pool and its reclaimers"."""
    files = sources(root, ".c") + sources(root, ".h")
    return [f"{path.relative_to(root)}: {s}" for path in files if " and " in (s := first_sentence(path))]


def comment_share(root):
    n = [0, 0]
    for path in sources(root, ".c"):
        text = path.read_text()
        comments = sum(m[0].count("\n") + 1 for m in COMMENT.finditer(text))
        n[0] += comments
        n[1] += sum(1 for line in without_comments(text).splitlines() if line.strip())
    return n[0] / n[1]


class Row:
    """One line of the table: what is measured, the figure, whether it is within its limit, and what counts."""

    def __init__(self, title, figure, limit, kept, offenders):
        self.title, self.figure, self.limit, self.kept, self.offenders = title, figure, limit, kept, offenders


def measure(root):
    everything = functions(root)
    once, called = called_once(everything)
    with_comment, long = explained(root, everything)
    bare = [function for function in long if function not in with_comment]
    wide, two = wide_lines(root), two_things(root)

    def places(these):
        return [f"{f.path.relative_to(root)}: {f.name} ({f.n_lines} lines)" for f in these]

    return {
        "called once": Row(
            "static helpers called once",
            f"{len(once) / len(called):.1%} of {len(called)}",
            f"under {MOST_CALLED_ONCE:.0%}: inline those whose name adds nothing",
            len(once) < MOST_CALLED_ONCE * len(called),
            places(once),
        ),
        "not explained": Row(
            f"functions over {LONG} lines with a comment",
            f"{len(with_comment) / len(long):.1%} of {len(long)}",
            f"over {LEAST_EXPLAINED:.0%}: say above each why it is as it is",
            len(with_comment) > LEAST_EXPLAINED * len(long),
            places(bare),
        ),
        "wide": Row(f"header lines over {WIDE} columns", str(len(wide)), "none: wrap them", not wide, wide),
        "and": Row(
            'files whose first sentence has "and"',
            str(len(two)),
            "none: split the file, or say what the one thing is",
            not two,
            two,
        ),
    }


def table(verbose=False):
    rows = measure(ROOT)
    for row in rows.values():
        print(f"{row.title:<40} {row.figure:<14} {row.limit}")
    print(f"{'comment / code lines in .c':<40} {comment_share(ROOT):.2f}")
    if verbose:
        for name, row in rows.items():
            print(f"\n{name}:", *row.offenders, sep="\n  ")


def pytest_generate_tests(metafunc):
    """As pytest.mark.parametrize: the table is printed where there is no pytest too."""
    if "rule" in metafunc.fixturenames:
        metafunc.parametrize("rule", PLANTED)


def violations(root):
    """Rule -> what fails its test, with every place that counts; rules that are kept are not in it."""
    return {
        rule: "\n  ".join([f"{row.title}: {row.figure}, and must be {row.limit}", *row.offenders])
        for rule, row in measure(root).items()
        if not row.kept
    }


def test_the_limits_are_kept():
    found = violations(ROOT)
    assert not found, "\n".join(found.values())


STATEMENTS = "".join(f"    a += {i};\n" for i in range(LONG))
PLANTED = {
    "called once": "/* planted.c - one thing. */\n"
    + "".join(
        f"static int helper{i}(int a) {{\n    return a;\n}}\n\nint caller{i}(int a) {{\n    return helper{i}(a);\n}}\n"
        for i in range(100)
    ),
    "not explained": "/* planted.c - one thing. */\n"
    + "".join(f"\nint long{i}(int a) {{\n{STATEMENTS}    return a;\n}}\n" for i in range(100)),
    "wide": "/* planted.h - one thing. */\n" + f"int planted({'int parameter, ' * 8}...);\n",
    "and": "/* planted.h - the pool and its reclaimers. */\n",
}


def test_a_planted_violation_is_named(rule, tmp_path):
    for layer in LAYERS:
        shutil.copytree(ROOT / layer, tmp_path / layer)
    (tmp_path / "alloc" / PLANTED[rule].split()[1]).write_text(PLANTED[rule])
    found = violations(tmp_path)
    assert list(found) == [rule]
    assert "alloc/planted" in found[rule]


if __name__ == "__main__":
    table("-v" in sys.argv[1:])
