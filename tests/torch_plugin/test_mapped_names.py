"""Which groups FCDP_HOST_MAP names, and what is said of it: without a job."""

import pytest

from fcdp import _fcdp, mapped, words


class Shards:
    """Of one rank, beside others that answer as `others` says."""

    ranks = (0,)

    def __init__(self, others=None):
        self.others = others

    def agree(self, mine):
        return bytes(map(max, mine, self.others or mine))

    def raise_together(self, problem):
        assert problem is None, problem

    def first_problem(self, text):
        return f"rank 0: {text}" if text else "rank 1: it has none"


class Handle:
    def __init__(self, lacks=""):
        self.lacks, self.is_mapped = lacks, False

    def map_host(self):
        if self.lacks:
            raise _fcdp.Error(self.lacks, _fcdp.ERR_UNSUPPORTED)
        self.is_mapped = True

    def unmap_host(self):
        assert self.is_mapped
        self.is_mapped = False


@pytest.fixture
def said(monkeypatch):
    lines = []
    monkeypatch.setattr(words, "write", lines.append)
    monkeypatch.setattr(mapped, "_names", [])
    monkeypatch.setattr(mapped, "_patterns", [])
    monkeypatch.setattr(words, "_said_once", set())
    return lines


def test_a_name_is_a_groups_or_its_end_or_a_pattern():
    named = {"tokens": ["tokens", "model.tokens"], "layers.[0-2]": ["layers.1", "model.layers.2"], "(root)": [""]}
    names = ["", "tokens", "model.tokens", "tokens.norm", "layers.1", "model.layers.2", "layers.10", "xtokens"]
    for pattern, groups in named.items():
        assert [name for name in names if mapped.is_named(name, pattern)] == groups
    assert all(mapped.is_named(name, "*") for name in names)


def test_all_ranks_map_a_group_or_none(said):
    groups = {name: Handle() for name in ("tokens", "head", "block")}
    mapped.map_groups(Shards(others=bytes([0, 1, 2])), list(groups.items()), "tokens, head")
    assert [handle.is_mapped for handle in groups.values()] == [True, False, False]
    assert said == ["FCDP_HOST_MAP: 'head' is not mapped, and served as without it (rank 1: it has none)"]


def test_what_cannot_be_mapped_is_told_once(said):
    for _ in range(2):
        mapped.map_groups(Shards(), [("a", Handle("no such memory")), ("b", None), ("c", Handle())], "[ab]")
    assert said == ["FCDP_HOST_MAP: 'a', 'b' are not mapped, and served as without it (rank 0: no such memory)"]


def test_a_group_that_fcdp_leaves_to_fsdp_is_not_mapped(said):
    mapped.map_groups(Shards(), [("tokens", None), ("head", Handle())], "tokens")
    assert said == ["FCDP_HOST_MAP: 'tokens' is not mapped, and served as without it (rank 0: FCDP does not serve it)"]


def test_a_name_that_no_model_has_is_told_after_a_step(said):
    """A group may be another model's, or another shard group's."""
    mapped.map_groups(Shards(), [("", Handle()), ("block", Handle())], "tokens,embed")
    mapped.map_groups(Shards(), [("tokens", Handle())], "tokens,embed")
    assert said == []
    mapped.say_unmatched()
    mapped.say_unmatched()
    names = "'(root)', 'block', 'tokens'"
    assert said == [f"FCDP_HOST_MAP: rank 0 has no group that is called 'embed'; it has {names}"]


def test_without_the_option_nothing_is_agreed_on(said):
    mapped.map_groups(None, [("tokens", Handle())], "")
    mapped.say_unmatched()
    assert said == [] and mapped.digest("") == 0 and mapped.digest("a") not in (0, mapped.digest("b"))
