"""The extension's stub is what the extension is, and each object says what it is."""

import ast
import inspect
import json
import pathlib
import subprocess
import sys

import pytest

from conftest import needs_fcdp

try:
    from fcdp import _fcdp
except ImportError:
    _fcdp = None

TYPES = ("Engine", "ShardGroup", "Tree", "Group", "Nccl", "Exchange")

# A group of two nodes, of which this process is one.
JOB = """
import json, sys
from fcdp import _fcdp

class Transport:
    def begin(self, lane, address, n_bytes): pass
    def finish(self, lane, begun): pass

def raises(error, text, call, *arguments):
    try:
        call(*arguments)
    except error as raised:
        assert text in str(raised), raised
    else:
        raise AssertionError(f"{call} raises nothing")

options = _fcdp.options_load()
engine = _fcdp.create_engine(_fcdp.DRIVER_SIM, 0, sys.argv[1], False, True, True)
engine.create_account()
node_of = b"".join(node.to_bytes(4, "little") for node in (0, 1))
shard_group = engine.create_shard_group(node_of, 0, Transport())
shard_group.create_host_memory()
tree, group = shard_group.create_tree(), shard_group.create_group("block", [(1 << 20, 1)])
group.attach(group.allocate_host())
topology = _fcdp.topology(node_of, 0)
found = {"_Options": options, "_Topology": topology, "_EngineStats": engine.stats(), "_GroupStats": group.stats()}
print(json.dumps({name: list(keys) for name, keys in found.items()}))
raises(TypeError, "_fcdp.Tree", group.unshard, group, _fcdp.PASS_OTHER, True, 0, 0, None)
raises(TypeError, "6 arguments", group.unshard, tree)
raises(TypeError, "_fcdp.ShardGroup", shard_group.set_streams, group)
raises(TypeError, "_fcdp.Group", tree.set_groups, [tree])
raises(TypeError, "Group", _fcdp.Group.wait, engine, 0)
raises(TypeError, "int", group.wait, "0")
raises(IndexError, "no such extent", group.address, 1)
raises(ValueError, "2 names for 1 parameters", group.watch, ["a", "b"])
engine.destroy()
raises(RuntimeError, "this engine has ended", engine.stats)
raises(RuntimeError, "this shard group has ended", shard_group.check)
raises(RuntimeError, "this tree has ended", tree.begin_forward)
raises(RuntimeError, "this group has ended", group.wait, 0)
raises(RuntimeError, "this group has ended", lambda: group.id)
"""


@pytest.fixture(scope="module")
def stub():
    path = pathlib.Path(_fcdp.__file__).with_name("_fcdp.pyi")
    assert path.with_name("py.typed").exists()
    return ast.parse(path.read_text())


def names_in(body):
    """Public ones: name -> its definition."""
    found = {}
    for node in body:
        name = getattr(node, "name", None) or (node.target.id if isinstance(node, ast.AnnAssign) else None)
        if name and not name.startswith("_"):
            assert name not in found, f"{name} is there twice"
            found[name] = node
    return found


def public(owner):
    return {name: thing for name, thing in vars(owner).items() if not name.startswith("_")}


def parameters_in(function):
    """Of a stub's function, self too; all but self are positional."""
    arguments = function.args
    assert not arguments.kwonlyargs and not arguments.vararg and not arguments.kwarg and not arguments.defaults
    assert not arguments.args, f"{function.name}: C takes no keywords, so that / comes last"
    return [argument.arg for argument in arguments.posonlyargs]


def parameters_of(function):
    found = inspect.signature(function).parameters.values()
    assert all(parameter.kind is parameter.POSITIONAL_ONLY for parameter in found), function
    return [parameter.name for parameter in found]


@needs_fcdp
def test_the_stub_has_what_the_module_has(stub):
    assert names_in(stub.body).keys() == public(_fcdp).keys()
    for name, node in names_in(stub.body).items():
        thing = getattr(_fcdp, name)
        if isinstance(node, ast.ClassDef):
            assert isinstance(thing, type), name
        elif isinstance(node, ast.FunctionDef):
            assert parameters_in(node) == parameters_of(thing), name
        else:
            assert type(thing) is int and ast.unparse(node.annotation) == "Final[int]", name


@needs_fcdp
@pytest.mark.parametrize("name", TYPES)
def test_the_stub_has_the_methods_of_a_type(stub, name):
    kind, node = getattr(_fcdp, name), names_in(stub.body)[name]
    assert names_in(node.body).keys() == public(kind).keys()
    for method, definition in names_in(node.body).items():
        if any(ast.unparse(decorator) == "property" for decorator in definition.decorator_list):
            assert inspect.isgetsetdescriptor(getattr(kind, method)), method
        else:
            assert parameters_in(definition) == parameters_of(getattr(kind, method)), method


@needs_fcdp
def test_every_type_function_and_method_is_documented():
    things = {name: thing for name, thing in public(_fcdp).items() if callable(thing)}
    things |= {f"{kind}.{name}": thing for kind in TYPES for name, thing in public(getattr(_fcdp, kind)).items()}
    lacking = [name for name, thing in things.items() if not inspect.getdoc(thing)]
    assert not lacking
    wide = [name for name, thing in things.items() if max(map(len, inspect.getdoc(thing).splitlines())) > 110]
    assert not wide


@needs_fcdp
@pytest.mark.parametrize("name", TYPES)
def test_an_object_is_made_by_the_module_s_own_functions_alone(name):
    kind = getattr(_fcdp, name)
    for make in (kind, lambda: object.__new__(kind), lambda: type("Derived", (kind,), {})):
        with pytest.raises(TypeError):
            make()
    assert "alone" in kind.__doc__


@needs_fcdp
def test_the_stub_s_dicts_have_the_keys_that_c_makes(stub):
    """And an argument of another type is refused; all objects of an engine are dead once it has ended."""
    simgpu = pathlib.Path(_fcdp.__file__).with_name("libfcdp_simgpu.so")
    job = subprocess.run([sys.executable, "-c", JOB, simgpu], capture_output=True, text=True, timeout=120)
    assert job.returncode == 0, job.stderr
    dicts = {node.name: node for node in stub.body if isinstance(node, ast.ClassDef)}
    for name, keys in json.loads(job.stdout).items():
        assert [field.target.id for field in dicts[name].body] == keys, name
