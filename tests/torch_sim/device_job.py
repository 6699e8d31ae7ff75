"""What a stream, an event and a copy of the simulated device do: python device_job.py NAME. One behaviour for each name;
its function asserts, and test_device.py wants exit code 0."""

import gc
import os
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "sim" / "torch"))
import torch
from torch.utils.checkpoint import checkpoint

import torch_sim  # noqa: F401

torch.set_num_threads(1)


def slow(n_ms=50):
    """Something on the current stream that takes so long, by the device's clock."""
    torch.sim.set_rates(gbytes=1)
    x = torch.zeros(n_ms * 125_000, device="sim")  # 4 bytes are read and written, at 1 GB/s
    x.add_(1)
    torch.sim.set_rates()
    return x


def raised(function):
    try:
        function()
    except RuntimeError as error:
        return str(error)
    raise AssertionError("nothing was raised")


def host_runs_ahead():
    slow()
    event = torch.sim.Event()
    event.record()
    assert not event.query() and not torch.sim.current_stream().query()
    event.synchronize()
    assert event.query()


def a_rate_is_kept():
    torch.sim.set_rates(gflops=1)
    a = torch.ones(100, 100, device="sim")
    begin, end = torch.sim.Event(enable_timing=True), torch.sim.Event(enable_timing=True)
    torch.sim.synchronize()
    begin.record()
    for _ in range(20):
        a @ a  # 2e6 operations: 2 ms
    end.record()
    end.synchronize()
    assert 40 <= begin.elapsed_time(end) < 60, begin.elapsed_time(end)


def streams_wait_for_events():
    side = torch.sim.Stream()
    x = slow()
    side.wait_stream(torch.sim.current_stream())
    with torch.sim.stream(side):
        assert torch.sim.current_stream() == side
        y = x + 1
    assert torch.sim.current_stream() == torch.sim.default_stream()
    torch.sim.current_stream().wait_stream(side)
    assert (y + 1)[0].item() == 3


def a_missing_wait_is_reported():
    """Run with FCDP_SIM_RACES=1."""
    a = torch.randn(300, 300).to("sim")
    b = a @ a
    with torch.sim.stream(torch.sim.Stream()):
        c = b + 1  # nothing has waited for b
    text = raised(torch.sim.synchronize)
    assert "aten::mm" in text and "aten::add" in text, text
    del c


def a_missing_wait_for_one_of_many_is_reported():
    """Run with FCDP_SIM_RACES=1. A kernel of simgpu names 8 accesses; this operator has 21."""
    many = [torch.ones(1000, device="sim") for _ in range(20)]
    torch.sim.synchronize()
    with torch.sim.stream(torch.sim.Stream()):
        many[9].mul_(2)

    def read_all():
        torch.cat(many)  # several launches: the device may have found it before the host has made the last
        torch.sim.synchronize()

    text = raised(read_all)
    assert "aten::mul" in text and "aten::cat" in text, text


def a_write_behind_a_reader_is_reported():
    """Run with FCDP_SIM_RACES=1."""
    a = torch.randn(300, 300).to("sim")
    side = torch.sim.Stream()
    side.wait_stream(torch.sim.current_stream())
    with torch.sim.stream(side):
        b = a @ a
    a.zero_()  # side may still read it
    text = raised(torch.sim.synchronize)
    assert "aten::mm" in text and "aten::zero_" in text, text
    del b


def a_freed_tensor_that_another_stream_reads_is_reported():
    """Run with FCDP_SIM_RACES=1. record_stream is what was forgotten."""
    side = torch.sim.Stream()
    a = torch.ones(1 << 20, device="sim")
    side.wait_stream(torch.sim.current_stream())
    with torch.sim.stream(side):
        b = a * 2
    del a
    c = torch.zeros(1 << 20, device="sim")  # the same memory
    text = raised(torch.sim.synchronize)
    assert "aten::mul" in text and "aten::zero_" in text, text
    del b, c


def record_stream_keeps_memory():
    """Run with FCDP_SIM_RACES=1."""
    side = torch.sim.Stream()
    a = torch.ones(1 << 20, device="sim")
    side.wait_stream(torch.sim.current_stream())
    with torch.sim.stream(side):
        b = a * 2
    a.record_stream(side)
    del a
    c = torch.zeros(1 << 20, device="sim")
    torch.sim.synchronize()
    assert b.sum().item() == 2 << 20 and c.sum().item() == 0


def memory_is_used_again_in_stream_order():
    before = torch.sim.memory_allocated()
    for _ in range(50):
        x = torch.ones(1 << 20, device="sim") * 2
        assert torch.sim.memory_allocated() - before <= 3 * 4 << 20
        del x
    gc.collect()
    assert torch.sim.memory_allocated() == before
    assert torch.sim.max_memory_allocated() - before <= 3 * 4 << 20
    torch.sim.synchronize()


def out_of_memory_is_torchs():
    """Run with FCDP_SIM_CAPACITY=64M. The device serves on after it."""
    x = torch.ones(1 << 20, device="sim")
    try:
        torch.empty(100 << 20, device="sim")
    except torch.OutOfMemoryError as error:
        assert "out of memory" in str(error)
    else:
        raise AssertionError("100 MB of floats were had from 64 MiB")
    assert (x + 1).sum().item() == 2 << 20


def pinned_copies_do_not_wait():
    host = torch.arange(1 << 20, dtype=torch.float32).pin_memory()
    assert host.is_pinned() and not torch.ones(3).is_pinned()
    back = torch.empty(1 << 20).pin_memory()
    slow()
    there = host.to("sim", non_blocking=True)
    back.copy_(there * 2, non_blocking=True)
    assert not torch.sim.current_stream().query()
    torch.sim.synchronize()
    assert torch.equal(back, host * 2)
    at = back.data_ptr()
    slow()
    back.copy_(there, non_blocking=True)
    del back
    assert torch.empty(1 << 20).pin_memory().data_ptr() != at  # the copy is still to come
    torch.sim.synchronize()


def pageable_copies_are_right_when_they_return():
    x = slow()
    assert torch.equal(x.cpu(), torch.ones(x.shape))
    host = torch.ones(1 << 20)
    there = host.to("sim", non_blocking=True)
    host.zero_()
    small = torch.ones(10)
    there_too = small.to("sim")
    small.zero_()
    assert there.sum().item() == 1 << 20 and there_too.sum().item() == 10
    strided = torch.arange(12.0).view(3, 4)
    assert torch.equal(strided.t().to("sim", torch.float64).t().cpu(), strided.double())
    into = torch.zeros(4, 3)
    into.t().copy_(strided.to("sim"))
    assert torch.equal(into, strided.t())


def an_operators_error_is_raised():
    x = torch.zeros(3, 4, device="sim")
    assert "size" in raised(lambda: x + torch.zeros(5, device="sim"))  # its shapes: at once
    x[torch.tensor([7], device="sim")]  # its values: at the next wait
    assert "out of bounds" in raised(torch.sim.synchronize)
    assert x.sum().item() == 0  # and that was all
    assert "same device" in raised(lambda: x + torch.zeros(3, 4))


def random_numbers_are_the_devices():
    torch.manual_seed(7)
    one = torch.randn(100, device="sim")
    state = torch.sim.get_rng_state()
    two = torch.randn(100, device="sim")
    host = torch.get_rng_state()
    torch.sim.set_rng_state(state)
    assert torch.equal(torch.randn(100, device="sim").cpu(), two.cpu()) and not torch.equal(one.cpu(), two.cpu())
    assert torch.equal(torch.get_rng_state(), host)  # the CPU's are left alone
    torch.manual_seed(7)
    assert torch.equal(torch.randn(100, device="sim").cpu(), one.cpu())
    own = torch.Generator("sim").manual_seed(3)
    first = torch.rand(5, device="sim", generator=own)
    assert torch.equal(first.cpu(), torch.rand(5, device="sim", generator=torch.Generator("sim").manual_seed(3)).cpu())
    slow()
    dropped = torch.nn.functional.dropout(torch.ones(10_000, device="sim"), 0.25)
    assert not torch.sim.current_stream().query()  # nothing of this waits
    assert 7000 < (dropped != 0).sum().item() < 8000


def checkpointing_repeats_random_numbers():
    torch.manual_seed(0)
    layer = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Dropout(0.5), torch.nn.Linear(16, 16)).to("sim")
    x = torch.randn(8, 16).to("sim")
    gradients = []
    for run in (
        layer,
        lambda x: checkpoint(layer, x, use_reentrant=False),
        lambda x: checkpoint(layer, x, use_reentrant=True),
    ):
        torch.manual_seed(5)
        leaf = x.clone().requires_grad_()
        run(leaf).square().sum().backward()
        gradients.append(leaf.grad.cpu())
    assert torch.equal(gradients[0], gradients[1]) and torch.equal(gradients[0], gradients[2])


def autocast_and_its_scaler():
    model = torch.nn.Linear(8, 8).to("sim")
    x = torch.randn(4, 8).to("sim")
    with torch.autocast("sim", dtype=torch.bfloat16):
        y = model(x)
        assert y.dtype == torch.bfloat16 and y.softmax(-1).dtype == torch.float32
        assert torch.equal(
            y.cpu(), torch.nn.functional.linear(*(t.bfloat16().cpu() for t in (x, model.weight, model.bias)))
        )
    assert model(x).dtype == torch.float32
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("sim")
    with torch.autocast("sim", dtype=torch.float16):
        loss = model(x).float().square().mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 65536.0


def a_script_finds_it():
    assert torch.accelerator.is_available() and torch.accelerator.current_accelerator().type == "sim"
    assert torch.accelerator.device_count() == 4 == torch.sim.device_count()  # TORCH_SIM_DEVICES=4
    torch.accelerator.set_device_index(2)
    x = torch.ones(3, device=torch.accelerator.current_accelerator())
    assert x.device == torch.device("sim", 2) == torch.zeros(1, device="sim").device and torch.sim.current_device() == 2
    assert "sim:2 alone" in raised(lambda: torch.ones(3, device="sim:1"))
    assert str(x + 1) == "tensor([2., 2., 2.], device='sim:2')"
    torch.accelerator.synchronize()


def storages_are_resized():
    x = torch.arange(100.0).to("sim")
    at = x.untyped_storage()
    before = torch.sim.memory_allocated()
    at.resize_(0)
    assert torch.sim.memory_allocated() < before
    assert "freed" in raised(lambda: x + 1)
    at.resize_(400)
    assert x.fill_(3).sum().item() == 300
    with torch.no_grad():
        x.set_(torch.ones(5, device="sim"))
    assert x.shape == (5,) and x.sum().item() == 5


def tensors_are_saved(path="saved.pt"):
    torch.save({"x": torch.arange(5.0).to("sim")}, path)
    assert torch.load(path)["x"].device.type == "sim"
    assert torch.equal(torch.load(path, map_location="cpu")["x"], torch.arange(5.0))


if __name__ == "__main__":
    os.chdir(os.environ["TMPDIR"])
    globals()[sys.argv[1]]()
    if "reported" not in sys.argv[1]:  # behind such an error the device serves no more
        torch.sim.synchronize()
