"""Parameters are compared by their bytes: however they are written without a signal, training is
bit for bit plain FSDP2's."""

import json
import re
import subprocess
import sys
import zlib

import pytest

import cases  # noqa: F401
import launch
from configurations import CONFIGURATIONS, PLAIN, TRAINED, is_whole
from conftest import needs_fcdp
from run import PARTICULAR

NAMES = [
    name
    for name in TRAINED
    if re.match(r"full_|lora|frozen", name) or "edit" in name or "load" in name or "data" in name
]


READERS = ("auto", "device")
BY = (*READERS, *4 * ["not in CI"])


def names_of(by):
    """A third of the cases, each with one of the two, by its name; the whole matrix: all, with both."""
    return [name for name in NAMES if is_whole() or BY[zlib.crc32(name.encode()) // 4 % len(BY)] == by]


@needs_fcdp
@pytest.mark.parametrize("by", READERS)
def test_bytes_alone_tell(tmp_path, launches, by):
    """The host reads them, or (as on a GPU) a kernel."""
    plain, _ = launches.get(NAMES, PLAIN)
    names = names_of(by)
    got, jobs = launch.run_cases(
        names, tmp_path, CONFIGURATIONS["tau0-slice"] | {"FCDP_FINGERPRINT": by, "TEST_BLIND": "1"}
    )
    differences = {name: d for name in names if (d := launch.first_difference(plain[name], got[name])) is not None}
    assert not differences, differences
    assert "takes no fingerprints" not in "".join(job.output for job in jobs)


@needs_fcdp
@pytest.mark.parametrize("by", READERS)
def test_what_a_gather_read_is_what_its_copy_is_compared_with(tmp_path, launches, by):
    """Not what the ranks saw when they agreed. Each group gathers for itself: where small ones are gathered together
    at the agreement, such a write is an error."""
    names = list(PARTICULAR)
    plain, _ = launches.get(names, PLAIN)
    got, _ = launch.run_cases(names, tmp_path, CONFIGURATIONS["tau0-whole"] | {"FCDP_FINGERPRINT": by})
    for name in names:
        assert launch.first_difference(plain[name], got[name]) is None, name


@needs_fcdp
def test_without_bytes_and_signals_nobody_sees_it(tmp_path, launches):
    """The test can fail."""
    name = "full_adamw_foreach"
    plain, _ = launches.get([name], PLAIN)
    got, _ = launch.run_cases(
        [name], tmp_path, CONFIGURATIONS["tau0-slice"] | {"FCDP_FINGERPRINT": "never", "TEST_BLIND": "1"}
    )
    assert launch.first_difference(plain[name], got[name]) is not None


@needs_fcdp
def test_what_extensions_gather_is_never_fresh_without_bytes(tmp_path, launches):
    names = [name for name in TRAINED if name.startswith("all_gather_extension")]
    plain, _ = launches.get(names, PLAIN)
    got, _ = launch.run_cases(names, tmp_path, CONFIGURATIONS["tau0-slice"] | {"FCDP_FINGERPRINT": "never"})
    differences = {name: d for name in names if (d := launch.first_difference(plain[name], got[name])) is not None}
    assert not differences, differences


@needs_fcdp
@pytest.mark.parametrize("kernel", ["kernel", "no kernel"])
def test_offloaded_parameters_are_read_by_the_host(kernel):
    """Beside groups on a GPU, which lose nothing by it. Shards that are not read count as written by any optimizer."""
    job = subprocess.run(
        [sys.executable, launch.HERE / "readers_job.py", kernel], capture_output=True, text=True, timeout=120
    )
    assert job.returncode == 0, job.stderr
    on_gpu, offloaded, mixed, freed = json.loads(job.stdout)
    runs = kernel == "kernel"
    place = [4096, 32] if runs else [0, 0]
    assert on_gpu == {"by_device": runs, "places": [place, place], "read": [runs, runs]}
    # without a kernel FCDP_FINGERPRINT is never from there on
    assert not offloaded["by_device"] and offloaded["read"] == [runs]
    assert [bool(address) for address, _ in offloaded["places"]] == [runs]
    assert not mixed["by_device"] and mixed["read"] == [False, runs]
    assert [bool(address) for address, _ in mixed["places"]] == [False, runs]
    # what was freed has no address, and its size says that it is missing
    assert freed == {"by_device": runs, "places": [[0, 32], [0, 32]], "read": [runs, runs]}
