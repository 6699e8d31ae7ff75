"""The next torch: does the newest one that can be had still have what FCDP enters? Asked for by name, as it fetches a
torch (200 MB): pytest -m next_torch. It takes PyTorch's nightly build for CPUs. NEXT_TORCH=/path/to/python names an
interpreter with another torch, and nothing is fetched."""

import importlib.metadata
import json
import os
import pathlib
import subprocess
import sys
import venv

import pytest

from conftest import needs_fcdp
from fcdp_lab.port import free_port

pytestmark = needs_fcdp
HERE = pathlib.Path(__file__).resolve().parent
NIGHTLY = "https://download.pytorch.org/whl/nightly/cpu"


def pip(python, *arguments, timeout=1800):
    command = [python, "-m", "pip", "--disable-pip-version-check", "--no-input", *arguments]
    return subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=timeout)


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """With the next torch."""
    if given := os.environ.get("NEXT_TORCH"):
        return given
    folder = tmp_path_factory.mktemp("next_torch")
    venv.create(folder / "venv", with_pip=True)
    python = folder / "venv" / "bin" / "python"
    done = pip(
        python, *f"install --pre --no-compile --timeout 15 --retries 1 --index-url {NIGHTLY} torch numpy".split()
    )
    if done.returncode:
        pytest.skip(f"no nightly torch from {NIGHTLY}: {(done.stderr.strip().splitlines() or ['?'])[-1]}")
    return python


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    """A folder with the installed fcdp alone, which serves every torch."""
    folder = tmp_path_factory.mktemp("package")
    for file in importlib.metadata.distribution("fcdp").files:
        if file.parts[0] in ("fcdp", "fcdp_memtrace") and file.suffix != ".pyc":
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            (folder / file).symlink_to(file.locate())
    return folder


def run_job(python, package, folder, name, **settings):
    """What each of two ranks, which stand for two nodes, wrote."""
    port = free_port()
    env = {k: v for k, v in os.environ.items() if not k.startswith("FCDP") and k != "PYTHONHOME"} | settings
    env |= {"PYTHONPATH": str(package), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    env |= {"LOCAL_WORLD_SIZE": "1", "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [python, HERE / "next_torch_job.py", folder / name],
            env=env | {"RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    said = [rank.communicate(timeout=300)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(said)
    return [json.loads((folder / f"{name}{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.next_torch
def test_the_next_torch_has_what_fcdp_enters_and_trains_bitwise(python, package, tmp_path):
    plain = run_job(python, package, tmp_path, "plain")
    version = plain[0]["torch"]
    assert plain[0]["mismatches"] == {"fsdp2.py": [], "fsdp1.py": []}, (
        f"torch {version} is not as FCDP knows it, which leaves jobs there to plain FSDP: see 'The next torch' in "
        "docs/decisions.md"
    )
    fcdp = run_job(python, package, tmp_path, "fcdp", USE_FCDP="1")
    for before, after in zip(plain, fcdp):
        assert after["digests"] == before["digests"], f"torch {version}: training differs"
        assert after["stats"]["bypassed"] == [] and after["stats"]["gathers"]["avoided"] > 0, after["stats"]


def test_an_all_gather_result_of_more_fields_is_not_taken_for_a_known_one():
    """As that of a torch whose all-gathers have layouts: what the new fields mean is not known here."""
    script = (
        "import collections\n"
        "from torch.distributed.fsdp._fully_shard import _fsdp_collectives, _fsdp_param, _fsdp_param_group as groups, _fsdp_state\n"
        "from fcdp import fsdp2\n"
        "fields = groups.AllGatherResult._fields\n"
        "assert list(fsdp2._mismatches(_fsdp_collectives, groups, _fsdp_param, _fsdp_state)) == []\n"
        "groups.AllGatherResult = collections.namedtuple('AllGatherResult', (*fields, 'layout', 'output_metadata'))\n"
        "print(list(fsdp2._mismatches(_fsdp_collectives, groups, _fsdp_param, _fsdp_state)))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert done.stdout == "['AllGatherResult with six fields']\n", done.stdout + done.stderr
