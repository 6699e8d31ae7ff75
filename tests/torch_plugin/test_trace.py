"""The trace of a job says what fcdp.stats() says: counters are its numbers, and events add up to them."""

import importlib.metadata
import pathlib
import struct

import pytest

import launch
from configurations import CONFIGURATIONS
from conftest import needs_fcdp

pytestmark = needs_fcdp
N_STEPS = 5


@pytest.fixture(scope="module", params=["tau0-slice", "tau1-whole", "tau0-whole"])
def ranks(request, tmp_path_factory):
    tmp = tmp_path_factory.mktemp(request.param)
    job = launch.forked(launch.HERE / "trace_job.py", [tmp, N_STEPS], tmp, CONFIGURATIONS[request.param])
    assert not job.timed_out and job.returncode == 0, job.output
    assert len(job.ranks) == launch.WORLD
    return job.ranks


def leaves(tree, prefix=""):
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def test_counters_are_the_statistics(ranks):
    for rank in ranks:
        stats, counters = rank["stats"], rank["counters"]
        said = {k: stats[k] for k in ("collectives", "moves", "saved")}
        said["gathers"] = {k: v for k, v in stats["gathers"].items() if k != "plain"}
        # restores send nothing between nodes, and agreements nothing within one: neither is counted
        assert stats["collectives"]["restore"].pop("inter_bytes_sent") == 0
        assert stats["collectives"]["agree"].pop("intra_bytes_sent") == 0
        assert {name: counters[name] for name, _ in leaves(said)} == dict(leaves(said))
        assert counters["device.gathered_bytes"] == stats["device_bytes"]["current"]
        assert counters["device.gathered_peak_bytes"] == stats["device_bytes"]["peak"]
        assert counters["device.budget_bytes"] == stats["device_bytes"]["budget"]
        assert counters["host.bytes"] == stats["host_bytes"]["current"]
        assert counters["host.peak_bytes"] == stats["host_bytes"]["peak"]
        for name in ("pins", "unpins", "pinned_bytes", "near_bytes", "far_bytes", "copies"):
            assert counters[f"host.{name}"] == stats["host"][name], name
        assert counters["host.pins"] > 0 and counters["host.bound_cpus"] == 0  # the model computes on CPUs
        assert counters["waits.gathers"] == stats["waits"]["gathers"] > 0
        assert counters["waits.ns"] / 1e9 == pytest.approx(stats["waits"]["seconds"])
        assert counters["moves.memory_wait_ns"] / 1e9 == pytest.approx(stats["waits"]["page_seconds"])
        assert counters["collectives.plain_gather.calls"] == stats["gathers"]["plain"]
        assert counters["steps"] == N_STEPS and counters["bypassed"] == len(stats["bypassed"])


def test_events_add_up_to_the_counters(ranks):
    nothing = {"n": 0, "bytes": 0, "a": 0, "b": 0}
    for rank in ranks:
        counters = rank["counters"]

        def of(kind):
            return rank["sums"].get(kind, nothing)

        assert of("load")["bytes"] == counters["moves.h2d_bytes"]
        assert of("store")["bytes"] == counters["moves.d2h_bytes"] > 0
        assert of("gather")["a"] == counters["collectives.gather.inter_bytes_sent"] > 0
        assert of("gather")["b"] == counters["collectives.gather.intra_bytes_sent"]
        assert of("restore")["b"] == counters["collectives.restore.intra_bytes_sent"]
        assert of("use")["n"] == counters["gathers.made"] + counters["gathers.avoided"]
        assert of("use")["bytes"] == counters["saved.plain_bytes"]
        assert of("evict")["n"] == counters["moves.evictions"]
        assert of("region_map")["n"] == counters["moves.maps"]
        assert of("pages_create")["bytes"] - of("pages_release")["bytes"] == counters["device.created_bytes"]
        held = sum(counters[f"device.{of}_bytes"] for of in ("tensors", "gathered"))
        assert of("pages_take")["bytes"] - of("pages_give")["bytes"] == held
        assert counters["device.created_bytes"] == held + counters["device.cached_bytes"]
        assert of("acquire")["n"] == of("release")["n"] == of("use")["n"]
        assert of("step")["n"] == N_STEPS and of("pass")["n"] >= 2 * N_STEPS - 1  # before the first there was no engine
        assert rank["untimed"] == counters["trace.spans_untimed"] == 0


def test_every_stale_copy_has_a_region_and_a_signal(ranks):
    for rank in ranks:
        names = {name for name, _ in rank["stale"]}
        assert names == {group["name"] or "(root)" for group in rank["stats"]["groups"]}
        signals = [signal for _, signal in rank["stale"]]
        first, rest = signals[: len(names)], signals[len(names) :]
        assert set(first) == {"new"} and set(rest) == {"optimizer"}


def test_regions_say_of_which_shard_group_they_are(ranks):
    groups = ranks[0]["shard_groups"]
    assert len(groups) == 1 and groups[0] != 0 and all(rank["shard_groups"] == groups for rank in ranks)


def test_the_ring_is_this_users_and_knows_its_place(ranks):
    for number, rank in enumerate(ranks):
        assert rank["mode"] == 0o600
        assert rank["place"] == [number, launch.WORLD, number // 2, 2, number % 2, 2]
        assert rank["steps"] == sorted(rank["steps"]) and rank["steps"][-1] == N_STEPS


def notes_of(data):
    """(provider, name, arguments) of the USDT probes that an ELF file of 64 bits says it has."""
    at, n_entries, names = struct.unpack_from("<Q", data, 40)[0], *struct.unpack_from("<HH", data, 60)
    sections = [struct.unpack_from("<IIQQQQ", data, at + 64 * i) for i in range(n_entries)]
    texts = sections[names][4]
    for name, _, _, _, begin, size in sections:
        if data[texts + name :].split(b"\0")[0] != b".note.stapsdt":
            continue
        end = begin + size
        while begin < end:
            n_name, n_text, _ = struct.unpack_from("<III", data, begin)
            text = data[begin + 12 + -(-n_name // 4) * 4 :][:n_text]
            yield tuple(part.decode() for part in text[24:].split(b"\0")[:3])
            begin += 12 + -(-n_name // 4) * 4 + -(-n_text // 4) * 4


def test_the_library_says_where_its_probe_is():
    library = next(f for f in importlib.metadata.distribution("fcdp").files if f.name.startswith("_fcdp."))
    probes = list(notes_of(pathlib.Path(library.locate()).read_bytes()))
    assert probes and {probe[:2] for probe in probes} == {("fcdp", "event")}
    assert all(len(probe[2].split()) == 4 for probe in probes)
