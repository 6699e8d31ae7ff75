"""The USDT probe fcdp:event in the installed library: that it is there, and that bpftrace sees it fire."""

import os
import re
import shutil
import subprocess
import sys

import pytest

_fcdp = pytest.importorskip("fcdp._fcdp", reason="the wheel is not installed in this interpreter (tools/setup.sh)")
WRITES = """
import select, sys
from fcdp import _fcdp
_fcdp.options_load()
while not select.select([sys.stdin], [], [], 0.01)[0]:
    _fcdp.trace_bypass("a", "why", 4711, 0)
"""


def notes():
    """(provider, name, arguments) of each probe."""
    elffile = pytest.importorskip("elftools.elf.elffile", reason="needs pyelftools")
    with open(_fcdp.__file__, "rb") as stream:
        elf = elffile.ELFFile(stream)
        assert not elf.get_section_by_name(".stapsdt.base"), "then the notes' base must be its address"
        section = elf.get_section_by_name(".note.stapsdt")
        data = section.data() if section else b""
    return [tuple(part.decode() for part in note) for note in re.findall(rb"(fcdp)\0(\w+)\0([^\0]+)\0", data)]


def test_the_probe_is_in_the_library():
    found = notes()
    assert {(provider, name) for provider, name, _ in found} == {("fcdp", "event")}
    assert all(len(arguments.split()) == 4 for *_, arguments in found), found


@pytest.fixture
def bpftrace():
    if not shutil.which("bpftrace") or os.geteuid() != 0:
        pytest.skip("bpftrace is not installed here, or this is not root")
    listed = subprocess.run(
        ["bpftrace", "-l", f"usdt:{_fcdp.__file__}:fcdp:*"], capture_output=True, text=True, timeout=60
    )
    assert listed.stdout.strip() == f"usdt:{_fcdp.__file__}:fcdp:event", listed.stderr

    def run(program, *options):
        done = subprocess.run(["bpftrace", *options, "-e", program], capture_output=True, text=True, timeout=120)
        if "Attaching" not in done.stdout + done.stderr or re.search("not permitted|BPF", done.stderr):
            pytest.skip(f"this kernel lets bpftrace do nothing: {done.stderr.strip()}")
        return done.stdout

    return run


@pytest.mark.slow
@pytest.mark.parametrize("of", ["all", "one process"])
def test_bpftrace_sees_events_of_a_process(bpftrace, of):
    writer = subprocess.Popen([sys.executable, "-c", WRITES], stdin=subprocess.PIPE)
    try:
        program = (
            f'usdt:{_fcdp.__file__}:fcdp:event /pid == {writer.pid}/ {{ printf("%d %d\\n", arg0, arg2); exit(); }}'
        )
        said = bpftrace(program, *(["-p", str(writer.pid)] if of == "one process" else []))
    finally:
        writer.stdin.close()
        writer.wait(60)
    assert "99 0\n" in said, said  # a bypass; its event has no bytes
