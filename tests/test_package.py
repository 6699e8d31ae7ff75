"""The installed product: what the wheel holds and links, and that it stays out of the way until it is asked for."""

import ast
import importlib.metadata
import os
import pathlib
import re
import subprocess
import sys
import venv

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
# libgcc_s is the unwinder, for exceptions that pass through the extension: torch itself needs it, and manylinux has it on its list.
OF_THE_SYSTEM = re.compile(r"lib(c|m|pthread|dl|rt|gcc_s)\.so\.\d+$|ld-linux.*\.so\.\d+$")
ON_ASKING = "import sys; print(sorted(m for m in sys.modules if m.split('.')[0] in ('fcdp', 'fcdp_lab', 'fcdp_doctor')))"


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
        needed = [tag.needed for tag in elf.get_section_by_name(".dynamic").iter_tags() if tag.entry.d_tag == "DT_NEEDED"]
        symbols = [(s.name, s["st_shndx"], s["st_info"]["bind"]) for s in elf.get_section_by_name(".dynsym").iter_symbols() if s.name]
    defined = {name for name, section, _ in symbols if section != "SHN_UNDEF"}
    undefined = {name for name, section, bind in symbols if section == "SHN_UNDEF" and bind != "STB_WEAK"}
    return needed, defined, undefined


def python(*arguments, **settings):
    environment = {k: v for k, v in os.environ.items() if not k.startswith("FCDP")} | settings
    return subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True, timeout=120)


def test_one_build_serves_every_python_from_3_10(files):
    tag = importlib.metadata.distribution("fcdp").read_text("WHEEL")
    assert re.search(r"^Tag: cp310-abi3-(many)?linux", tag, re.MULTILINE), tag


def test_package_and_wheel_have_one_version(files):
    text = files["fcdp/__init__.py"].read_text()
    assert re.search(r'^__version__ = "(.*)"$', text, re.MULTILINE)[1] == importlib.metadata.version("fcdp")


def test_the_wheel_holds_its_parts(files):
    assert {"fcdp.pth", "fcdp/__init__.py", "fcdp/_fcdp.abi3.so", "fcdp/libfcdp_simgpu.so", "fcdp_lab/__init__.py"} <= files.keys()
    assert not [f for f in files if f.endswith((".c", ".h", ".a"))]


def test_what_is_linked_is_the_system_s_or_in_the_wheel(files):
    bundled = {path.name for name, path in files.items() if name.startswith("fcdp.libs/")}
    for name, path in files.items():
        if ".so" in path.suffixes:
            foreign = [n for n in dynamic(path)[0] if not OF_THE_SYSTEM.match(n) and n not in bundled]
            assert not foreign, f"{name} links {foreign}"


def test_the_extension_shows_its_entry_point_alone(files):
    _, defined, _ = dynamic(files["fcdp/_fcdp.abi3.so"])
    assert defined == {"PyInit__fcdp"}


def test_the_simulated_gpu_shows_cuda_s_names_and_its_own(files):
    _, defined, _ = dynamic(files["fcdp/libfcdp_simgpu.so"])
    assert "cuInit" in defined
    assert not [name for name in defined if not re.match(r"cu[A-Z]|simgpu_", name)]


def test_the_wheel_installs_without_a_registry_and_its_core_loads(tmp_path):
    wheels = list((ROOT / "dist").glob("fcdp-*.whl"))
    if not wheels:
        pytest.skip("no wheel in dist/ (tools/setup.sh builds it)")
    venv.create(tmp_path / "bare", with_pip=False)
    inner = tmp_path / "bare" / "bin" / "python"
    where = subprocess.check_output([inner, "-c", "import sysconfig; print(sysconfig.get_path('platlib'))"], text=True).strip()
    subprocess.run([sys.executable, "-m", "pip", "-q", "install", "--no-index", "--no-deps", "--target", where, wheels[0]], check=True)
    done = subprocess.run([inner, "-c", "import fcdp._fcdp; print(fcdp._fcdp.__file__)"], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(where)


@pytest.mark.parametrize("value", [None, "0"])
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
    start = f"import site, sys; sys.path.insert(0, {str(tmp_path)!r}); site.addsitedir({str(tmp_path)!r}); print('went on')"
    done = python("-S", "-c", start, FCDP="1")
    assert done.returncode == 0
    assert done.stdout.strip() == "went on"
    assert "broken on purpose" in done.stderr


@pytest.mark.parametrize("path", sorted([*ROOT.glob("torch_plugin/**/*.py"), *ROOT.glob("tools/**/*.py")]), ids=lambda p: str(p.relative_to(ROOT)))
def test_python_3_10_can_read_it(path):
    ast.parse(path.read_text(), feature_version=(3, 10))
