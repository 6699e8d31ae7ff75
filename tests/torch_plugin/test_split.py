"""fcdp.split(): the values of a split layer, its state dicts, and what is not split. (Trainings: cases_shape.py's
linear_layers_in_parts. Memory: tests/torch_sim/test_split_peak.py.)"""

import copy
import pickle
import weakref

import pytest
import torch
import torch.nn as nn

import launch
from conftest import needs_fcdp

pytestmark = needs_fcdp
EPS = {torch.float32: 2e-6, torch.bfloat16: 6e-3}  # of the input's gradient, relative; measured: 4e-7, 2.7e-3


def pair(parts, rows=1000, columns=48, dtype=torch.float32, **kwargs):
    import fcdp

    whole, split = (nn.Linear(columns, rows, dtype=dtype, **kwargs) for _ in range(2))
    split.load_state_dict(whole.state_dict())
    assert len(fcdp.split(split, parts)) == parts
    return whole, split


@pytest.mark.parametrize("dtype", EPS)
@pytest.mark.parametrize("parts, bias", [(1, True), (7, True), (8, False)])
def test_a_split_layer_computes_as_the_whole_one(parts, bias, dtype):
    """Its outputs and its weight's gradient have the same bits; that of its input is a sum of the parts'."""
    torch.manual_seed(parts)
    whole, split = pair(parts, bias=bias, dtype=dtype)
    x = torch.randn(2, 9, 48, dtype=dtype)
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    outputs = [layer(one) for layer, one in zip((whole, split), inputs)]
    assert torch.equal(*outputs)
    gradient = torch.randn_like(outputs[0])
    for out in outputs:
        out.backward(gradient)
    assert torch.equal(whole.weight.grad, torch.cat([part.weight.grad for part in split.parts]))
    difference = (inputs[0].grad.double() - inputs[1].grad.double()).norm() / inputs[0].grad.double().norm()
    assert difference <= EPS[dtype]


def test_an_evaluation_in_inference_mode():
    whole, split = pair(3, rows=300)
    with torch.inference_mode():
        state = split.state_dict()
        assert torch.equal(whole(torch.ones(2, 48)), split(torch.ones(2, 48)))
    assert torch.equal(state["weight"], whole.weight)


def test_a_second_derivative():
    _, split = pair(3, rows=7, columns=4, dtype=torch.float64)
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda x: split(x).tanh(), [x])


def test_the_module_stays_itself_and_its_parts_begin_as_views():
    import fcdp

    layer = nn.Linear(4, 10)
    seen, address = [], layer.weight.data_ptr()
    layer.register_forward_hook(lambda module, inputs, out: seen.append(out.shape))
    layer.weight.of_mine = "kept"
    parts = fcdp.split(layer, 3)
    assert [part.out_features for part in parts] == [3, 4, 3] and parts == list(layer.parts)
    assert [part.weight.data_ptr() - address for part in parts] == [0, 48, 112]
    assert all(part.weight.of_mine == "kept" for part in parts)
    layer(torch.ones(2, 4))
    assert seen == [(2, 10)]
    assert (layer.weight.dtype, layer.weight.shape, layer.bias.shape) == (torch.float32, (10, 4), (10,))
    with pytest.raises(TypeError, match="no whole weight to compute with; call the layer, or do not split it"):
        nn.functional.linear(torch.ones(2, 4), layer.weight)
    with pytest.raises(AttributeError, match="has no 'T': its rows are the parameters of the layer's parts"):
        layer.weight.T  # noqa: B018
    with pytest.raises(TypeError, match="of a split layer takes keyword arguments alone"):
        layer.state_dict({})
    with pytest.raises(TypeError, match=r"fcdp.split\(\) takes a torch.nn.Module, not Parameter"):
        fcdp.split(nn.Linear(4, 10).weight, 2)


@pytest.mark.parametrize("again", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_compute_the_same(again):
    whole, split = pair(3, rows=300)
    split.state_dict()
    x = torch.ones(2, 48)
    assert torch.equal(whole(x), again(split)(x))


def test_a_model_without_memory_is_split_and_filled():
    import fcdp

    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 64))
    parts = fcdp.split(model, 4, min_bytes=1000)
    assert len(parts) == 4 and parts[0] is model[1].parts[0]
    model.to_empty(device="cpu")
    values = {name: torch.randn(value.shape) for name, value in model.state_dict().items()}
    assert list(values) == ["0.weight", "0.bias", "1.weight", "1.bias"]
    model.load_state_dict(values)
    plain = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 64))
    plain.load_state_dict(model.state_dict())
    assert torch.equal(plain(torch.ones(1, 8)), model(torch.ones(1, 8)))
    assert fcdp.split(model, 4, min_bytes=1 << 30) == []


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.head = nn.Embedding(8, 4), nn.Linear(4, 8, bias=False)
        self.head.weight = self.tokens.weight


class OfItsOwn(nn.Linear):
    pass


def normed():
    return nn.utils.spectral_norm(nn.Linear(4, 8))


def with_an_optimizer(keep=[]):  # noqa: B006
    layer = nn.Linear(4, 8)
    keep.append(torch.optim.SGD(layer.parameters()))
    return layer


def split_before():
    return pair(2)[1]


@pytest.mark.parametrize(
    "make, parts, min_bytes, words",
    [
        (lambda: nn.Linear(4, 8), 0, None, "parts is 0; it must be a whole number of at least 1"),
        (lambda: nn.Linear(4, 8), -1, None, "parts is -1"),
        (lambda: nn.Linear(4, 8), 2.0, None, "parts is 2.0"),
        (lambda: nn.Linear(4, 8), True, None, "parts is True"),
        (lambda: nn.Linear(4, 8), 9, None, "8 rows, which do not make 9 parts"),
        (lambda: nn.Embedding(8, 4), 2, None, "no linear layer .* but a Embedding"),
        (lambda: nn.Sequential(nn.Linear(4, 8)), 2, None, "min_bytes"),
        (lambda: OfItsOwn(4, 8), 2, None, "but a OfItsOwn"),
        (normed, 2, None, "other parameters"),
        (split_before, 2, None, "split already"),
        (with_an_optimizer, 2, None, "make it after fcdp.split"),
        (Tied, 2, 1, "cannot split head: .* the weight of a Embedding .tied weights"),
        (lambda: Tied().head, 2, None, None),
    ],
)
def test_what_cannot_be_split_is_said_and_left_as_it_is(make, parts, min_bytes, words):
    import fcdp

    module = make()
    before = [type(one) for one in module.modules()]
    if words is None:  # its embedding is gone: nothing else has the weight
        assert len(fcdp.split(module, parts)) == parts
        return
    with pytest.raises(ValueError, match=words):
        fcdp.split(module, parts, min_bytes)
    assert [type(one) for one in module.modules()] == before


def test_parts_that_something_else_wraps_are_refused():
    _, split = pair(3)
    split.parts[1] = nn.Sequential(split.parts[1])
    with pytest.raises(NotImplementedError, match="a Sequential now"):
        split(torch.ones(1, 48))
    with pytest.raises(NotImplementedError, match="a Sequential now"):
        split.state_dict()


def test_no_module_is_no_layer():
    import fcdp

    with pytest.raises(TypeError, match="not Tensor"):
        fcdp.split(torch.ones(3), 2)


def test_a_copy_that_was_written_to_is_seen_and_its_memory_is_not_kept():
    _, split = pair(3, rows=300)
    state = split.state_dict()
    died = weakref.ref(state["weight"])
    del state
    assert died() is None
    split(torch.ones(1, 48))
    view = split.state_dict()["bias"][5:]
    split(torch.ones(1, 48))
    view.zero_()
    del view
    for use in (lambda: split(torch.ones(1, 48)), split.state_dict) * 2:
        with pytest.raises(RuntimeError, match="the bias .* pass the state dict to load_state_dict()"):
            use()
    split.load_state_dict({"weight": torch.ones(300, 48)}, strict=False)
    with pytest.raises(RuntimeError, match="the bias"):
        split(torch.ones(1, 48))
    split.load_state_dict({"bias": torch.ones(300)}, strict=False)
    assert (split(torch.ones(1, 48)) == 49).all()


@pytest.mark.parametrize("assign", [False, True])
def test_a_state_dict_that_was_loaded_is_written_to_again(assign):
    """Where it is assigned it has become the parameters, which the optimizer writes to."""
    _, split = pair(3, rows=300)
    state = split.state_dict()
    state["weight"].zero_()
    split.load_state_dict(state, assign=assign)
    split(torch.ones(1, 48))
    state["weight"].fill_(1)
    if assign:
        assert (split.state_dict()["weight"] == 1).all()
    else:
        with pytest.raises(RuntimeError, match="the weight"):
            split(torch.ones(1, 48))


def test_a_copy_made_in_inference_mode_is_seen_to_be_written_to():
    _, split = pair(3, rows=300)
    with torch.inference_mode():
        split.state_dict()["weight"].zero_()
        with pytest.raises(RuntimeError, match="the weight"):
            split(torch.ones(1, 48))


def test_checks_do_not_add_up():
    _, split = pair(3, rows=300)
    states = [split.state_dict() for _ in range(3)]
    assert [len(copies) for copies in split._saved.values()] == [3, 3]
    del states
    split(torch.ones(1, 48))
    assert not any(split._saved.values())


def started(folder, env):
    job = launch.forked(launch.HERE / "split_job.py", [folder], folder, env)
    assert job.returncode == 0, job.output[-6000:]
    return job


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    """Between 4 ranks, without FCDP and with it."""
    with_fcdp = {"FCDP": "1", "FCDP_LOCAL_SIZE": "2", "FCDP_TIMEOUT": "60"}
    return {env["FCDP"]: started(tmp_path_factory.mktemp("split"), env) for env in ({"FCDP": "0"}, with_fcdp)}


@pytest.mark.parametrize("on", "01")
def test_state_dicts_are_those_of_the_whole_model(on, jobs):
    """Between 4 ranks: DTensors, full ones and checkpoints, in both directions."""
    job = jobs[on]
    assert job.output.count("fully_shard was not applied to each of these") == 1  # by rank 0
    assert [rank["wrong"] for rank in job.ranks] == [[]] * 4
    for rank in job.ranks:
        assert ("head.parts.3" in rank["served"]) == (on == "1")


def test_adapters_over_split_layers_train_the_same_bits(jobs):
    plain, fcdp = ([rank["adapted"] for rank in jobs[on].ranks] for on in "01")
    assert plain == fcdp


@pytest.mark.usefixtures("sim_built")
@pytest.mark.parametrize("on", "01")
def test_state_dicts_of_what_is_offloaded(on, tmp_path):
    """Where collectives are the device's alone."""
    env = {"FCDP_LOCAL_SIZE": "2", "FCDP_TRANSPORT": "torch", "FCDP_TIMEOUT": "60"} if on == "1" else {}
    job = started(tmp_path, {"FCDP": on, "TEST_DEVICE": "sim", "FCDP_SIM_RACES": "1", **env})
    assert [rank["wrong"] for rank in job.ranks] == [[]] * 4
