"""FCDP_PLAN: a job has its groups where the plan says, and trains bit for bit as plain FSDP. A plan of another model is
said to be one, and changes nothing; one that is none stops the job, on every rank."""

import json

import pytest

from conftest import needs_fcdp
from models import Net
from test_bad_input import on, start, started_once

pytestmark = needs_fcdp
ARGUMENTS = {
    "fsdp2": ["--freeze", 2],
    "fsdp1": ["--fsdp1", "--freeze", 2],
    "split": ["--freeze", 2, "--split", 1, 4],
    "other split": ["--freeze", 2, "--split", 1, 2],
}
NAMES = ["", "blocks.0", "blocks.1", "blocks.2", "blocks.3"]


def counts():
    """Of each group of plain_script.py's model: trainable, frozen parameters."""
    net = Net(dim=128, n_blocks=4)
    blocks = [sum(p.numel() for p in block.parameters()) for block in net.blocks]
    root = sum(p.numel() for p in net.parameters()) - sum(blocks)
    return [(root, 0), *((0, n) if i == 2 else (n, 0) for i, n in enumerate(blocks))]


def written(path, tiers, names=NAMES, **more):
    regions = [
        {"name": name, "trainable": trainable, "frozen": frozen, "tier": tier}
        for name, (trainable, frozen), tier in zip(names, counts(), tiers)
    ]
    path.write_text(json.dumps({"schema": "fcdp-plan-plan/1", "regions": regions} | more))
    return str(path)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return started_once(tmp_path_factory, ARGUMENTS)


def train(tmp_path, plain, kind, plan, **options):
    """What rank 0 said, and the stats of every rank."""
    outcome = start(tmp_path / "job", on(FCDP_PLAN=plan, **options), arguments=ARGUMENTS[kind])
    outcome.went_on(plain(kind))
    assert outcome.messages[1:] == [[], [], []], outcome.messages
    return outcome.messages[0], [result["stats"] for result in outcome.results]


def of_groups(stats, key):
    return {group["name"]: group[key] for group in stats["groups"]}


def test_a_job_has_its_groups_where_the_plan_says(tmp_path, plain):
    """FCDP_TAU alone would keep all of them, and FCDP_RESTORE restore none by slice."""
    tiers = ["host", "device", "host", "host-whole", "gather"]
    plan = written(tmp_path / "plan.json", tiers, prefetch=2)
    said, ranks = train(tmp_path, plain, "fsdp2", plan, FCDP_TAU="1", FCDP_RESTORE="whole")
    for stats in ranks:
        assert stats["plan"] == {"path": plan, "followed": True, "difference": None}
        assert of_groups(stats, "tier") == dict(zip(NAMES[:4], tiers))
        states = of_groups(stats, "state")
        assert [name for name, state in states.items() if state == "device"] == ["blocks.0"], states
        assert {states[name] for name in ("", "blocks.1", "blocks.2")} == {"host"}, states
        assert [(one["group"], "FCDP_PLAN" in one["reason"]) for one in stats["bypassed"]] == [("blocks.3", True)]
        assert stats["moves"]["slice_loads"] > 0 and stats["moves"]["whole_loads"] > 0, stats["moves"]
    assert f"FCDP_PLAN={plan} was made for FCDP_PREFETCH=2, which is 1 here" in said[0], said
    assert said[1].startswith("fcdp: served 4 of 5 groups: its plan (FCDP_PLAN) has it gathered"), said
    assert "fcdp: serving 4 of 5 groups, " in said[2] and ", as its plan says; gathers sent " in said[2], said
    assert len(said) == 5, said  # and the two at exit


def test_a_job_follows_what_search_has_found(tmp_path, plain):
    """Of a model's shape, whose regions have other names: by their parameters. Some are in files."""
    from fcdp_plan import cli

    nothing = {"forward_flops": 1e9, "backward_flops": 2e9, "activation_bytes": 0, "stays": False}
    names = ["layer 0", "layer 1", "layer 2", "layer 3", "head"]
    regions = [
        {"name": name, "trainable": trainable, "frozen": frozen, **nothing}
        for name, (trainable, frozen) in zip(names, [*counts()[1:], counts()[0]])
    ]
    costs = {"parameter_bytes": 4, "gradient_bytes": 4, "state_bytes": 8, "shard_bytes": 4}
    costs |= {"other_bytes": 0, "live_parameters": 0}
    profile, plan = tmp_path / "profile.json", tmp_path / "plan.json"
    shape = {"schema": "fcdp-plan-profile/1", "batch": 1, "dtype": "float32", "costs": costs, "regions": regions}
    profile.write_text(json.dumps(shape))
    block_bytes = 4 * counts()[1][0]
    short = ["--host-memory", str(2 * block_bytes), "--device-budget", str(block_bytes * 5 // 4), "--disk", "6gbyte"]
    assert cli.main(["search", str(profile), "--link", "1gbit", "--gpus", "2", *short, "-o", str(plan)]) == 0
    found = [region["tier"] for region in json.loads(plan.read_text())["regions"]]
    assert found.count("device") >= 1 and found.count("file") >= 1, found
    said, ranks = train(tmp_path, plain, "fsdp2", str(plan), FCDP_SPILL_DIR=str(tmp_path / "spill"))
    tiers = dict(zip(["blocks.0", "blocks.1", "blocks.2", "blocks.3", ""], found))
    for stats in ranks:
        assert stats["plan"]["followed"]
        assert of_groups(stats, "tier") == {name: tier for name, tier in tiers.items() if tier != "gather"}
        kept = [name for name, state in of_groups(stats, "state").items() if state == "device"]
        assert sorted(kept) == sorted(name for name, tier in tiers.items() if tier == "device")
        assert of_groups(stats, "in_file") == {name: tiers[name] == "file" for name in of_groups(stats, "tier")}
        assert stats["spill"]["written_bytes"] > 0
    assert any("in FCDP_SPILL_DIR" in line and "as its plan says" in line for line in said), said


UP = {"layer": "blocks.1.up", "rows": 389, "columns": 128, "parts": 4}


def written_in_parts(path, split=UP):
    """A plan with the `up` of blocks.1 in parts, which are on the device but for the first; as search writes it."""
    from fcdp_plan import splits

    up = {"name": split["layer"], "rows": 389, "trainable": 389 * 128 + 389, "frozen": 0}
    region = {"name": NAMES[2], "trainable": counts()[2][0], "frozen": 0, "linears": [up]}
    tiers = {"": "host", "blocks.0": "host", "blocks.2": "host-whole", "blocks.3": "gather"}
    regions = [
        {"name": name, "trainable": trainable, "frozen": frozen, "tier": tiers[name]}
        for name, (trainable, frozen) in zip(NAMES, counts())
        if name in tiers
    ]
    parts = splits.groups(region, split["parts"])
    for i, group in enumerate(parts):
        own = {key: round(value) if key != "name" else value for key, value in group.items()}
        regions.append(own | {"tier": "device" if i > 1 else "host"})
    path.write_text(json.dumps({"schema": "fcdp-plan-plan/1", "splits": [split], "regions": regions}))
    return str(path), {region["name"]: region["tier"] for region in regions}


@pytest.mark.parametrize("layer", ["blocks.1.up", "layers.1.up"], ids=["by its name", "by its parameters"])
def test_a_job_splits_what_its_plan_has_in_parts(tmp_path, plain, layer):
    plan, tiers = written_in_parts(tmp_path / "plan.json", UP | {"layer": layer})
    tiers = {name.replace("layers.1", "blocks.1"): tier for name, tier in tiers.items() if tier != "gather"}
    said, ranks = train(tmp_path, plain, "split", plan)
    for stats in ranks:
        assert stats["plan"] == {"path": plan, "followed": True, "difference": None}
        assert of_groups(stats, "tier") == tiers
        kept = [name for name, state in of_groups(stats, "state").items() if state == "device"]
        assert sorted(kept) == [f"blocks.1.up.parts.{i}" for i in (1, 2, 3)], kept
    assert any(", as its plan says" in line for line in said), said


@pytest.mark.parametrize(
    ("kind", "split", "said"),
    [
        (
            "fsdp2",
            UP,
            "it has the layer blocks.1.up in 4 parts, and the model has it whole: "
            "for part in fcdp.split(model.blocks[1].up, parts=4): fully_shard(part)",
        ),
        (
            "other split",
            UP,
            "it has the layer blocks.1.up in 4 parts, and the model has it in 2: "
            "for part in fcdp.split(model.blocks[1].up, parts=4): fully_shard(part)",
        ),
        (
            "other split",
            UP | {"layer": "up"},
            "it has the layer up in 4 parts, and the model has blocks.1.up in 2: "
            "for part in fcdp.split(model.up, parts=4): fully_shard(part)",
        ),
        ("split", None, "the model has the layer blocks.1.up in 4 parts, and it has not"),
    ],
    ids=["whole", "in other parts", "another in other parts", "in parts that are not planned"],
)
def test_a_job_that_splits_otherwise_follows_none(tmp_path, plain, kind, split, said):
    path = tmp_path / "plan.json"
    plan = written_in_parts(path, split)[0] if split else written(path, ["host"] * 5)
    lines, ranks = train(tmp_path, plain, kind, plan)
    assert lines[0] == f"fcdp: FCDP_PLAN={plan} is not followed: {said}; so policy decides where its groups live"
    for stats in ranks:
        assert stats["plan"] == {"path": plan, "followed": False, "difference": said}
        assert {*of_groups(stats, "tier").values()} == {"policy"} and not stats["bypassed"]


def test_a_plan_counts_parts_as_the_split_does():
    from fcdp import splitting
    from fcdp_plan import splits

    for rows in (1, 63, 64, 389, 1000, 50257, 250000):
        for parts in range(1, min(rows, 65)):
            assert splits.places(rows, parts) == splitting._places(rows, parts)


def test_a_plan_of_another_model_changes_nothing(tmp_path, plain):
    plan = written(tmp_path / "plan.json", ["gather", "device", "device", "host", "host"], [*NAMES[:4], "blocks.4"])
    document = json.loads((tmp_path / "plan.json").read_text())
    document["regions"][4]["trainable"] += 1
    (tmp_path / "plan.json").write_text(json.dumps(document))
    said, ranks = train(tmp_path, plain, "fsdp2", plan)
    n = counts()[4][0]
    difference = f"its region 'blocks.4' has {n + 1} trainable and 0 frozen parameters, and the model's group "
    assert said[0].startswith(f"fcdp: FCDP_PLAN={plan} is of another model: {difference}"), said
    assert said[0].endswith("; so policy decides where its groups live") and len(said) == 4, said
    for stats in ranks:
        assert not stats["plan"]["followed"] and stats["plan"]["difference"].startswith(difference)
        assert {*of_groups(stats, "tier").values()} == {"policy"} and not stats["bypassed"]
        assert {*of_groups(stats, "state").values()} == {"host"}  # as FCDP_TAU=0


def test_fsdp1_follows_a_plan_too(tmp_path, plain):
    """Without FCDP_SPILL_DIR, groups that it puts there are policy's."""
    plan = written(tmp_path / "plan.json", ["host-whole", "file", "device", "host", "gather"])
    said, ranks = train(tmp_path, plain, "fsdp1", plan)
    lacks = "has groups in files, and FCDP_SPILL_DIR is not set on every rank; so policy decides where these live"
    assert said[0] == f"fcdp: FCDP_PLAN={plan} {lacks}", said
    for stats in ranks:
        states = {name.removeprefix("module."): state for name, state in of_groups(stats, "state").items()}
        assert [name for name, state in states.items() if state == "device"] == ["blocks.1"], states
        assert len(states) == 4 and len(stats["bypassed"]) == 1
        assert sorted(of_groups(stats, "tier").values()) == ["device", "host", "host-whole", "policy"]


def test_files_that_a_rank_cannot_make_are_policys(tmp_path, plain):
    plan = written(tmp_path / "plan.json", ["host", "file", "device", "host", "host"])
    outcome = start(
        tmp_path / "job",
        on(FCDP_PLAN=plan, FCDP_SPILL_DIR=str(tmp_path / "spill")),
        rank_env={2: {"FCDP_SPILL_DIR": "/dev/null/there"}},
        arguments=ARGUMENTS["fsdp2"],
    )
    outcome.went_on(plain("fsdp2"))
    why = "rank 2: FCDP_SPILL_DIR=/dev/null/there: Not a directory"
    line = f"fcdp: FCDP_PLAN={plan} has groups in files that a rank cannot make ({why}"
    said = outcome.messages[0]
    assert said[0].startswith(line) and said[0].endswith("; so policy decides where these live"), said
    for result in outcome.results:
        stats = result["stats"]
        tiers = dict(zip(NAMES, ["host", "policy", "device", "host", "host"]))
        assert (
            of_groups(stats, "tier") == tiers
            and not stats["bypassed"]
            and not any(of_groups(stats, "in_file").values())
        )


def test_plans_that_differ_between_ranks_stop_the_job(tmp_path):
    plans = [written(tmp_path / f"{i}.json", [tier, *["host"] * 4]) for i, tier in enumerate(("host", "gather"))]
    outcome = start(tmp_path / "job", on(FCDP_PLAN=plans[0]), rank_env={2: {"FCDP_PLAN": plans[1]}})
    outcome.stopped()
    for rank in outcome.job.ranks:
        last = [line for line in rank.err.splitlines() if "OptionError: fcdp: FCDP_PLAN is plan " in line]
        assert last and " on rank 2; set the same value on every rank" in last[-1], rank.err


def test_tiers_that_differ_between_ranks_are_none(tmp_path):
    """As where a rank has another model than its peers: a tier decides which collectives a rank makes."""
    from fcdp import planned

    class Peers:
        def __init__(self, *tiers):
            numbers = bytes(map(planned.TIERS.index, tiers))
            self.votes = numbers + bytes(255 - n for n in numbers)

        def agree(self, votes):
            return bytes(map(max, votes, self.votes))

    planned.read(written(tmp_path / "plan.json", ["host"] * 5))
    for theirs in (["host", "gather"], ["policy", "policy"], ["device", "host"]):
        assert planned.agreed(Peers(*theirs), ["host", "device"]) == ["policy"] * 2
        assert not planned.state["followed"] and planned.state["difference"] == "the model differs between the ranks"
    assert planned.agreed(Peers("host", "device"), ["host", "device"]) == ["host", "device"]
    assert planned.state["followed"]
    planned.read("")
    assert planned.state is None


def test_a_torch_that_does_not_tell_a_groups_parameters_follows_none(tmp_path, monkeypatch):
    from fcdp import planned

    said = []
    monkeypatch.setattr(planned.words, "write", said.append)
    path = written(tmp_path / "plan.json", ["host"] * 5)
    planned.read(path)
    assert planned.tiers(2, lambda: None, 1) == ["policy"] * 2
    why = "this torch does not tell how many parameters the model's groups have"
    assert said == [f"FCDP_PLAN={path} is not followed: {why}; so policy decides where its groups live"]
    assert planned.state["difference"] == why
    planned.read("")


REGION = {"name": "", "trainable": 1, "frozen": 0, "tier": "host"}
WRONG = {
    "it is not there": (None, "No such file or directory"),
    "no JSON": ("{", "is no JSON"),
    "another schema": (json.dumps({"schema": "fcdp-plan-profile/1", "regions": [REGION]}), "the plan.schema is "),
    "no such tier": (
        json.dumps({"schema": "fcdp-plan-plan/1", "regions": [REGION | {"tier": "tape"}]}),
        "the plan.regions[0].tier is 'tape', and can be 'device', 'host'",
    ),
    "no regions": (json.dumps({"schema": "fcdp-plan-plan/1", "regions": []}), "the plan.regions is empty"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_no_plan_is_said(tmp_path, name):
    from fcdp import OptionError, planned

    text, said = WRONG[name]
    path = tmp_path / "plan.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(OptionError) as refused:
        planned.read(str(path))
    assert str(refused.value).startswith(f"FCDP_PLAN: {path}") and said in str(refused.value)
    assert str(refused.value).endswith("; fcdp-plan search PROFILE -o FILE writes a plan")


def test_what_is_no_plan_stops_before_the_first_step(tmp_path):
    said = start(tmp_path, on(FCDP_PLAN=str(tmp_path / "nowhere.json")), n_ranks=1).stopped().strip()
    assert "\n" not in said and said.startswith("fcdp.OptionError: FCDP_PLAN: "), said
