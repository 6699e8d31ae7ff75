"""Every collective on tensors of the simulated device beside gloo's on the CPU: python collectives_job.py OUT, 2 ranks."""

import json
import os
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "sim" / "torch"))
import torch
import torch.distributed as dist

import torch_sim  # noqa: F401

torch.set_num_threads(1)
CASES = {}


def case(function):
    CASES[function.__name__] = function
    return function


def mine(device, n=6, scale=1.0):
    return (torch.arange(n, dtype=torch.float32) * scale + 10 * dist.get_rank()).to(device)


def other():
    return 1 - dist.get_rank()


@case
def broadcast(device):
    x = mine(device)
    dist.broadcast(x, 1)
    return [x]


@case
def all_reduce(device):
    x, y = mine(device), mine(device)
    dist.all_reduce(x)
    dist.all_reduce(y, op=dist.ReduceOp.MAX)
    return [x, y]


@case
def all_reduce_bf16(device):
    x = mine(device, scale=0.3).bfloat16()
    dist.all_reduce(x)
    return [x]


@case
def reduce(device):
    x = mine(device)
    dist.reduce(x, 0)
    return [x] if dist.get_rank() == 0 else []


@case
def all_gather(device):
    outputs = [torch.empty(6, device=device) for _ in range(2)]
    dist.all_gather(outputs, mine(device))
    return outputs


@case
def all_gather_into_tensor(device):
    output = torch.empty(12, device=device)
    dist.all_gather_into_tensor(output, mine(device))
    return [output]


@case
def reduce_scatter(device):
    output = torch.empty(3, device=device)
    dist.reduce_scatter(output, list(mine(device).split(3)))
    return [output]


@case
def reduce_scatter_tensor(device):
    output, average = torch.empty(3, device=device), torch.empty(3, device=device)
    dist.reduce_scatter_tensor(output, mine(device))
    dist.reduce_scatter_tensor(average, mine(device), op=dist.ReduceOp.AVG)
    return [output, average]


@case
def gather_and_scatter(device):
    root = dist.get_rank() == 0
    gathered = [torch.empty(6, device=device) for _ in range(2)] if root else None
    dist.gather(mine(device), gathered)
    x = torch.empty(3, device=device)
    dist.scatter(x, list(mine(device).split(3)) if root else None)
    return [*(gathered or []), x]


@case
def all_to_all_single(device):
    output, uneven = torch.empty(6, device=device), torch.empty(4 if dist.get_rank() == 0 else 8, device=device)
    dist.all_to_all_single(output, mine(device))
    sizes = [2, 4]
    dist.all_to_all_single(uneven, mine(device), [sizes[dist.get_rank()]] * 2, sizes)
    return [output, uneven]


@case
def send_and_receive(device):
    x = mine(device)
    if dist.get_rank() == 0:
        dist.send(x, 1)
        dist.recv(x, 1)
    else:
        y = torch.empty_like(x)
        dist.recv(y, 0)
        dist.send(x + y, 0)
        x = y
    return [x]


@case
def batch_isend_irecv(device):
    n = 1 << 18  # more than a socket takes without a reader
    x, y = mine(device, n), torch.empty(n, device=device)
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, x, other()), dist.P2POp(dist.irecv, y, other())]):
        work.wait()
    return [y]


@case
def objects(device):
    found = [None, None]
    dist.all_gather_object(found, {"rank": dist.get_rank()})
    assert found == [{"rank": 0}, {"rank": 1}]
    return []


@case
def functional(device):
    from torch.distributed import _functional_collectives as functional

    x = mine(device)
    return [functional.all_reduce(x, "sum", [0, 1]) + 1, functional.all_gather_tensor(x, 0, [0, 1]) * 2]


@case
def a_new_group(device):
    group = dist.new_group([0, 1])
    x = mine(device)
    dist.all_reduce(x, group=group)
    return [x]


def coalesced(device):
    """gloo has none of these on the CPU: beside the same one by one."""
    outputs, parts = (
        [torch.empty(12, device=device) for _ in range(3)],
        [torch.empty(3, device=device) for _ in range(3)],
    )
    sums = [mine(device, scale=i) for i in range(3)]
    with dist._coalescing_manager(device=torch.device(device), async_ops=True) as gathers:
        for i, output in enumerate(outputs):
            dist.all_gather_into_tensor(output, mine(device, scale=i))
    with dist._coalescing_manager(device=torch.device(device), async_ops=True) as reductions:
        for i, part in enumerate(parts):
            dist.reduce_scatter_tensor(part, mine(device, scale=i))
    with dist._coalescing_manager(device=torch.device(device), async_ops=True) as all_reductions:
        for x in sums:
            dist.all_reduce(x)
    for manager in (gathers, reductions, all_reductions):
        manager.wait()
    for i in range(3):
        a, b = mine("cpu", scale=i), [torch.empty(6), torch.empty(6)]
        dist.all_gather(b, a)
        assert torch.equal(outputs[i].cpu(), torch.cat(b))
        assert torch.equal(sums[i].cpu(), b[0] + b[1])
        assert torch.equal(parts[i].cpu(), (b[0] + b[1])[3 * dist.get_rank() :][:3])


def all_to_all(device):
    """Of lists, which gloo does not have."""
    outputs = [torch.empty(3, device=device) for _ in range(2)]
    dist.all_to_all(outputs, list(mine(device).split(3)))
    expected = torch.empty(6)
    dist.all_to_all_single(expected, mine("cpu"))
    assert torch.equal(torch.cat(outputs).cpu(), expected)


def premultiplied(device):
    """gloo has no PREMUL_SUM on the CPU: beside a sum of products. What is reduced and scattered is not written into."""
    for dtype in (torch.float32, torch.bfloat16):
        factor = torch.tensor(1 / 3, dtype=dtype)
        op = dist.ReduceOp.PREMUL_SUM(1 / 3)
        total = mine("cpu").to(dtype) * factor
        dist.all_reduce(total)
        x, y = mine(device).to(dtype), mine(device).to(dtype)
        part, parts = torch.empty(2, 3, device=device, dtype=dtype)
        dist.all_reduce(x, op=op)
        dist.reduce_scatter_tensor(part, y, op=op)
        dist.reduce_scatter(parts, list(y.split(3)), op=op)
        assert torch.equal(x.cpu(), total) and torch.equal(y.cpu(), mine("cpu").to(dtype))
        assert torch.equal(part.cpu(), total.split(3)[dist.get_rank()]) and torch.equal(parts, part)


def in_stream_order(device):
    """A collective waits for the stream on which its input is made, and the host for neither."""
    torch.sim.set_rates(gbytes=1)
    x = torch.ones(5_000_000, device=device)
    x.mul_(2)  # 40 ms
    work = dist.all_reduce(x, async_op=True)
    assert not work.is_completed()
    side = torch.sim.Stream()
    with torch.sim.stream(side):
        work.wait()
        y = x[:3] + 1
    assert not side.query()
    future = dist.all_reduce(torch.ones(3, device=device), async_op=True).get_future()
    torch.sim.synchronize()
    assert y.tolist() == [5, 5, 5] and future.wait()[0].tolist() == [2, 2, 2]
    torch.sim.set_rates()


def main(out):
    torch.sim.set_device(dist_rank := int(os.environ["RANK"]))
    dist.init_process_group("cpu:gloo,sim:simgloo")
    found = {}
    for name, function in CASES.items():
        expected, got = function("cpu"), function("sim")
        same = [torch.equal(a, b.cpu()) and a.dtype == b.dtype for a, b in zip(expected, got)]
        found[name] = "equal" if all(same) and len(expected) == len(got) else f"{expected} on the CPU, {got} on sim"
    for check in (coalesced, all_to_all, premultiplied, in_stream_order):
        check("sim")
        found[check.__name__] = "equal"
    pathlib.Path(out, f"rank{dist_rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
