"""Which layer may include which: layers include in one direction, and what belongs to one file stays in it."""

import pathlib
import re
import tokenize

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
SIMULATORS = ["sim/gpu", "sim/nccl", "sim/net"]  # sim/torch is C++ on PyTorch
LAYERS = ["base", "alloc", "tiering", "comm", "torch_plugin"]  # each may include itself and what is left of it

# Names of CUDA's driver API: in the driver's file, and in what plays CUDA.
CUDA = re.compile(r"\b(CUresult|CUdeviceptr|CU[a-z]\w+|CU_[A-Z]\w+|cu[A-Z]\w+)\b")
# FSDP2's private modules, classes and functions.
PRIVATE = {
    "fsdp2.py": re.compile(
        r"_fully_shard\b|(?<!_get)_fsdp_\w+|\bFSDP(Param|ParamGroup|State|MeshInfo|CommContext)\b|\bforeach_all_gather\w*|\bAllGatherResult\b"
    ),
    "whole.py": re.compile(r"\b_redistribute\b|\bredistribute_local_tensor\b"),
    "fsdp1.py": re.compile(r"\w*_flat_param\w*|\bFlatParam\w*|\b_runtime_utils\b|\b_local_shard\b|\b_handle\b"),
}
SYSTEM_ONLY_IN = {
    "Python.h": ("torch_plugin/", "tools/memtrace/_trace", "tools/plan/_plan.c"),
    "numa.h": ("tiering/",),
    "numaif.h": ("tiering/",),
    "jemalloc/jemalloc.h": ("tiering/",),
    "liburing.h": ("tiering/disk.c",),
}
NOWHERE = re.compile(r"^(cuda|cuda_runtime|nccl|nvml)\.h$|^torch/|^ATen/|^c10/")


def c_files(*folders):
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.[ch]"))


def name_of(path):
    return path.relative_to(ROOT).as_posix()


def includes(path, kind):
    opening, closing = {"own": '""', "system": "<>"}[kind]
    return re.findall(rf"^\s*#\s*include\s+{opening}([^{closing}]+){closing}", path.read_text(), re.MULTILINE)


def code_of(path):
    """A C file without comments."""
    return re.sub(r"/\*.*?\*/|//[^\n]*", " ", path.read_text(), flags=re.DOTALL)


EVERYTHING = c_files(*LAYERS, *SIMULATORS, "tools", "tests")


def test_files_were_found():
    assert {name_of(p).split("/")[0] for p in EVERYTHING} >= {*LAYERS, "sim", "tools", "tests"}


@pytest.mark.parametrize("layer", LAYERS)
def test_a_layer_includes_itself_and_lower_layers_only(layer):
    allowed = LAYERS[: LAYERS.index(layer) + 1]
    wrong = [
        f"{name_of(p)} includes {i}"
        for p in c_files(layer)
        for i in includes(p, "own")
        if i.split("/")[0] not in allowed
    ]
    assert not wrong


def test_the_driver_is_under_the_rest_of_alloc():
    wrong = [
        f"{name_of(p)} includes {i}"
        for p in (ROOT / "alloc").glob("driver*.[ch]")
        for i in includes(p, "own")
        if not i.startswith(("base/", "alloc/driver"))
    ]
    assert not wrong


def test_the_simulated_gpu_knows_nothing_of_its_users():
    wrong = [
        f"{name_of(p)} includes {i}"
        for p in c_files("sim/gpu")
        for i in includes(p, "own")
        if not i.startswith("sim/gpu/") and i != "base/size.h"  # which is of no other file's
    ]
    assert not wrong


def test_memtrace_knows_the_format_and_the_lists_of_events_alone():
    allowed = re.compile(r"tools/memtrace/|base/trace_format\.h$|\w+/trace_events\.h$")
    wrong = [
        f"{name_of(p)} includes {i}"
        for p in c_files("tools/memtrace")
        for i in includes(p, "own")
        if not allowed.match(i)
    ]
    assert not wrong


def test_the_planner_knows_the_engine_s_arithmetic_alone():
    allowed = re.compile(r"tools/plan/|base/base\.h$|comm/plan\.h$")
    wrong = [
        f"{name_of(p)} includes {i}" for p in c_files("tools/plan") for i in includes(p, "own") if not allowed.match(i)
    ]
    assert not wrong


def test_every_include_is_a_path_from_the_root_and_exists():
    wrong = [f"{name_of(p)} includes {i}" for p in EVERYTHING for i in includes(p, "own") if not (ROOT / i).is_file()]
    assert not wrong


def test_no_header_includes_itself_over_others():
    edges = {name_of(p): includes(p, "own") for p in EVERYTHING}
    done, path = set(), []

    def visit(name):
        assert name not in path, " -> ".join([*path[path.index(name) :], name])
        if name not in done:
            path.append(name)
            for included in edges.get(name, ()):
                visit(included)
            done.add(path.pop())

    for name in edges:
        visit(name)


def test_foreign_headers_stay_where_they_belong():
    wrong = []
    for path in c_files(*LAYERS, *SIMULATORS, "tools"):
        for included in includes(path, "system"):
            home = SYSTEM_ONLY_IN.get(included)
            if NOWHERE.search(included) or (home and not name_of(path).startswith(home)):
                wrong.append(f"{name_of(path)} includes <{included}>")
    assert not wrong


def test_cuda_names_appear_in_the_driver_alone():
    wrong = [
        f"{name_of(p)}: {found[0]}"
        for p in c_files(*LAYERS, *SIMULATORS, "tools")
        if not name_of(p).startswith(("alloc/driver", "sim/gpu/"))
        if (found := CUDA.search(code_of(p)))
    ]
    assert not wrong


def words_of(path):
    """A Python file's names and strings, without comments and prose."""
    with tokenize.open(path) as lines:
        for token in tokenize.generate_tokens(lines.readline):
            if token.type == tokenize.NAME or (token.type == tokenize.STRING and not re.search(r"\s", token.string)):
                yield token.start[0], token.string


@pytest.mark.parametrize("home", PRIVATE)
def test_private_names_of_an_fsdp_appear_where_it_is_entered(home):
    """In fsdp2.py and fsdp2_reduce.py, say."""
    wrong = []
    for path in sorted((ROOT / "torch_plugin").rglob("*.py")):
        if path.name.startswith(home.removesuffix(".py")):
            continue
        for line, word in words_of(path):
            # _enable.py waits for one of FSDP's modules to be imported, and so names it.
            if PRIVATE[home].search(word) and not (
                path.name == "_enable.py" and word.startswith('"torch.distributed.fsdp.')
            ):
                wrong.append(f"{name_of(path)}:{line}: {word}")
    assert not wrong
