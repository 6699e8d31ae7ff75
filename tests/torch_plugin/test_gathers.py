"""How often parameters cross the nodes, from fcdp.stats(): once per real change, in forward, and never otherwise."""

import pytest

import cases  # noqa: F401
import launch
import run
from cases_count import BLOCKS
from configurations import PLAIN, configurations_of, is_whole
from conftest import needs_fcdp
from test_matrix import of_matrix

pytestmark = needs_fcdp
COUNTS = [name for name in run.COUNTING if name.startswith("count_")]
SETTINGS = ["tau0-slice", "tau1-slice"] if is_whole() else ["tau0-slice"]
RANKS_PER_NODE = 2


@pytest.fixture(params=SETTINGS)
def counted(request, launches):
    plain, _ = launches.get(list(run.COUNTING), PLAIN)
    results, _ = launches.get(list(run.COUNTING), request.param)

    def of(name):
        difference = launch.first_difference(plain[name], results[name])
        assert difference is None, difference
        return Count(results[name])

    return of


class Count:
    """A counting case's marks, summed over the ranks of each node."""

    def __init__(self, ranks):
        self.ranks = ranks
        self.values = {tag: int(text) for tag, _, text in ranks[0]["events"] if tag.startswith("W")}

    def spans(self, label):
        """The index of every span that starts at a mark of this label."""
        marks = self.ranks[0]["marks"]
        return [i for i in range(len(marks) - 1) if marks[i][0] == label]

    def sent(self, span, kinds):
        """Inter-node bytes of these kinds within a span, by node."""
        nodes = [0] * (len(self.ranks) // RANKS_PER_NODE)
        for rank, result in enumerate(self.ranks):
            for sign, (_, stats) in ((-1, result["marks"][span]), (1, result["marks"][span + 1])):
                for kind in kinds:
                    entry = stats["collectives"].get(kind, {})
                    nodes[rank // RANKS_PER_NODE] += sign * entry.get("inter_bytes_sent", 0)
        return nodes

    def gathers(self, span, key):
        return [r["marks"][span + 1][1]["gathers"][key] - r["marks"][span][1]["gathers"][key] for r in self.ranks]

    def everything(self, span):
        kinds = {k for r in self.ranks for _, stats in r["marks"] for k in stats["collectives"]}
        return self.sent(span, kinds)


GATHERS = ("gather", "restore", "plain_gather")


def test_full_fine_tuning_gathers_in_forward_only(counted):
    count = counted("count_full")
    w = count.values["W"]
    for span in count.spans("forward"):
        for node in count.sent(span, GATHERS):
            assert 0.45 * w <= node <= 0.51 * w, (node, w)
    for span in count.spans("backward"):
        assert count.sent(span, GATHERS) == [0, 0]
        assert count.gathers(span, "made") == [0] * 4 and count.gathers(span, "backward") == [0] * 4
        assert max(count.sent(span, ("agree",))) < 0.01 * w


def test_bf16_gathers_half_of_it(counted):
    count = counted("count_bf16")
    w = count.values["W"]
    for span in count.spans("forward"):
        for node in count.sent(span, GATHERS):
            assert 0.45 * w <= node <= 0.52 * w, (node, w)
    for span in count.spans("backward"):
        assert count.sent(span, GATHERS) == [0, 0]


def test_micro_batches_gather_once(counted):
    count = counted("count_accumulation")
    w = count.values["W"]
    for span in count.spans("first"):
        assert max(count.sent(span, GATHERS)) <= 0.51 * w
    assert len(count.spans("later")) == 6
    for span in count.spans("later"):
        assert count.sent(span, GATHERS) == [0, 0]
        assert max(count.sent(span, ("agree",))) < 0.01 * w


def test_evaluation_without_a_step_sends_next_to_nothing(counted):
    count = counted("count_evaluation")
    w = count.values["W"]
    for span in count.spans("first evaluation"):
        assert max(count.sent(span, GATHERS)) <= 0.51 * w
    for span in count.spans("evaluation"):
        assert max(count.everything(span)) < 0.01 * w


def test_frozen_groups_are_gathered_once(counted):
    count = counted("count_frozen")
    trainable = count.values["W"] - count.values["W frozen"]
    for span in count.spans("later"):  # a training forward and an evaluation after the step: two versions at most
        assert max(count.sent(span, GATHERS)) <= 2 * 0.51 * trainable
    for result in count.ranks:
        groups = {g["name"]: g for g in result["marks"][-1][1]["groups"]}
        earlier = {g["name"]: g for g in result["marks"][1][1]["groups"]}
        for name in ("blocks.0", "blocks.1", "blocks.2"):
            assert groups[name]["gathers_made"] == earlier[name]["gathers_made"], name


def test_lora_gathers_the_adapters_alone(counted):
    count = counted("count_lora")
    for span in count.spans("later"):
        assert max(count.sent(span, GATHERS)) <= 0.51 * count.values["W trainable"] + 4096


def test_lora_beside_a_reference_gathers_the_adapters_alone(counted):
    """Grad mode changes at every pass; the bytes do not, and they are what counts."""
    count = counted("count_lora_beside_a_reference")
    for span in count.spans("later")[:-1]:
        assert max(count.sent(span, GATHERS)) <= 0.51 * count.values["W trainable"] + 4096


def test_fsdp1_sends_as_much_as_fsdp2(counted):
    """The gathers of one forward and its reduce-scatters, which gloo sends twice."""
    count = counted("count_fsdp1")
    w = count.values["W"]
    for label in ("forward", "forward bf16"):
        width = 2 if label.endswith("bf16") else 1
        for span in count.spans(label):
            assert (
                0.45 * w <= min(count.sent(span, GATHERS)) * width <= max(count.sent(span, GATHERS)) * width <= 0.52 * w
            )
    for label in ("backward", "backward bf16"):
        for span in count.spans(label):
            assert count.sent(span, GATHERS) == [0, 0]
            assert count.gathers(span, "made") == [0] * 4
    for span in count.spans("step"):
        assert max(count.everything(span)) <= 2.05 * w
    for span in [*count.spans("state dict"), *count.spans("evaluation")]:
        assert max(count.everything(span)) < 0.01 * w


def test_fsdp1_gathers_the_trainable_part_of_a_flat_parameter(counted):
    """Its ranks' parts are padded to the largest one."""
    count = counted("count_fsdp1_lora")
    for span in count.spans("later"):
        assert max(count.sent(span, GATHERS)) <= 0.51 * count.values["W gathered"] + 4096
    assert count.values["W gathered"] <= 2.2 * count.values["W trainable"] < 0.2 * count.values["W"]


@pytest.mark.parametrize("name", ["count_second_dimension", "count_reshard_after_forward_2", "count_extension"])
def test_other_forms_send_as_little(counted, name):
    """Within backward and a later micro-batch or evaluation nothing crosses, not even of FSDP2's own gathers."""
    count = counted(name)
    w = count.values["W"] + count.values.get("W others", 0)
    for span in count.spans("forward"):
        assert 0.45 * w <= min(count.sent(span, GATHERS)) <= max(count.sent(span, GATHERS)) <= 0.52 * w
    for label in ("backward", "later forward", "evaluation"):
        for span in count.spans(label):
            assert count.sent(span, GATHERS) == [0, 0]
            assert count.gathers(span, "made") == [0] * 4


def test_frozen_weights_kept_among_fewer_ranks_are_gathered_once(counted):
    """In backward FSDP2 gathers them itself, among the ranks of a node."""
    count = counted("count_reshard_after_forward_2_frozen")
    for label in ("forward", "backward", "later forward"):
        for span in count.spans(label):
            assert max(count.sent(span, GATHERS)) <= 0.01 * count.values["W"]
            assert min(count.gathers(span, "plain")) == (BLOCKS if label == "backward" else 0)


def asked(count, span):
    """How often parameters were asked for as a whole in this span, on each rank, and how they came."""
    marks = [result["marks"] for result in count.ranks]
    return [
        {
            how: rank[span + 1][1]["wholes"][how] - rank[span][1]["wholes"][how]
            for how in ("cached", "gathered", "plain")
        }
        for rank in marks
    ]


def test_whole_tensors_come_from_the_node(counted):
    """Fresh ones send the votes alone. Stale ones are gathered once: the next forward finds them."""
    count = counted("count_whole")
    w, n = count.values["W"], count.values["W parameters"]
    n_groups = 5
    for label in ("fresh", "state dict"):
        for span in count.spans(label):
            assert asked(count, span) == [{"cached": n, "gathered": 0, "plain": 0}] * 4
            assert count.sent(span, GATHERS) == [0, 0]
            assert max(count.everything(span)) < 0.01 * w
    for label in ("stale", "state dict behind a step"):
        for span in count.spans(label):
            assert asked(count, span) == [{"cached": n - n_groups, "gathered": n_groups, "plain": 0}] * 4
            assert max(count.sent(span, GATHERS)) <= 0.51 * w
    for span in count.spans("evaluation behind it"):
        assert max(count.everything(span)) < 0.01 * w


def test_whole_tensors_beside_copies_of_another_dtype_are_torchs(counted):
    count = counted("count_whole_beside_bf16")
    for span in count.spans("whole"):
        assert all(how["cached"] == how["gathered"] == 0 for how in asked(count, span))


def test_a_deleted_model_holds_nothing(counted):
    count = counted("count_nothing_after_deletion")
    for rank, result in enumerate(count.ranks):
        stats = dict(result["marks"])
        assert stats["alive"]["host_bytes"]["peak"] > 0
        assert stats["after"]["device_bytes"]["current"] <= stats["before"]["device_bytes"]["current"]
        if rank % 2 == 0:  # a node's first rank gives the memory back, once it sees that all its peers have let go
            assert stats["after"]["host_bytes"]["current"] <= stats["before"]["host_bytes"]["current"]
        for key in ("made", "avoided", "forward"):  # but what it did stays counted
            assert stats["after"]["gathers"][key] >= stats["alive"]["gathers"][key] > stats["before"]["gathers"][key]


def keys(stats):
    """Of the statistics, and of their parts: not of those that are empty at first."""
    parts = {name: set(part) for name, part in stats.items() if isinstance(part, dict)}
    return set(stats), {name: parts[name] for name in parts if name not in ("collectives", "host", "topology")}


def test_statistics_have_the_same_keys_before_anything_is_served(counted):
    from fcdp import report

    _, last = counted("count_full").ranks[0]["marks"][-1]
    assert keys(report._nothing_yet()) == keys(last)


BYPASSED = {
    "hsdp_sharded_inside_the_nodes": "node",
    "fsdp1_hybrid_inside_the_nodes": "node",
    "unsharded_storage_kept": "set_keep_unsharded_storage",
    "custom_all_gather": "custom all-gather",
    "all_gather_extension_that_gathers_a_subclass": "tensors of a subclass",
}


@pytest.mark.parametrize("name", BYPASSED)
def test_what_cannot_be_served_is_left_to_fsdp2_and_said(launches, name):
    results, jobs = of_matrix(launches, configurations_of(name)[0])
    for result in results[name]:
        before, after = result["stats"]
        new = after["bypassed"][len(before["bypassed"]) :]
        assert new, "nothing was recorded"
        assert all(BYPASSED[name].lower() in entry["reason"].lower() for entry in new), new
    assert any(
        BYPASSED[name].lower() in line.lower()
        for job in jobs
        for line in job.output.splitlines()
        if line.startswith("fcdp:")
    )


@pytest.mark.parametrize(
    "name",
    [
        "full_adamw_foreach",
        "lora",
        "nested_groups",
        "tied_weights_in_a_list_of_modules",
        "mixed_dtypes_in_one_group",
        "fsdp1_full_shard",
        "fsdp1_bf16_orig",
        "fsdp1_hybrid_over_nodes",
        "sharded_along_the_second_dimension",
        "experts_sharded_along_the_second_dimension",
        "reshard_after_forward_2",
        "all_gather_extension",
        "all_gather_extension_of_two_tensors",
        "all_gather_into_the_process_groups_memory",
    ],
)
def test_what_can_be_served_is(launches, name):
    for result in of_matrix(launches, configurations_of(name)[0])[0][name]:
        before, after = result["stats"]
        assert after["bypassed"] == before["bypassed"]
