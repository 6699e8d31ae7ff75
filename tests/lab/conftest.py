"""Tests of fcdp-lab run the real command; those that need namespaces skip where the kernel refuses them."""

import json
import os
import pathlib
import subprocess
import sys
import uuid

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools" / "lab"))


class Lab:
    """Starts fcdp-lab on a script; `mark` is in the environment of every process that comes of it."""

    def __init__(self, folder):
        self.folder = folder
        self.python = sys.executable
        self.mark = uuid.uuid4().hex
        self.env = {
            **os.environ,
            "PYTHONPATH": str(ROOT / "tools" / "lab"),
            "LAB_TEST_MARK": self.mark,
            "TMPDIR": str(folder),
        }

    def script(self, text, name="script.py"):
        path = self.folder / name
        path.write_text(text)
        return str(path)

    def command(self, script, *script_args, options=(), launcher="direct"):
        lab = [self.python, "-m", "fcdp_lab", "--launcher", launcher, "--grace", "1"]
        return [*lab, *options, "--", script, *script_args]

    def run(self, script, *script_args, options=(), launcher="direct", **kwargs):
        return subprocess.run(
            self.command(script, *script_args, options=options, launcher=launcher),
            env=self.env,
            capture_output=True,
            text=True,
            timeout=600,  # the first run on the simulated device compiles it
            **kwargs,
        )

    def figures(self, script, *script_args, options=(), **kwargs):
        """The JSON document of a run that must succeed."""
        path = self.folder / f"{uuid.uuid4().hex}.json"
        done = self.run(script, *script_args, options=[*options, "--json", str(path)], **kwargs)
        assert done.returncode == 0, done.stderr
        return json.loads(path.read_text())

    def processes(self):
        """Of this test, the lab's own included."""
        found = []
        for entry in pathlib.Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != os.getpid():
                try:
                    if f"LAB_TEST_MARK={self.mark}".encode() in (entry / "environ").read_bytes():
                        found.append(int(entry.name))
                except OSError:
                    continue
        return found

    @staticmethod
    def namespaces_in_use():
        found = set()
        for link in pathlib.Path("/proc").glob("[0-9]*/ns/net"):
            try:
                found.add(os.readlink(link))
            except OSError:
                continue
        return found


@pytest.fixture(scope="session")
def namespaces_allowed(tmp_path_factory):
    lab = Lab(tmp_path_factory.mktemp("probe"))
    done = lab.run(lab.script("pass"), options=["--nodes", "1", "--ranks", "1", "--modes", "fsdp"])
    if "cannot create network namespaces" in done.stderr or "install iproute2" in done.stderr:
        pytest.skip(done.stderr.strip())


@pytest.fixture(scope="session")
def lab_in(namespaces_allowed):
    """Makes a Lab in a folder, for fixtures that live longer than a test."""
    return Lab


@pytest.fixture
def lab(tmp_path, lab_in):
    return lab_in(tmp_path)


@pytest.fixture
def command_line(tmp_path):
    """A Lab for calls that must fail before they need a namespace."""
    return Lab(tmp_path)
