"""One rank of test_reduce.py: what it says to do, its results in a file for each rank. argv: the folder, then `train`,
`sums`, `no_sync`, `different`, `factors`, `unlike` or `another`."""

import contextlib
import gc
import hashlib
import json
import os
import pathlib
import sys
import weakref

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, ShardingStrategy, fully_shard
from torch.utils.checkpoint import checkpoint

import run
from models import Net, wrap

ON = os.environ.get("FCDP") == "1"
N_STEPS = 2


def digest(tensors):
    return hashlib.blake2b(b"".join(map(run.raw_bytes, tensors)), digest_size=12).hexdigest()


def in_mesh(model, **kwargs):
    """Over all ranks, or in plain FSDP2 as HSDP over two nodes."""
    n = dist.get_world_size()
    names = ("replicate", "shard")
    mesh = init_device_mesh("cpu", (n,)) if ON else init_device_mesh("cpu", (2, n // 2), mesh_dim_names=names)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **kwargs)
    return fully_shard(model, mesh=mesh, **kwargs)


def policy(reduce_dtype, param_dtype=torch.bfloat16):
    return {"mp_policy": MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype)}


def set_everywhere(name, *values):
    def change(model):
        for module in model.modules():
            if hasattr(module, name):
                getattr(module, name)(*values)

    return change


FSDP2 = {
    "float32": ({}, None),
    "bf16_reduced_in_float32": (policy(torch.float32), None),
    "bf16": (policy(torch.bfloat16), None),
    "float16_divided_twice": (policy(torch.float16, torch.float16), None),
    "sums_divided_later": ({}, set_everywhere("set_force_sum_reduction_for_comms", True)),
    "divided_by_8": (
        {},
        lambda model: (
            set_everywhere("set_force_sum_reduction_for_comms", True)(model),
            set_everywhere("set_gradient_divide_factor", 8.0)(model),
        ),
    ),
}


def of_fsdp2(kwargs, change):
    model = in_mesh(Net(), **kwargs)
    if change:
        change(model)
    return model, lambda: [p.grad.full_tensor() for p in model.parameters()], True


def of_fsdp1():
    strategy = ShardingStrategy.FULL_SHARD if ON else ShardingStrategy.HYBRID_SHARD
    group = {}
    if not ON:
        group["device_mesh"] = init_device_mesh("cpu", (2, dist.get_world_size() // 2))
    model = wrap(Net(), sharding_strategy=strategy, use_orig_params=True, **group)

    def gradients():
        with FullyShardedDataParallel.summon_full_params(model, with_grads=True):
            return [p.grad.clone() for p in model.parameters()]

    return model, gradients, False


def train(make):
    torch.manual_seed(5)
    model, gradients, leaves_out = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data, said = torch.Generator().manual_seed(dist.get_rank()), []
    for _ in range(N_STEPS):
        for order, is_last in (([0, 1], False), ([1, 2], False), ([0, 1], True)):
            x = torch.randn(4, 11, generator=data)
            if leaves_out and ON:
                model.set_requires_gradient_sync(is_last)
            elif leaves_out:  # as what is kept: reduced within the node
                model.set_requires_all_reduce(is_last)
            if leaves_out:
                model.order = order
            loss = model(x).float().square().mean()
            loss.backward()
        said.append([loss.item(), digest(gradients())])
        optimizer.step()
        optimizer.zero_grad()
    return said


class Product(nn.Module):
    """Its gradient is what it is given."""

    def __init__(self, *shape):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(shape))

    def forward(self, x, is_used=True):
        return (self.weight * x if is_used else x.clone().requires_grad_()).sum()


def rounded(shard, wire):
    """As it comes to another node."""
    if wire == "same" or (wire == "bf16" and shard.dtype != torch.float32):
        return shard
    if wire == "bf16":
        return shard.to(torch.bfloat16).float()
    blocks = shard.float().flatten().split(256)
    scales = [block.abs().max() / 127 for block in blocks]
    return torch.cat([(block / scale).round() * scale for block, scale in zip(blocks, scales)]).view_as(shard)


def added(ranks, dtype, shape):
    """The gradients of the ranks, in the order in which they are to be added: within the nodes, then those of the
    nodes, halves in float32 where there are more than two, or what comes was rounded."""
    size, wire = int(os.environ["FCDP_LOCAL_SIZE"]), os.environ.get("FCDP_REDUCE_DTYPE", "same")
    rows = [torch.randn(shape, generator=torch.Generator().manual_seed(50 + rank)).to(dtype) for rank in ranks]
    nodes = [rows[i] if size == 1 else (rows[i] + rows[i + 1]) / 2 for i in range(0, len(rows), size)]
    wide = torch.float32 if len(nodes) > 2 or rounded(nodes[0], wire) is not nodes[0] else dtype
    shards = []
    for owner, of_nodes in enumerate(zip(*(node.chunk(len(ranks)) for node in nodes))):
        came = [part if k == owner // size else rounded(part, wire) for k, part in enumerate(of_nodes)]
        total = came[0].to(wide)
        for part in came[1:]:
            total = total + part
        shards.append(total / len(nodes))
    return torch.cat(shards).to(dtype), rows[dist.get_rank()]


def what_is_kept():
    """Elements of gradients on this rank behind a micro-batch that is not synchronised, and of the model's parameters; and
    how many of its sums live on behind another one, while Python collects no garbage."""
    model = in_mesh(Net(dim=64))
    model.set_requires_gradient_sync(False)
    model(torch.ones(4, 11)).square().mean().backward()
    groups = [group for module in model.modules() for group in groups_of(module)]
    unsharded = [
        p._unsharded_param.grad for group in groups for p in group.fsdp_params if p._unsharded_param.grad is not None
    ]
    kept = [group._fcdp_kept.rows for group in groups if getattr(group, "_fcdp_kept", None) is not None]
    n_elements, first = sum(t.numel() for t in kept + unsharded), [weakref.ref(rows) for rows in kept]
    del unsharded, kept
    gc.disable()
    model(torch.ones(4, 11)).square().mean().backward()
    n_alive = sum(rows() is not None for rows in first)
    gc.enable()
    return n_elements, sum(p.numel() for p in model.parameters()), n_alive, len(first)


def groups_of(module):
    return fsdp2._groups_of(module._get_fsdp_state()) if hasattr(module, "_get_fsdp_state") else []


class Products(nn.Module):
    """Each of its parts is a group of its own, which `used` names."""

    def __init__(self, size):
        super().__init__()
        self.parts = nn.ModuleList(Product(size) for _ in range(3))

    def forward(self, x, used, idle, in_segments=False):
        """`idle` are parts through which autograd passes without a gradient for them. `in_segments`: each use of a part is
        computed again in backward, in a backward of its own."""
        uses = [(self.parts[i], i in used) for i in sorted([*used, *idle])]
        if in_segments:
            x = x.clone().requires_grad_()
            return sum(checkpoint(part, x, is_used, use_reentrant=True) for part, is_used in uses)
        return sum(part(x, is_used) for part, is_used in uses)


class NoSync:
    """FSDP1's accumulation in no_sync(). Gradients are small integers, which add up to the same in any order."""

    SIZE = 4001  # not a multiple of the ranks

    def __init__(self, use_orig_params):
        self.model = Products(self.SIZE)
        kwargs = {"use_orig_params": use_orig_params, "device_id": torch.device("cpu")}
        for i, part in enumerate(self.model.parts):
            self.model.parts[i] = FullyShardedDataParallel(part, **kwargs)
        self.model = FullyShardedDataParallel(self.model, **kwargs)
        self.parts = [part._handle.flat_param for part in self.model.module.parts]
        self.data = [torch.Generator().manual_seed(70 + rank) for rank in range(dist.get_world_size())]

    def backward(self, used, is_synchronised, idle=(), in_segments=False):
        """Returns what it adds to each part's gradient: over all ranks, FSDP1's mean. A part may be used twice."""
        inputs = [torch.randint(-8, 9, (self.SIZE,), generator=data).float() for data in self.data]
        with contextlib.nullcontext() if is_synchronised else self.model.no_sync():
            self.model(inputs[dist.get_rank()], used, idle, in_segments).backward()
        mean = sum(inputs) / len(inputs)
        return torch.stack([mean * used.count(i) for i in range(3)])

    def failed_backward(self):
        """In no_sync(); part 0's gradient is the last one."""

        def fail(_):
            raise ArithmeticError

        hook = self.parts[0].register_hook(fail)
        with contextlib.suppress(ArithmeticError):
            self.backward([0, 1, 2], False)
            raise AssertionError("the backward did not fail")
        hook.remove()

    def gradients(self):
        """Of each part, whole."""
        found = []
        for flat_param in self.parts:
            shards = [torch.empty_like(flat_param.grad) for _ in self.data]
            dist.all_gather(shards, flat_param.grad)
            found.append(torch.cat(shards)[: self.SIZE])
        return torch.stack(found)

    def zero_grad(self):
        self.model.zero_grad(set_to_none=True)


def kept_by_fsdp1(use_orig_params):
    """What went wrong, in words; and of a gradient whose backward was in no_sync(): elements on this rank, and all."""
    job, wrong = NoSync(use_orig_params), []
    optimizer = torch.optim.SGD(job.model.parameters(), lr=1.0)

    def see(what, expected):
        if not torch.equal(job.gradients(), expected):
            wrong.append(what)

    for _ in range(2):
        expected = job.backward([0, 1], False) + job.backward([1, 2], False) + job.backward([0, 1, 2], True)
        see("three backwards", expected)
        expected = expected + job.backward([0, 2], False) + job.backward([0, 1, 2], True)
        see("on top of a sharded gradient", expected)
        job.zero_grad()
    expected = job.backward([0, 1, 2], False) + job.backward([0], True, idle=[1])
    see("parts that the last backward does not use", expected)
    job.zero_grad()
    for is_last in (False, True):
        expected = job.backward([0, 1, 1], False, in_segments=True) + job.backward(
            [0, 1, 1, 2], False, in_segments=True
        )
        see("a part in two segments", expected + job.backward([0, 1, 1], True, in_segments=is_last))
        job.zero_grad()
    job.backward([0, 1, 2], False)
    job.failed_backward()
    see("behind a backward that failed", job.backward([0, 1, 2], True))
    job.zero_grad()
    job.backward([0, 1, 2], False)
    kept = sum(part._handle._fcdp_kept.rows.numel() for part in job.model.module.parts)
    # An optimizer sees first that it has another size, as with plain FSDP1.
    for read, why in (
        (lambda: job.parts[1].grad.sum(), "the gradient of parts.1 was used before it was reduced"),
        (lambda: job.model.clip_grad_norm_(1.0), "was used before it was reduced"),
        (optimizer.step, ""),
    ):
        try:
            read()
            wrong.append("a gradient that has not crossed was read")
        except RuntimeError as error:
            if why not in str(error):
                wrong.append(f"it said {error}")
    job.zero_grad()
    see("gradients that the program has dropped", job.backward([0, 1, 2], True))
    return {"wrong": wrong, "elements": [kept, 3 * job.SIZE]}


def unlike_modules():
    """What the synchronised backward raises behind one in no_sync() in which the ranks of a node use different parts."""
    job = NoSync(True)
    job.backward([0, 1], False)
    job.backward([0, 1, 2], True)
    job.zero_grad()
    job.backward([dist.get_rank() % 2], False)
    try:
        job.backward([0, 1, 2], True)
    except RuntimeError as error:
        return str(error)
    return ""


def said_by(function, *args, **kwargs):
    try:
        function(*args, **kwargs)
    except RuntimeError as error:
        return str(error)
    return ""


def another_reduction():
    """What FSDP1 and FSDP2 raise where they are to reduce, in another way, what was kept for FCDP's reduction."""
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives

    class Own(collectives.DefaultReduceScatter):
        pass

    job = NoSync(True)
    job.backward([0, 1], False)
    job.model.register_comm_hook(None, lambda *_: None)
    fsdp1 = said_by(job.backward, [0, 1], True)
    model = Products(13)
    fully_shard(model)
    used = {"used": [0, 1], "idle": [2]}
    model.set_requires_gradient_sync(False)
    model(torch.ones(13), **used).backward()
    model.set_requires_gradient_sync(True)
    model.set_custom_reduce_scatter(Own())
    return {"fsdp1": fsdp1, "fsdp2": said_by(model(torch.ones(13), **used).backward)}


def accumulated(model, micro_batches, change=lambda model: None, divisor=None, dtype=torch.float32):
    """Which parts have other gradients than the ranks' sum, divided. `micro_batches`: for each, the parts that each rank
    uses, of 0 and 1; the last one is synchronised, and behind `change`. Gradients are small integers, so a sum has the
    same bits in any order."""
    me, n, size = dist.get_rank(), dist.get_world_size(), model.parts[0].weight.shape[0]
    expected, data = torch.zeros(3, size), torch.Generator().manual_seed(9)
    for k, used in enumerate(micro_batches):
        inputs = torch.randint(-8, 9, (n, size), generator=data).float()
        for rank in range(n):
            expected[used[rank]] += inputs[rank]
        is_last = k == len(micro_batches) - 1
        model.set_requires_gradient_sync(is_last)
        if is_last:
            change(model)
        model(inputs[me], used[me], [i for i in range(3) if i not in used[me]]).backward()
    expected = (expected.to(dtype) / (divisor or n)).float()
    wrong = []
    for i, part in enumerate(model.parts):
        found = part.weight.grad
        whole = None if found is None else found.full_tensor()
        is_used = any(i in parts for used in micro_batches for parts in used)
        if is_used != (whole is not None) or (is_used and not torch.equal(whole, expected[i])):
            wrong.append(f"{micro_batches}, {divisor}: part {i}")
    model.zero_grad()
    return wrong


def different_parameters():
    """As experts of which each rank uses one: within one group, and each a group that all ranks run."""
    one, other, both, none = [[0], [1], [0], [1]], [[1], [0], [1], [0]], [[0, 1]] * 4, [[]] * 4
    wrong = []
    for each in (False, True):
        model = Products(13)
        for part in model.parts if each else ():
            fully_shard(part)
        fully_shard(model)
        for micro_batches in ([one, both], [one, other, both], [one, other, none], [[[0]] * 4, none, [[1]] * 4]) * 2:
            wrong += accumulated(model, micro_batches)
    return wrong


def divided(factor, is_sum):
    def change(model):
        model.set_gradient_divide_factor(factor)
        model.set_force_sum_reduction_for_comms(is_sum)

    return change


def factors():
    """Which the last micro-batch alone decides."""
    wrong, both = [], [[0, 1]] * 4
    for dtype in (torch.float32, torch.float16):
        model = fully_shard(Products(13), **policy(dtype, dtype))
        for factor, is_sum in ((64.0, True), (None, False), (6.0, True), (4.0, False), (128.0, True)):
            wrong += accumulated(model, [both] * 3, divided(factor, is_sum), factor, dtype)
    return wrong


def sums():
    """[dtype, is each element what it must be, is it what it was the first time]"""
    out = []
    small, large = (13, 3), (701, 501)  # of the larger, each node's part is reduced by itself
    for dtype, shape in ((torch.float32, small), (torch.bfloat16, small), (torch.float32, large)):
        expected, mine = added(range(dist.get_world_size()), dtype, shape)
        model, first = fully_shard(Product(*shape), **policy(dtype, dtype)), None
        for _ in range(3):
            model.zero_grad()
            model(mine).backward()
            found = model.weight.grad.full_tensor().to(dtype)
            first = found if first is None else first
            out.append([str(dtype), torch.equal(found, expected), torch.equal(found, first)])
    return out


def main():
    folder, what = pathlib.Path(sys.argv[1]), sys.argv[2]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    if what == "sums":
        result = {"sums": sums()}
    elif what in ("different", "factors"):
        result = {"wrong": different_parameters() if what == "different" else factors()}
    elif what == "no_sync":
        result = {"no_sync": [kept_by_fsdp1(use_orig_params) for use_orig_params in (False, True)]}
    elif what == "unlike":
        result = {"said": unlike_modules()}
    elif what == "another":
        result = {"said": another_reduction()}
    else:
        result = {name: train(lambda of=of: of_fsdp2(*of)) for name, of in FSDP2.items()}
        result["fsdp1"] = train(of_fsdp1)
    if ON:
        global fsdp2
        import fcdp
        from fcdp import fsdp2

        result["stats"] = fcdp.stats()
        if what == "sums":
            result["kept"] = what_is_kept()
    (folder / f"rank{dist.get_rank()}.json").write_text(json.dumps(result))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
