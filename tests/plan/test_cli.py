"""fcdp-plan from the installed wheel: what each subcommand prints, and what it says of wrong descriptions."""

import contextlib
import io
import json

import pytest

cli = pytest.importorskip("fcdp_plan.cli", reason="the wheel is not installed in this interpreter")
# The FCDP paper's models (its Table IV).
MODELS = {
    "10B": "--layers 40 --hidden 4800 --heads 40",
    "20B": "--layers 40 --hidden 6656 --heads 52",
    "30B": "--layers 40 --hidden 7936 --heads 62",
}


def plan(*words, status=0):
    """What the command prints, in this process; tests/test_commands.py starts it as users do."""
    command = [str(part) for word in words for part in (word.split() if isinstance(word, str) else [word])]
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        ended = cli.main(command)
    assert ended == status, out.getvalue() + err.getvalue()
    return out.getvalue() if status == 0 else err.getvalue()


@pytest.mark.parametrize(
    ("model", "nodes", "totals"),
    [
        ("10B", 2, (256, 128, 256)),
        ("20B", 2, (128, 64, 128)),
        ("30B", 2, (64, 0, 64)),
        ("10B", 4, (512, 512, 512)),
        ("20B", 4, (256, 256, 256)),
        ("30B", 4, (256, 128, 256)),
    ],
)
def test_the_largest_batches_are_the_paper_s(model, nodes, totals):
    """Tables V and VI: the constants were fitted with these in view (docs/plan.md)."""
    out = plan(f"batch {MODELS[model]} --vocab 50257 --cluster a40 --nodes {nodes} --json")
    assert json.loads(out) == dict(zip(("ZeRO-3", "ZeRO++", "FCDP"), totals))


def test_more_memory_and_fewer_activations_make_a_larger_batch(tmp_path):
    def largest(*options):
        return json.loads(plan(f"batch {MODELS['10B']} --json", *options))["ZeRO-3"]

    at_first = largest()
    assert largest("--gpu-memory 96GB") > at_first > largest("--gpu-memory 24GB")
    assert largest("--recompute") > at_first > largest("--scores --sequence 2048")
    assert largest("--lora-rank 8") >= at_first >= largest("--dtype float32")


def test_all_modes_in_a_table():
    out = plan(f"batch {MODELS['10B']} --disk 6gbyte")
    names = [line.split("  ")[0] for line in out.splitlines()[2:]]
    assert names[0] == "FSDP2" and {"FSDP2 hpZ", "HSDP", "ZeRO-Offload", "FCDP", "FCDP file"} <= {*names}
    assert "FCDP" not in plan(f"batch {MODELS['10B']} --nodes 1")


LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--layers 2", "give --hidden, --heads, or --config"),
        ("--layers 2 --hidden 10 --heads 3", "--hidden 10 is no multiple of --heads 3"),
        ("--config no.json", "no.json: No such file"),
        ("--config bad.json", "bad.json does not say layers, heads"),
        ("--config experts.json", "has experts"),
        ("--cluster b40", "no cluster 'b40': a40, h100, or a JSON file"),
        ("--cluster wrong.json", "wrong.json: gpus: a cluster has disk, gpu_memory"),
        ("--link fast", "no link 'fast': write rdma, ipoib, 25gbit"),
        ("--gpu-memory much", "much: expected bytes"),
        ("--pcie 3", "pcie: 3: write e.g. 1gbit"),
        ("--latency 3", "delay '3' is not a time"),
        ("--gpus 65", "1 to 64 GPUs"),
    ],
)
def test_a_wrong_description_is_named(tmp_path, monkeypatch, options, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.json").write_text(json.dumps({"hidden_size": 3, "vocab_size": 4}))
    (tmp_path / "experts.json").write_text(json.dumps(LLAMA | {"num_local_experts": 8}))
    (tmp_path / "wrong.json").write_text('{"gpus": 3}')
    shape = "" if options.startswith(("--layers", "--config")) else MODELS["10B"]
    assert said in plan("batch", shape, options, status=1)
