"""What keeps a reader out of C code, measured: helpers that are called once, long functions that nothing explains,
wide headers, files that are two things. `python tests/test_style.py` prints the table; with -v also what it counts."""

import pathlib
import re
import sys
from collections import defaultdict

ROOT = pathlib.Path(__file__).resolve().parents[1]
LAYERS = ("alloc", "tiering", "comm", "torch_plugin")
LONG = 15  # lines between the braces

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


def sources(suffix):
    return [path for layer in LAYERS for path in sorted((ROOT / layer).rglob(f"*{suffix}"))]


def functions():
    found = []
    for path in sources(".c"):
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
        for function in of_file:
            uses = len(re.findall(rf"\b{function.name}\b", text)) - len(
                re.findall(rf"^static [^;{{}}]*\b{function.name}\(", text, re.M)
            )
            calls = len(re.findall(rf"\b{function.name}\(", text)) - (
                len(re.findall(rf"^static [^;{{}}]*\b{function.name}\(", text, re.M))
            )
            if function.is_static and calls == uses > 0:
                called.append(function)
                if calls == 1:
                    once.append(function)
    return once, called


def explained(all_functions):
    """(long functions with a comment above them, or above their declaration; long functions)"""
    headers = "\n".join(path.read_text() for path in sources(".h"))
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


def wide_lines():
    return [
        f"{path.relative_to(ROOT)}:{i}"
        for path in sources(".h")
        for i, line in enumerate(path.read_text().splitlines(), 1)
        if len(line) > 110
    ]


def two_things():
    """Files whose first sentence joins two subjects: "the pool and its reclaimers"."""
    return [f"{p.relative_to(ROOT)}: {s}" for p in sources(".c") + sources(".h") if " and " in (s := first_sentence(p))]


def comment_share():
    n = [0, 0]
    for path in sources(".c"):
        text = path.read_text()
        comments = sum(m[0].count("\n") + 1 for m in COMMENT.finditer(text))
        n[0] += comments
        n[1] += sum(1 for line in without_comments(text).splitlines() if line.strip())
    return n[0] / n[1]


def table(verbose=False):
    everything = functions()
    once, called = called_once(everything)
    with_comment, long = explained(everything)
    wide, two = wide_lines(), two_things()
    print(f"static helpers called once               {len(once) / len(called):.0%} of {len(called)}")
    print(f"functions over {LONG} lines with a comment    {len(with_comment) / len(long):.0%} of {len(long)}")
    print(f"comment / code lines in .c               {comment_share():.2f}")
    print(f"header lines over 110 columns            {len(wide)}")
    print(f'files whose first sentence has "and"     {len(two)}')
    if verbose:
        for title, items in (
            ("called once", [f"{f.path.relative_to(ROOT)}: {f.name} ({f.n_lines} lines)" for f in once]),
            ("not explained", [f"{f.path.relative_to(ROOT)}: {f.name}" for f in long if f not in with_comment]),
            ("wide", wide),
            ("and", two),
        ):
            print(f"\n{title}:", *items, sep="\n  ")


if __name__ == "__main__":
    table("-v" in sys.argv[1:])
