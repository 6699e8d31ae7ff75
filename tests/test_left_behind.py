"""However a script of tools/ is ended, what it has started ends with it, and its temporary files go. A stand-in takes the
place of the program at which the script is ended: it starts another, says that it is there, and waits."""

import contextlib
import os
import pathlib
import platform
import select
import shutil
import signal
import subprocess
import sys

import pytest

from test_commands import ROOT, environment, launch, started

pytestmark = pytest.mark.slow  # each waits for jobs that are ended

STAND_IN = '#!/bin/bash\nsleep infinity &\necho "$$" >"$STAND_IN_FIFO"\nwait\n'
# In the place of tools/setup.sh, for a copy of a script beside it: nothing is set up, and all is in the copy's folder.
SET_UP = f"""\
source {ROOT}/tools/setup.sh
ROOT=$STAND_IN_ROOT LOGS=$STAND_IN_ROOT PY=$STAND_IN_ROOT/bin/python PATH=$STAND_IN_ROOT/bin:$PATH
cd "$ROOT"
setup() {{ :; }}
"""
STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def put(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


@contextlib.contextmanager
def stood_in(folder, path, command, tag, text=STAND_IN, **settings):
    """(the command's process, the stand-in's id) once the stand-in, which is at `path`, has said that it is there. In a
    session of its own, as on a terminal."""
    put(folder / path, text)
    (folder / "tmp").mkdir()
    fifo = folder / "fifo"
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    settings |= {"STAND_IN_FIFO": str(fifo), "STAND_IN_ROOT": str(folder), "TMPDIR": str(folder / "tmp")}
    with open(folder / "said", "w") as said:
        with started(
            command,
            environment(**settings),
            tag,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=said,
            start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # nohup, around the tests, ignores it
        ) as process:
            ended = os.pidfd_open(process.pid)
            assert select.select([reader, ended], [], [], 100)[0] == [reader], (folder / "said").read_text()
            yield process, int(os.read(reader, 100))
            os.close(ended)
    os.close(reader)


def assert_ends_with_all(process, tag, folder, signum):
    """As the terminal does it, SIGINT goes to the whole group."""
    assert len(launch.tagged(tag)) > 1
    (os.killpg if signum == signal.SIGINT else os.kill)(process.pid, signum)
    assert process.wait(60) in (-signum, 128 + signum), (folder / "said").read_text()
    assert launch.lives_on(tag) == []
    assert list((folder / "tmp").iterdir()) == []


@pytest.mark.parametrize("signum", STOPS)
def test_a_step_of_the_set_up(tmp_path, signum):
    script, tag = tmp_path / "script", launch.new_tag()
    put(script, f"#!/bin/bash\nset -euo pipefail\n{SET_UP}work() {{ stand-in; }}\nstep Step step work\n")
    with stood_in(tmp_path, "bin/stand-in", [script], tag) as (process, _):
        assert_ends_with_all(process, tag, tmp_path, signum)
    assert (tmp_path / "said").read_text() == "Step ...\n"


def test_a_step_s_log_and_status_are_the_command_s(tmp_path):
    script = tmp_path / "script"
    put(
        script,
        f'#!/bin/bash\nset -euo pipefail\n{SET_UP}work() {{ false; echo "ended with $1"; exit "$1"; }}\n'
        "for rc in 0 3; do step Step step work $rc && echo good || echo $?; cat step.log; done\n",
    )
    with started([script], environment(STAND_IN_ROOT=str(tmp_path)), stdout=subprocess.PIPE) as process:
        said = process.communicate(timeout=60)[0].splitlines()
    assert process.returncode == 0
    assert [said[i] for i in (2, 3, -2, -1)] == ["good", "ended with 0", "3", "ended with 3"], said


SCRIPTS = {
    "demo": ("demo.sh", [], "bin/fcdp-lab"),
    "bench, a build": ("bench.sh", ["alloc"], "bin/cmake"),
    "bench overlap": ("bench.sh", ["overlap"], "build/release/tools/bench/overlap/fcdp-overlap"),
    "bench codec": ("bench.sh", ["codec"], "build/release/tools/bench/codec/fcdp-codec"),
    "bench trace --steps": ("bench.sh", ["trace", "--steps"], "bin/fcdp-lab"),
    "bench pressure": ("bench.sh", ["pressure"], "bin/python"),
    "bench host": ("bench.sh", ["host"], "bin/python"),
    "bench host-ahead": ("bench.sh", ["host-ahead"], "bin/python"),
    "bench policies": ("bench.sh", ["policies"], "bin/python"),
    "bench frameworks": ("bench.sh", ["frameworks"], "bin/python"),
    "bench peers": ("bench.sh", ["peers"], "bin/python"),
    "clean_machine, Debian": ("clean_machine.sh", ["--wheel", "a.whl"], "bin/debootstrap"),
    "clean_machine, inside": ("clean_machine.sh", ["--wheel", "a.whl", "--base", "base"], "bin/mount"),
}


def may_make_namespaces():
    made = subprocess.run(["unshare", "--mount", "--pid", "--fork", "true"], capture_output=True)
    return os.geteuid() == 0 and made.returncode == 0


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script(tmp_path, name):
    script, arguments, path = SCRIPTS[name]
    if "clean_machine" in name and not (may_make_namespaces() and shutil.which("ip")):
        pytest.skip("needs root that may make namespaces, and iproute2")
    put(tmp_path / "tools" / "setup.sh", SET_UP)
    put(tmp_path / "tools" / script, (ROOT / "tools" / script).read_text())
    for file in ("bin/cmake", "bin/debootstrap", "a.whl", "base/fcdp-complete"):  # what comes before
        put(tmp_path / file, "#!/bin/sh\n")
    tag = launch.new_tag()
    with stood_in(tmp_path, path, ["bash", tmp_path / "tools" / script, *arguments], tag) as (process, _):
        assert_ends_with_all(process, tag, tmp_path, signal.SIGTERM)


# In fcdp-lab's place: what it starts is ended by itself alone, at a signal that it can see.
POLITE = """\
#!/bin/bash
trap "" INT
sleep infinity &
trap "kill $!; echo >$STAND_IN_ROOT/asked; exit 143" TERM
echo "$$" >"$STAND_IN_FIFO"
wait
"""


@pytest.mark.parametrize("signum", STOPS)
def test_the_bench_of_the_frameworks_lets_the_lab_clean_up(tmp_path, signum):
    tag, bench = launch.new_tag(), ROOT / "tools" / "bench" / "frameworks.py"
    code = f"import runpy, sys, sysconfig; sysconfig.get_path = lambda name: {str(tmp_path)!r}; sys.argv = ['bench', 'fsdp2']; "
    code += f"runpy.run_path({str(bench)!r}, run_name='__main__')"
    with stood_in(tmp_path, "fcdp-lab", [sys.executable, "-c", code], tag, POLITE) as (process, _):
        assert_ends_with_all(process, tag, tmp_path, signum)
    assert (tmp_path / "asked").exists()


@pytest.mark.parametrize("signum", STOPS)
def test_a_target_of_make(tmp_path, signum):
    """As tools/test.sh runs them. What the target needs is there."""
    for file in ("Makefile", "step"):
        put(tmp_path / "tools" / file, (ROOT / "tools" / file).read_text())
    libraries = f"build/zig-{platform.machine()}/liburing/lib/liburing.a"  # the last of them
    of_step = (
        "tools/requirements/build.txt",
        "tools/requirements/wheel.txt",
        "cmake/zig.sh",
        "cmake/private_library.sh",
    )
    for file in (*of_step, ".venv/fcdp-setup/build", ".venv/fcdp-setup/wheel", libraries):
        put(tmp_path / file, "")
    script, tag = tmp_path / "script", launch.new_tag()
    put(script, f"#!/bin/bash\nset -euo pipefail\n{SET_UP}run make -f tools/Makefile -j2 ctest-dev\n")
    with stood_in(tmp_path, ".venv/bin/cmake", [script], tag) as (process, _):
        assert_ends_with_all(process, tag, tmp_path, signum)
    assert "C, dev: build ..." in (tmp_path / "said").read_text()


@pytest.mark.parametrize("processes", ["0", "2"])
@pytest.mark.parametrize("signum", STOPS)
def test_tests_that_are_ended(tmp_path, signum, processes):
    """Those which start a process by test_commands.run; the process has left their session. `processes`: of pytest-xdist."""
    if processes != "0":
        pytest.importorskip("xdist", reason="pytest-xdist is not installed (tools/setup.sh)")
    tag, test = launch.new_tag(), tmp_path / "test_waits.py"
    test.write_text("from test_commands import run\n\n\ndef test_waits():\n    run('setsid', '--wait', 'stand-in')\n")
    line = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        *(["-n", processes] if processes != "0" else []),
        "-p",
        "conftest",
        "-p",
        "no:cacheprovider",
        "--rootdir",
        tmp_path,
        test,
    ]
    path = os.pathsep.join([str(tmp_path / "bin"), os.environ["PATH"]])
    python_path = os.pathsep.join([str(ROOT / "tests"), str(tmp_path)])
    with stood_in(tmp_path, "bin/stand-in", line, tag, PATH=path, PYTHONPATH=python_path) as (process, waiting):
        variables = pathlib.Path(f"/proc/{waiting}/environ").read_bytes().decode().split("\0")
        its_tag = dict(variable.split("=", 1) for variable in variables if variable)[launch.TAG_NAME]
        assert its_tag != tag and waiting in launch.tagged(its_tag)
        os.killpg(process.pid, signum)  # as tools/step does
        assert process.wait(60) == 2, (tmp_path / "said").read_text()
        assert launch.lives_on(its_tag) == []
