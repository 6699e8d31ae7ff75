"""Groups for which host memory has no room, in files (FCDP_SPILL_DIR): each rank here is a node. Training is bit for bit
the same, and what a fresh group holds crosses the nodes once."""

import pytest

from conftest import needs_fcdp
from models import Net
from test_bad_input import on, start

pytestmark = needs_fcdp
ARGUMENTS = {"fsdp2": ["--freeze", 2], "fsdp1": ["--fsdp1", "--freeze", 2]}
W = sum(p.nbytes for p in Net(dim=128, n_blocks=4).parameters())


def train(tmp_path, kind, **options):
    return start(tmp_path, on(FCDP_LOCAL_SIZE="1", **options), arguments=ARGUMENTS[kind], n_ranks=2)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    made = {}

    def get(kind):
        if kind not in made:
            made[kind] = start(tmp_path_factory.mktemp(kind), arguments=ARGUMENTS[kind], n_ranks=2)
        return made[kind]

    return get


@pytest.mark.parametrize("kind", ARGUMENTS)
def test_what_host_memory_does_not_hold_is_in_a_file(tmp_path, plain, kind):
    spill = tmp_path / "spill"
    spilled = train(tmp_path / "file", kind, FCDP_HOST_BUDGET=str(W * 2 // 5), FCDP_SPILL_DIR=str(spill))
    assert spilled.went_on(plain(kind)) == []
    memory = train(tmp_path / "memory", kind)
    for one, other in zip(spilled.results, memory.results):
        stats = one["stats"]
        assert stats["bypassed"] == [], stats["bypassed"]
        assert stats["saved"] == other["stats"]["saved"]
        assert stats["host_bytes"]["peak"] <= W * 2 // 5
        assert W // 2 < stats["spill"]["bytes"] < W, stats["spill"]
        assert stats["spill"]["written_bytes"] > 0 and stats["spill"]["failures"] == 0, stats["spill"]
        print(stats["spill"])
    print(spilled.messages)
    assert list(spill.iterdir()) == []  # it has no name
