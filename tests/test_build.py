"""The ways into the build: presets and workflows, the layers' labels, and what GitHub runs."""

import json
import pathlib
import re
import shutil
import subprocess

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
PRESETS = json.loads((ROOT / "CMakePresets.json").read_text())
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
LABELS = {"base", "alloc", "tiering", "comm", "simgpu", "simnet", "simnccl", "bench", "memtrace", "plan"}


def test_each_workflow_configures_builds_and_tests_its_preset():
    steps = {preset["name"]: preset["steps"] for preset in PRESETS["workflowPresets"]}
    assert steps == {
        name: [{"type": kind, "name": name} for kind in ("configure", "build", "test")]
        for name in ("dev", "asan", "tsan", "release", "clang", "gpu")
    }


@pytest.mark.skipif(not shutil.which("cmake"), reason="needs cmake")
def test_cmake_reads_the_workflows():
    done = subprocess.run(["cmake", "--workflow", "--list-presets"], cwd=ROOT, capture_output=True, text=True)
    if "Unknown argument" in done.stderr:
        pytest.skip("needs cmake 3.25")
    assert done.returncode == 0, done.stderr
    assert re.findall(r'^ +"(\w+)"', done.stdout, re.M) == [preset["name"] for preset in PRESETS["workflowPresets"]]


def test_a_warning_is_an_error_in_development_builds_alone():
    """What a user or a packager builds goes on, whatever a newer compiler warns of."""
    configured = {preset["name"]: preset for preset in PRESETS["configurePresets"]}

    def warnings_are_errors(preset):
        own = preset.get("cacheVariables", {}).get("CMAKE_COMPILE_WARNING_AS_ERROR")
        return (
            own if own is not None or "inherits" not in preset else warnings_are_errors(configured[preset["inherits"]])
        )

    assert {name for name, preset in configured.items() if warnings_are_errors(preset)} == {
        "dev",
        "clang",
        "asan",
        "tsan",
    }
    files = subprocess.run(
        ["git", "ls-files", "*CMakeLists.txt", "*.cmake", "pyproject.toml"], cwd=ROOT, capture_output=True, text=True
    )
    if files.returncode:
        pytest.skip("not a git checkout")
    assert [path for path in files.stdout.split() if "-Werror" in (ROOT / path).read_text()] == []


def test_each_c_test_is_labelled_with_its_layer():
    """`ctest -L alloc` runs the tests in tests/alloc, all of them and no others."""
    if not shutil.which("ctest") or not (ROOT / "build" / "dev" / "CTestTestfile.cmake").exists():
        pytest.skip("build/dev is not configured (cmake --preset dev)")
    done = subprocess.run(
        ["ctest", "--preset", "dev", "--show-only=json-v1"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    labels = {
        test["name"]: next(p["value"] for p in test["properties"] if p["name"] == "LABELS")
        for test in json.loads(done.stdout)["tests"]
    }
    layers = {name: set(of) - {"again"} for name, of in labels.items()}
    assert {name: {name.split("_")[0]} for name in labels} == layers
    assert set().union(*layers.values()) == LABELS
    for label in LABELS:
        assert (ROOT / "tests" / label / "CMakeLists.txt").exists()


def test_github_runs_what_everybody_runs():
    yaml = pytest.importorskip("yaml", reason="needs PyYAML, which comes with pre-commit")
    commands = {}
    for path in WORKFLOWS:
        jobs = yaml.safe_load(path.read_text())["jobs"]
        commands[path.name] = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    assert commands["ci.yml"][-1] == ".ci/run"
    assert commands["wheel.yml"][:2] == ["tools/setup.sh wheel", "tools/setup.sh"]
    for path in {".ci/run", "tools/setup.sh"}:
        assert (ROOT / path).stat().st_mode & 0o111, f"{path} is not executable"
