"""Operators on the simulated device beside the CPU: python ops_job.py OUT. rank0.json has {case: "equal", or what differs}."""

import json
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "sim" / "torch"))
import torch
import torch.nn.functional as F

import torch_sim  # noqa: F401

torch.set_num_threads(1)
CASES = {}


def case(*shapes, grad=True, dtype=torch.float32, name=None):
    """A function of tensors of these shapes. Its results are compared, and their gradients for the inputs."""

    def add(function):
        CASES[name or function.__name__] = (function, shapes, grad and dtype.is_floating_point, dtype)
        return function

    return add


def unary(name, function, shape=(7, 33), **options):
    case(shape, name=name, **options)(function)


def as_complex(x):
    return torch.view_as_complex(x[:, :32].contiguous().view(7, 16, 2))


def written_conjugate(z):
    """Into a lazily conjugated tensor, from the device and from the host."""
    out = torch.zeros_like(z)
    out.conj()[:3].copy_(z[:3])
    out.conj()[3:].copy_(torch.arange(64).view(4, 16) * 1j)
    return torch.view_as_real(out)


for _name in "exp tanh sigmoid relu abs neg sqrt rsqrt sin cos erf log1p square reciprocal floor".split():
    unary(_name, lambda x, _name=_name: getattr(torch, _name)(x.abs() + 0.1))
for _name in "silu gelu mish softplus elu leaky_relu hardtanh hardswish logsigmoid selu celu relu6".split():
    unary(_name, getattr(F, _name))
for _name in "sum mean amax std var norm logsumexp prod".split():
    unary(_name, lambda x, _name=_name: getattr(torch, _name)(x, dim=1))
unary("argmax", lambda x: x.argmax(1), grad=False)
unary("argmin", lambda x: x.argmin(), grad=False)
unary("all", lambda x: (x > 0).all(dim=1), grad=False)
unary("any", lambda x: (x > 0).any(), grad=False)
unary("all_dims", lambda x: torch.all(x > 0, dim=(0, 1)), grad=False)
unary("any_dims", lambda x: torch.any(x > 0, dim=(0, 1)), grad=False)
unary("cumsum", lambda x: x.cumsum(1))
unary("softmax", lambda x: x.softmax(-1))
unary("log_softmax", lambda x: x.log_softmax(-1))
unary("sort", lambda x: x.sort(dim=1)[0])
unary("topk", lambda x: x.topk(3, dim=1)[0])
unary("clamp", lambda x: x.clamp(-0.5, 0.5))
unary("pow", lambda x: (x.abs() + 0.1) ** 1.5)
unary("tril", lambda x: x.tril())
unary("transpose", lambda x: (x.t() * 2).contiguous())
unary("unfold", lambda x: x.unfold(1, 4, 2).sum(-1))
unary("flip", lambda x: x.flip(0))
unary("roll", lambda x: x.roll(2, 1))
unary("repeat", lambda x: x.repeat(2, 3))
unary("expand", lambda x: x[:1].expand(5, 33) * 3)
unary("slice_assign", lambda x: torch.zeros_like(x).index_fill(0, torch.tensor([1], device=x.device), 2.0) + x)
unary("masked_fill", lambda x: x.masked_fill(x > 0.3, -1.0))
unary("where", lambda x: torch.where(x > 0, x, x * 2))
unary("boolean_index", lambda x: x[x > 0.5])
unary("nonzero", lambda x: (x > 1).nonzero(), grad=False)
unary("unique", lambda x: (x * 2).round().unique(), grad=False)
unary("item", lambda x: torch.tensor(x.sum().item()), grad=False)
unary("to_bf16", lambda x: (x.bfloat16() * 1.1).float())
unary("to_double", lambda x: x.double() / 3)
unary("one_hot", lambda x: F.one_hot(x.argmax(1), 33), grad=False)
unary("chunk", lambda x: torch.cat([c * i for i, c in enumerate(x.chunk(3, dim=1))], 1))
unary("split_with_sizes", lambda x: torch.stack([c.sum(1) for c in x.split([10, 20, 3], dim=1)]))
unary("embedding", lambda x: F.embedding(torch.arange(14, device=x.device).view(2, 7) % 7, x))
unary("gather", lambda x: x.gather(1, torch.arange(14, device=x.device).view(7, 2)))
unary("scatter_add", lambda x: x.scatter_add(1, torch.zeros(7, 2, dtype=torch.int64, device=x.device), x[:, :2] * 2))
unary("index_put", lambda x: torch.index_put(x, (torch.tensor([0, 2], device=x.device),), x[1], accumulate=True))
unary("index_select", lambda x: x.index_select(0, torch.tensor([3, 3, 1], device=x.device)))
unary("layer_norm", lambda x: F.layer_norm(x, (33,)))
unary("layer_norm_bf16", lambda x: F.layer_norm(x, (33,), x[0], x[1]), dtype=torch.bfloat16)
unary("group_norm_bf16", lambda x: F.group_norm(x.view(1, 7, 33), 7), dtype=torch.bfloat16)
unary("rms_norm", lambda x: F.rms_norm(x, (33,)))
unary("group_norm", lambda x: F.group_norm(x.view(1, 7, 33), 7))
unary("batch_norm", lambda x: F.batch_norm(x, None, None, training=True))
unary("channel_shuffle", lambda x: F.channel_shuffle(x[:6].view(1, 6, 3, 11), 3))
unary("complex", lambda x: torch.view_as_real(torch.view_as_complex(x[:, :32].contiguous().view(7, 16, 2)) * 2j))
unary("conjugate", lambda x: torch.view_as_real(as_complex(x).conj().clone()))
unary("conjugate_to_host", lambda x: torch.view_as_real(as_complex(x).conj().cpu().resolve_conj()), grad=False)
unary("negated_view", lambda x: as_complex(x).conj().imag.clone() + 1)
unary("written_conjugate", lambda x: written_conjugate(as_complex(x)), grad=False)
unary("pad", lambda x: F.pad(x, (1, 2, 3, 4)))
unary("max_pool2d", lambda x: F.max_pool2d(x.view(1, 1, 7, 33), 2))
unary("avg_pool2d", lambda x: F.avg_pool2d(x.view(1, 1, 7, 33), 2))
unary("interpolate", lambda x: F.interpolate(x.view(1, 1, 7, 33), scale_factor=2.0, mode="bilinear"))
unary("linalg_norm", lambda x: torch.linalg.vector_norm(x, 3, dim=1))
unary("foreach", lambda x: torch.stack(torch._foreach_mul(torch._foreach_add([x, x * 2], 1.0), 3.0)))
unary("cat_of_many", lambda x: torch.cat([x * i for i in range(20)]))
unary("foreach_norm", lambda x: torch.stack(torch._foreach_norm([x, x * 2])))
unary("arange", lambda x: torch.arange(0, 5, 0.5, device=x.device), grad=False)
unary("full", lambda x: torch.full((3, 2), 2.5, device=x.device), grad=False)
unary("triu_indices", lambda x: torch.ones(4, 4, device=x.device).triu(1), grad=False)
unary("inplace_views", lambda x: torch.zeros_like(x).t()[2:5].add_(x.t()[2:5], alpha=2), grad=False)
unary("out_resized", lambda x: torch.add(x, 1, out=torch.empty(0, device=x.device)), grad=False)
unary("cpu_scalar", lambda x: x * torch.tensor(2.5))
unary("integers", lambda x: (x * 10).long() // 3 % 5, grad=False)


@case((5, 7), (7, 9))
def mm(a, b):
    return a @ b


@case((9,), (5, 7), (7, 9))
def addmm(c, a, b):
    return torch.addmm(c, a, b, beta=0.5, alpha=2)


@case((3, 5, 7), (3, 7, 9))
def bmm(a, b):
    return torch.bmm(a, b)


@case((5,), (5,))
def addr(a, b):
    return torch.addr(torch.ones(5, 5, device=a.device), a, b)


@case((2, 3, 5, 8), (8, 8), (8,))
def linear(x, w, b):
    return F.linear(x, w, b)


@case((2, 3, 9, 9), (4, 3, 3, 3), (4,))
def conv2d(x, w, b):
    return F.conv2d(x, w, b, padding=1)


@case((2, 3, 12), (3, 4, 3))
def conv_transpose1d(x, w):
    return F.conv_transpose1d(x, w, stride=2)


@case((2, 6, 4, 2), (6, 4, 2))
def rotary(x, angles):
    """As Llama's: each gradient is a product with a lazily conjugated tensor."""
    return torch.view_as_real(torch.view_as_complex(x) * torch.view_as_complex(angles)).flatten(2)


@case((2, 2, 6, 8), (2, 2, 6, 8), (2, 2, 6, 8))
def attention_causal(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


@case((2, 2, 6, 8), (2, 2, 6, 8), (2, 2, 6, 8))
def attention_masked(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=torch.ones(6, 6, dtype=torch.bool, device=q.device).tril())


@case((2, 2, 6, 8), (2, 2, 6, 8), (2, 2, 6, 8), dtype=torch.bfloat16)
def attention_bf16(q, k, v):
    return F.scaled_dot_product_attention(q, k, v)


@case((6, 5))
def cross_entropy(x):
    return F.cross_entropy(x, torch.tensor([0, 1, 2, 3, 4, -100], device=x.device), label_smoothing=0.1)


@case((6, 5), (6, 5))
def mse_loss(x, y):
    return F.mse_loss(x, y)


@case((6, 5), (6, 5))
def smooth_l1_loss(x, y):
    return F.smooth_l1_loss(x, y)


@case((6, 5), (6, 5))
def bce_with_logits(x, y):
    return F.binary_cross_entropy_with_logits(x, y.sigmoid())


@case((6, 5), (6, 5))
def stack(x, y):
    return torch.stack([x, y, x * y])


@case((4, 4))
def solve(x):
    return torch.linalg.inv(x + 4 * torch.eye(4, device=x.device))


@case((8, 16), (8, 16), grad=False)
def adamw(p, g):
    states = []
    for options in ({}, {"foreach": False}, {"fused": True}):
        parameter = torch.nn.Parameter(p.clone())
        optimizer = torch.optim.AdamW([parameter], lr=0.1, **options)
        for _ in range(3):
            parameter.grad = g.clone()
            optimizer.step()
        states.append(parameter.detach())
    return torch.stack(states)


@case((8, 16), (8, 16), grad=False)
def clip_and_sgd(p, g):
    parameter = torch.nn.Parameter(p.clone())
    optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9, nesterov=True)
    for _ in range(3):
        parameter.grad = g.clone()
        torch.nn.utils.clip_grad_norm_([parameter], 0.5)
        optimizer.step()
    return parameter.detach()


def flat(result):
    return list(result) if isinstance(result, (tuple, list)) else [result]


def results_of(name, device):
    function, shapes, grad, dtype = CASES[name]
    random = torch.Generator().manual_seed(1)
    inputs = [torch.randn(shape, generator=random).to(dtype).to(device) for shape in shapes]
    for tensor in inputs:
        tensor.requires_grad_(grad)
    outputs = flat(function(*inputs))
    if grad:
        sum((o * o).sum() for o in outputs if o.dtype.is_floating_point).backward()
    return [t.detach().cpu() for t in [*outputs, *(i.grad for i in inputs if i.grad is not None)]]


def bytes_of(tensor):
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


def difference(name):
    try:
        expected, got = results_of(name, "cpu"), results_of(name, "sim")
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    if len(expected) != len(got):
        return f"{len(got)} tensors, the CPU has {len(expected)}"
    for i, (a, b) in enumerate(zip(expected, got)):
        if a.dtype != b.dtype or a.shape != b.shape:
            return f"tensor {i} is {b.dtype} of {tuple(b.shape)}, the CPU's {a.dtype} of {tuple(a.shape)}"
        if bytes_of(a) != bytes_of(b):
            return f"tensor {i} differs by up to {(a.double() - b.double()).abs().max():g}"
    return "equal"


if __name__ == "__main__":
    found = {name: difference(name) for name in CASES}
    torch.sim.synchronize()
    pathlib.Path(sys.argv[1], "rank0.json").write_text(json.dumps({"cases": found, "counts": torch.sim.counts()}))
