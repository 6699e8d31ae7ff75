"""Each hook of .pre-commit-config.yaml refuses a file that breaks its rule, and nothing else of it."""

import pathlib
import shutil
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
CLEAN = (
    "/* planted.c - a file that every hook passes. */\nint planted(int a);\nint planted(int a) {\n    return a;\n}\n"
)

PLANTED = {
    "clang-format": ("alloc/planted.c", CLEAN.replace("    return", "  return")),
    "clang-tidy": ("alloc/planted.c", CLEAN.replace("return a;", "if (a) return a;\n    else return a;")),
    "ruff-format": ("tools/planted.py", '"""A planted file."""\n\nA = [ 1]\n'),
    "ruff": ("tools/planted.py", '"""A planted file."""\n\nimport os\n'),
    "shellcheck": ("tools/planted.sh", "#!/bin/bash\nunused=1\n"),
    "long-lines": ("alloc/planted.c", CLEAN.replace(" that every", " that" + " really" * 15 + " every")),
    "clang-format-off": ("alloc/planted.c", CLEAN + "/* clang-format " + "off */\n"),
    "layers": ("alloc/planted.c", '#include "comm/engine.h"\n\n' + CLEAN),
}


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """A git checkout of the sources, with this one's programs and build."""
    if not (ROOT / "build" / "dev" / "compile_commands.json").exists():
        pytest.skip("build/dev is not configured (cmake --preset dev)")
    if subprocess.run([sys.executable, "-m", "pre_commit", "--version"], capture_output=True).returncode:
        pytest.skip("pre-commit is not installed (tools/setup.sh)")
    if not all(
        (ROOT / ".venv" / "bin" / name).exists() for name in ("clang-format", "clang-tidy", "ruff", "shellcheck")
    ):
        pytest.skip("the formatters and linters are not installed (tools/setup.sh)")
    if not shutil.which("git"):
        pytest.skip("needs git")
    for name in ("base", "sim", "alloc", "tiering", "comm", "torch_plugin", "tools", "tests"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__", "*.gz", "corpus"))
    for path in ROOT.glob("[.a-zA-Z]*"):
        if path.is_file() and path.name != ".git":
            shutil.copy(path, tmp_path / path.name)
    (tmp_path / "build").mkdir()
    (tmp_path / "build" / "dev").symlink_to(ROOT / "build" / "dev")
    (tmp_path / ".venv").symlink_to(sys.prefix)
    monkeypatch.setenv("PRE_COMMIT_HOME", str(tmp_path / "pre-commit"))
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    subprocess.run(["git", "add", "-A"], cwd=tmp_path, check=True)
    return tmp_path


def run(tree, hook, path):
    return subprocess.run(
        [sys.executable, "-m", "pre_commit", "run", hook, "--files", path], cwd=tree, capture_output=True, text=True
    )


def plant(tree, path, text):
    (tree / path).write_text(text)
    subprocess.run(["git", "add", path], cwd=tree, check=True)


@pytest.mark.slow  # each hook, over a checkout of its own
def test_each_hook_refuses_what_it_is_for(tree):
    for hook, (path, text) in PLANTED.items():
        plant(tree, path, CLEAN if path.endswith(".c") else text.splitlines()[0] + "\n")
        clean = run(tree, hook, path)
        assert clean.returncode == 0, clean.stdout
        plant(tree, path, text)
        broken = run(tree, hook, path)
        assert broken.returncode == 1 and "Failed" in broken.stdout, f"{hook}: {broken.stdout}"
        subprocess.run(["git", "rm", "-qf", path], cwd=tree, check=True)


@pytest.mark.parametrize("length, status", [(72, 0), (73, 1)])
def test_a_subject_has_72_characters_at_most(tree, length, status):
    message = tree / "message"
    message.write_text("x" * length + "\n\nA body may be longer: " + "y" * 200 + "\n")
    command = [
        sys.executable,
        "-m",
        "pre_commit",
        "run",
        "--hook-stage",
        "commit-msg",
        "--commit-msg-filename",
        message,
    ]
    assert subprocess.run(command, cwd=tree, capture_output=True).returncode == status
