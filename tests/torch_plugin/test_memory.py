"""What FCDP holds: on the device no more than plain FSDP2 at its peak, on the host W per node."""

import pytest

import cases  # noqa: F401
import launch
import run
from configurations import PLAIN
from conftest import needs_fcdp

PAGE = 2 << 20
NAMES = list(run.COUNTING)


def both(launches, configuration, name):
    plain, _ = launches.get(NAMES, PLAIN)
    results, _ = launches.get(NAMES, configuration)
    difference = launch.first_difference(plain[name], results[name])
    assert difference is None, difference
    w = next(int(text) for tag, _, text in plain[name][0]["events"] if tag == "W")
    return w, [r["extra"]["own_peak"] for r in plain[name]], [r["marks"][-1][1] for r in results[name]]


def own_peaks(launches, configuration, name):
    """Of FSDP2's own storages under FCDP."""
    return [r["extra"]["own_peak"] for r in launches.get(NAMES, configuration)[0][name]]


def test_the_ledger_knows_fsdp2s_peak(launches):
    """The root's group, and a block's storages beside the buffer that the next block is gathered into."""
    plain, _ = launches.get(NAMES, PLAIN)
    root, block = 4 << 20, 8 << 20
    for result in plain["memory_whole_pages"]:
        assert not result["error"], result["error"]
        assert result["extra"]["own_peak"] == root + 2 * block


@needs_fcdp
@pytest.mark.parametrize("configuration", ["tau0-slice", "tau0-whole"])
def test_device_peak_is_at_most_fsdp2s(launches, configuration):
    w, plain_peaks, stats = both(launches, configuration, "memory_whole_pages")
    for plain_peak, s in zip(plain_peaks, stats):
        assert 0 < s["device_bytes"]["peak"] <= plain_peak


@needs_fcdp
@pytest.mark.parametrize("configuration", ["tau0-slice", "tau0-whole"])
def test_device_peak_with_odd_sizes_rounds_up_to_pages(launches, configuration):
    """Three groups are live at the peak, and a group's last page is part empty."""
    w, plain_peaks, stats = both(launches, configuration, "memory_odd_sizes")
    for plain_peak, s in zip(plain_peaks, stats):
        assert 0 < s["device_bytes"]["peak"] <= plain_peak + 3 * PAGE


@needs_fcdp
@pytest.mark.parametrize("configuration", ["tau0-slice", "tau0-whole"])
@pytest.mark.parametrize("name", ["memory_reshard_after_forward_2", "memory_second_dimension"])
def test_copies_take_two_groups_more(launches, configuration, name):
    """FCDP's pages of two groups. Not counted: the shards that reshard_after_forward=2 keeps, which are FSDP2's in either run."""
    block = 8 << 20
    w, plain_peaks, stats = both(launches, configuration, name)
    for plain_peak, s, own in zip(plain_peaks, stats, own_peaks(launches, configuration, name)):
        assert block <= own <= plain_peak
        assert own + s["device_bytes"]["peak"] <= plain_peak + 2 * block


@needs_fcdp
@pytest.mark.parametrize("configuration", ["tau0-slice", "tau0-whole", "tau1-slice"])
@pytest.mark.parametrize("name", ["memory_whole_pages", "memory_odd_sizes"])
def test_host_holds_w_once_per_node(launches, configuration, name):
    w, _, stats = both(launches, configuration, name)
    at_least = 0.8 * w if configuration.startswith("tau0") else 0  # a group kept on the device needs no host copy
    for s in stats:  # the node's bytes, as every rank of it sees them
        assert at_least <= s["host_bytes"]["peak"] <= 1.03 * w, (s["host_bytes"], w)
