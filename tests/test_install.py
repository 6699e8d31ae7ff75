"""An installation from source, as a user makes it: with each of the system's compilers, and optimized further than the
wheel is. The wheel itself is zig's work (tools/setup.sh), which these compilers do not see."""

import importlib.util
import os
import pathlib
import platform
import re
import shutil
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
IMPORTS = "import fcdp._fcdp, fcdp_memtrace._trace, fcdp_plan._plan; print(fcdp._fcdp.__file__)"


def environment(**settings):
    """The caller's, without what it says of builds. Private libraries are those that the set-up has built, if any."""
    ours = ("FCDP", "SKBUILD", "CMAKE", "CFLAGS", "CPPFLAGS", "LDFLAGS", "CONDA", "CC")
    env = {name: value for name, value in os.environ.items() if not name.startswith(ours) or name == "FCDP_CACHE"}
    for library in ("jemalloc", "liburing"):
        folder = ROOT / "build" / f"zig-{platform.machine()}" / library
        if folder.exists():
            env[f"FCDP_{library.upper()}"] = str(folder)
    return env | settings


def runs(program):
    """Is it there, and more than the name of one?"""
    return bool(shutil.which(program)) and subprocess.run([program, "--version"], capture_output=True).returncode == 0


SETTINGS = {"default": (None, None), "Release": ("Release", None)}  # build type, CFLAGS
SETTINGS |= {f"O{n}": ("None", f"-O{n}") for n in range(4)}
BUILDS = [("gcc", "default"), ("clang", "Release")]
PYTHONS = [sys.executable]
if os.environ.get("TEST_COMPILERS") == "all":  # of this machine; else the system's two
    numbered = [f"gcc-{n}" for n in range(10, 15)] + [f"clang-{n}" for n in range(14, 20)]
    BUILDS = [(compiler, name) for compiler in ["gcc", "clang", *filter(runs, numbered)] for name in SETTINGS]
    PYTHONS += [name for n in range(10, 15) if runs(name := f"python3.{n}")]


@pytest.mark.slow
@pytest.mark.parametrize("compiler, settings", BUILDS)
def test_it_installs_from_source_without_a_warning(tmp_path, compiler, settings):
    """Warnings stop development builds alone, and a compiler's other settings must not have more of them. What it
    builds is for every Python from 3.10 on."""
    if not shutil.which(compiler):
        pytest.skip(f"{compiler} is not installed")
    if not shutil.which("cmake") or not importlib.util.find_spec("scikit_build_core"):
        pytest.skip("needs cmake and scikit-build-core (tools/setup.sh)")
    build_type, flags = SETTINGS[settings]
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "install", "-v", "--no-index"]
    config = [f"build-dir={tmp_path / 'build'}"] + [f"cmake.build-type={build_type}"] * bool(build_type)
    done = subprocess.run(
        [*pip, "--no-deps", "--no-build-isolation", "--target", tmp_path / "site", ROOT]
        + [f"--config-settings={setting}" for setting in config],
        env=environment(CC=compiler, **({"CFLAGS": flags} if flags else {})),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    assert re.findall(r".*\bwarning:.*", done.stdout) == []
    cache = (tmp_path / "build" / "CMakeCache.txt").read_text()
    assert re.search(rf"^CMAKE_C_COMPILER:.*/{compiler}\b", cache, re.M)
    assert f"CMAKE_BUILD_TYPE:STRING={build_type or 'RelWithDebInfo'}\n" in cache
    assert not flags or re.search(rf"^CMAKE_C_FLAGS:.*{flags}", cache, re.M)
    for python in PYTHONS:
        loaded = subprocess.run(
            [python, "-c", IMPORTS],
            env=environment(PYTHONPATH=str(tmp_path / "site")),
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )
        assert loaded.returncode == 0 and loaded.stdout.startswith(str(tmp_path / "site")), (python, loaded.stderr)


@pytest.fixture
def looks_for_xxhash(tmp_path):
    """cmake/FindXxhash.cmake on a machine whose own folders have none."""
    if not shutil.which("cmake"):
        pytest.skip("needs cmake")
    (tmp_path / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.22)\nproject(looks NONE)\n"
        f'list(APPEND CMAKE_MODULE_PATH "{ROOT}/cmake")\n'
        'find_package(Xxhash REQUIRED)\nmessage(STATUS "found in ${Xxhash_INCLUDE_DIR}")\n'
    )
    (tmp_path / "elsewhere" / "include").mkdir(parents=True)
    (tmp_path / "elsewhere" / "include" / "xxhash.h").touch()

    def configure(**settings):
        command = ["cmake", "-S", tmp_path, "-B", tmp_path / "build", "-G", "Ninja"]
        no_system = "-DCMAKE_FIND_USE_CMAKE_SYSTEM_PATH=OFF"
        return subprocess.run([*command, no_system], env=environment(**settings), capture_output=True, text=True)

    return configure


def test_a_missing_xxhash_is_named_as_each_system_names_it(looks_for_xxhash):
    done = looks_for_xxhash()
    assert done.returncode != 0
    for word in ("libxxhash-dev (Debian", "xxhash-devel (Fedora", "xxhash (conda-forge", "CMAKE_INCLUDE_PATH"):
        assert word in " ".join(done.stderr.split()), done.stderr


@pytest.mark.parametrize(
    ("name", "folder"), [("CONDA_PREFIX", "elsewhere"), ("CMAKE_INCLUDE_PATH", "elsewhere/include")]
)
def test_xxhash_is_found_where_the_environment_says(looks_for_xxhash, tmp_path, name, folder):
    done = looks_for_xxhash(**{name: str(tmp_path / folder)})
    assert done.returncode == 0 and f"found in {tmp_path}/elsewhere/include\n" in done.stdout, done.stderr


def test_a_machine_without_apt_is_told_what_is_missing():
    """The set-up finds everything missing, and no apt-get."""
    missing = "missing_packages() { echo build-essential; echo python3 python3-dev; }"
    no_apt = 'command() { [ "$2" != apt-get ] && builtin command "$@"; }'
    script = f"source tools/setup.sh; {missing}; {no_apt}; system_packages wheel"
    done = subprocess.run(["bash", "-c", script], cwd=ROOT, env=environment(), capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr == "Missing on this machine (by Debian's names): build-essential python3 python3-dev\n"
