"""The installed product: what the wheel holds and links, and that it stays out of the way until it is asked for."""

import ast
import importlib.metadata
import io
import os
import pathlib
import platform
import re
import shutil
import subprocess
import sys
import venv
import zipfile

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
# libgcc_s is the unwinder, for exceptions that pass through the extension: torch itself needs it, and manylinux has it
# on its list.
OF_THE_SYSTEM = re.compile(r"lib(c|m|pthread|dl|rt|gcc_s)\.so\.\d+$|ld-linux.*\.so\.\d+$")
# What manylinux_2_28 (PEP 600) promises of a system, as auditwheel's policy has it. We use no libstdc++.
NEWEST = {"GLIBC": (2, 28), "GCC": (7, 0, 0), "GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11)}
OURS = ("fcdp", "fcdp_lab", "fcdp_doctor", "fcdp_memtrace", "fcdp_plan")
ON_ASKING = f"import sys; print(sorted(m for m in sys.modules if m.split('.')[0] in {OURS}))"


@pytest.fixture(scope="module")
def files():
    try:
        return {str(f): pathlib.Path(f.locate()) for f in importlib.metadata.distribution("fcdp").files}
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("fcdp is not installed here (tools/setup.sh does it)")


def dynamic(path):
    elffile = pytest.importorskip("elftools.elf.elffile", reason="needs pyelftools")
    with open(path, "rb") as stream:
        elf = elffile.ELFFile(stream)
        needed = [
            tag.needed for tag in elf.get_section_by_name(".dynamic").iter_tags() if tag.entry.d_tag == "DT_NEEDED"
        ]
        symbols = [
            (s.name, s["st_shndx"], s["st_info"]["bind"])
            for s in elf.get_section_by_name(".dynsym").iter_symbols()
            if s.name
        ]
    defined = {name for name, section, _ in symbols if section != "SHN_UNDEF"}
    undefined = {name for name, section, bind in symbols if section == "SHN_UNDEF" and bind != "STB_WEAK"}
    return needed, defined, undefined


def built_wheels():
    return sorted((ROOT / "dist").glob("fcdp-*.whl"))


def versions_needed(data):
    """{(library, version)} that a shared library wants of others."""
    elffile = pytest.importorskip("elftools.elf.elffile", reason="needs pyelftools")
    section = elffile.ELFFile(io.BytesIO(data)).get_section_by_name(".gnu.version_r")
    return {(library.name, version.name) for library, versions in section.iter_versions() for version in versions}


def too_new(version):
    name, _, number = version.partition("_")
    return name not in NEWEST or tuple(int(part) for part in number.split(".")) > NEWEST[name]


def python(*arguments, **settings):
    environment = {k: v for k, v in os.environ.items() if not k.startswith("FCDP")} | settings
    return subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True, timeout=120)


def test_one_build_serves_every_python_from_3_10(files):
    tag = importlib.metadata.distribution("fcdp").read_text("WHEEL")
    assert re.search(r"^Tag: cp310-abi3-(many)?linux", tag, re.MULTILINE), tag


def test_built_wheels_install_where_torch_s_own_do():
    """On every system with glibc 2.28: by the tag that pip reads, and by the versions of the symbols that the
    loader looks up."""
    if not built_wheels():
        pytest.skip("no wheel in dist/ (tools/setup.sh builds it)")
    for wheel in built_wheels():
        assert re.search(r"-cp310-abi3-manylinux_2_28_(x86_64|aarch64)\.whl$", wheel.name), wheel.name
        with zipfile.ZipFile(wheel) as archive:
            libraries = [name for name in archive.namelist() if ".so" in name]
            assert len(libraries) == 4, libraries
            for name in libraries:
                needed = versions_needed(archive.read(name))
                # they were read
                assert ("libc.so.6", "GLIBC_2.17") in needed or ("libc.so.6", "GLIBC_2.2.5") in needed, needed
                assert not [(library, version) for library, version in needed if too_new(version)], (
                    f"{name} in {wheel.name}"
                )


@pytest.mark.parametrize(
    "version, is_newer",
    [("GLIBC_2.28", False), ("GLIBC_2.29", True), ("GLIBC_2.3.4", False), ("GLIBCXX_3.4.25", True), ("OTHER_1", True)],
)
def test_newer_symbols_would_be_noticed(version, is_newer):
    assert too_new(version) == is_newer


def test_package_and_wheel_have_one_version(files):
    text = files["fcdp/__init__.py"].read_text()
    assert re.search(r'^__version__ = "(.*)"$', text, re.MULTILINE)[1] == importlib.metadata.version("fcdp")


def test_the_wheel_holds_its_parts(files):
    assert {
        "fcdp.pth",
        "fcdp/__init__.py",
        "fcdp/_fcdp.abi3.so",
        "fcdp/_fcdp.pyi",
        "fcdp/py.typed",
        "fcdp/libfcdp_simgpu.so",
        "fcdp_lab/__init__.py",
        "fcdp_memtrace/_trace.abi3.so",
        "fcdp_plan/_plan.abi3.so",
    } <= files.keys()
    assert not [f for f in files if f.endswith((".c", ".h", ".a"))]


def test_what_is_linked_is_the_system_s_or_in_the_wheel(files):
    bundled = {path.name for name, path in files.items() if name.startswith("fcdp.libs/")}
    for name, path in files.items():
        if ".so" in path.suffixes:
            foreign = [n for n in dynamic(path)[0] if not OF_THE_SYSTEM.match(n) and n not in bundled]
            assert not foreign, f"{name} links {foreign}"


def test_an_extension_shows_its_entry_point_alone(files):
    _, defined, _ = dynamic(files["fcdp/_fcdp.abi3.so"])
    assert defined == {"PyInit__fcdp"}
    _, defined, _ = dynamic(files["fcdp_memtrace/_trace.abi3.so"])
    assert defined == {"PyInit__trace"}
    _, defined, _ = dynamic(files["fcdp_plan/_plan.abi3.so"])
    assert defined == {"PyInit__plan"}


def test_the_simulated_gpu_shows_cuda_s_names_and_its_own(files):
    _, defined, _ = dynamic(files["fcdp/libfcdp_simgpu.so"])
    assert "cuInit" in defined
    assert not [name for name in defined if not re.match(r"cu[A-Z]|simgpu_", name)]


def test_the_wheel_installs_without_a_registry_and_its_core_loads(tmp_path):
    wheels = [wheel for wheel in built_wheels() if wheel.stem.endswith(platform.machine())]
    if not wheels:
        pytest.skip("no wheel in dist/ (tools/setup.sh builds it)")
    venv.create(tmp_path / "bare", with_pip=False)
    inner = tmp_path / "bare" / "bin" / "python"
    where = subprocess.check_output(
        [inner, "-c", "import sysconfig; print(sysconfig.get_path('platlib'))"], text=True
    ).strip()
    subprocess.run(
        [sys.executable, "-m", "pip", "-q", "install", "--no-index", "--no-deps", "--target", where, wheels[0]],
        check=True,
    )
    done = subprocess.run(
        [inner, "-c", "import fcdp._fcdp; print(fcdp._fcdp.__file__)"], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(where)


@pytest.mark.parametrize("value", [None, pytest.param("0", marks=pytest.mark.slow)])
def test_nothing_of_ours_is_imported_unless_asked_for(files, value):
    settings = {} if value is None else {"FCDP": value}
    done = python("-c", "import torch, torch.distributed.fsdp; " + ON_ASKING, **settings)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


def test_asking_for_it_imports_no_torch(files):
    done = python("-c", "import sys; assert 'torch' not in sys.modules; " + ON_ASKING, FCDP="1")
    assert done.returncode == 0, done.stderr
    assert "fcdp._enable" in done.stdout


def test_a_broken_installation_does_not_break_python(tmp_path):
    (tmp_path / "fcdp.pth").write_text((ROOT / "torch_plugin" / "fcdp.pth").read_text())
    (tmp_path / "fcdp").mkdir()
    (tmp_path / "fcdp" / "__init__.py").write_text("raise RuntimeError('broken on purpose')")
    start = (
        f"import site, sys; sys.path.insert(0, {str(tmp_path)!r}); site.addsitedir({str(tmp_path)!r}); print('went on')"
    )
    done = python("-S", "-c", start, FCDP="1")
    assert done.returncode == 0
    assert done.stdout.strip() == "went on"
    assert "broken on purpose" in done.stderr


@pytest.mark.parametrize(
    "path",
    sorted([*ROOT.glob("torch_plugin/**/*.py"), *ROOT.glob("tools/**/*.py")]),
    ids=lambda p: str(p.relative_to(ROOT)),
)
def test_python_3_10_can_read_it(path):
    ast.parse(path.read_text(), feature_version=(3, 10))


def test_set_up_builds_the_wheel_anew_for_its_code_alone():
    """A changed text costs no build."""
    make = ["make", "-f", "tools/Makefile", "--eval", "sources: ; @echo $(SOURCES)", "sources"]
    sources = subprocess.check_output(make, cwd=ROOT, text=True).split()
    texts = {"README.md", "ARCHITECTURE.md", "tools/lab/README.md", "tests/conftest.py", "tools/demo/gpt.py"}
    assert texts.isdisjoint(sources)
    assert {
        "alloc/heap.c",
        "sim/gpu/phys.c",
        "torch_plugin/fcdp/runtime.py",
        "tools/doctor/fcdp_doctor/cli.py",
        "tools/lab/fcdp_lab/lab.py",
        "tools/memtrace/error.c",
        "tools/plan/shape.c",
        "pyproject.toml",
        "CMakeLists.txt",
        "cmake/zig.sh",
        "torch_plugin/fcdp.pth",
        "torch_plugin/exports.map",
        "torch_plugin/fcdp",  # a file of it that is deleted
    } <= {*sources}


def test_an_activated_venv_is_not_made_of_itself(tmp_path):
    """Its Python, found first, would be the base of a .venv that replaces it."""
    tree = shutil.copytree(ROOT / "tools", tmp_path / "tools").parent
    (tree / ".venv" / "bin").mkdir(parents=True)
    (tree / ".venv" / "bin" / "python3").symlink_to(sys.executable)
    env = os.environ | {"PATH": f"{tree}/.venv/bin:{tree}/.venv/bin:{os.environ['PATH']}"}
    asks = 'source tools/setup.sh && choose_python && echo "$BASE $PATH"'
    base = subprocess.check_output(["bash", "-c", asks], cwd=tree, text=True, env=env)
    assert str(tree) not in base, base
