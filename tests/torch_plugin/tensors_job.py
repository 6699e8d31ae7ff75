"""fcdp_alloc under PyTorch's own pluggable allocator, over the simulated device: every scenario in one process,
the outcome of each as JSON. argv: the library made of pluggable.cpp, the result's path."""

import ctypes
import inspect
import json
import mmap
import os
import sys
import traceback
import types
import warnings

import torch
import torch.cuda.memory

import fcdp
from fcdp import _fcdp, tensors
from owner import Owner

MIB = 1 << 20
PAGE = 2 * MIB
BUDGET = 64 * MIB  # FCDP_DEVICE_BUDGET of the test
DONE, OUT_OF_MEMORY, C10_ERROR, OTHER = 0, 1, 2, 3
SCENARIOS = {}


def scenario(function):
    SCENARIOS[function.__name__] = function
    return function


class Pluggable:
    def __init__(self, path):
        self.lib = ctypes.CDLL(path)
        self.text = ctypes.create_string_buffer(4096)

    def call(self, name, *args):
        code = getattr(self.lib, "pluggable_" + name)(*args, self.text, ctypes.c_size_t(len(self.text)))
        return code, self.text.value.decode() if code != DONE else ""

    def do(self, name, *args):
        code, text = self.call(name, *args)
        assert code == DONE, (name, code, text)

    def try_malloc(self, bytes_, stream=0):
        out = ctypes.c_void_p()
        code, text = self.call("malloc", ctypes.c_size_t(bytes_), 0, ctypes.c_void_p(stream), ctypes.byref(out))
        return code, text, out.value

    def malloc(self, bytes_, stream=0):
        code, text, at = self.try_malloc(bytes_, stream)
        assert code == DONE, text
        return at

    def free(self, at):
        self.do("free", ctypes.c_void_p(at))

    def record_stream(self, at, stream):
        self.do(
            "record_stream", ctypes.c_void_p(self.hooks["record_stream"]), ctypes.c_void_p(at), ctypes.c_void_p(stream)
        )


class Sim:
    """The simulated driver, for streams of its own; the library that FCDP has loaded."""

    def __init__(self, path):
        self.lib = ctypes.CDLL(path)
        context = ctypes.c_void_p()
        assert self.lib.cuInit(0) == 0
        assert self.lib.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
        assert self.lib.cuCtxSetCurrent(context) == 0
        self.gate = mmap.mmap(-1, 4096)
        self.gate_at = ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(self.gate)))

    def stream(self):
        out = ctypes.c_void_p()
        assert self.lib.cuStreamCreateWithPriority(ctypes.byref(out), 1, 0) == 0
        return out.value


@scenario
def a_child_forked_before_the_first_tensor_has_its_own(p, sim):
    child = os.fork()
    if child == 0:
        code, text, _ = p.try_malloc(MIB)
        # It reaches the driver; that the simulated one lives in the parent alone is the simulation's own rule.
        os._exit(0 if code != DONE and "not fcdp_alloc's" not in text else 1)
    assert os.waitpid(child, 0)[1] == 0


@scenario
def tensors_come_and_go(p, sim):
    assert _fcdp.tensors_stats(0) is None and "no tensor" in fcdp.memory_summary(0)
    assert fcdp.memory_stats(0) and not any(
        value for key, value in fcdp.memory_stats(0).items() if key != "max_split_size"
    )
    sizes = [1, 700, MIB, 3 * MIB + 1, 9 * MIB]
    at = [p.malloc(size) for size in sizes]
    for address, size in zip(at, sizes):
        ctypes.memset(address, 0x5A, size)
    assert all(address % 512 == 0 for address in at)
    stats = fcdp.memory_stats(0)
    assert stats["requested_bytes.all.current"] == sum(sizes)
    assert stats["allocation.all.current"] == len(sizes)
    for address in at:
        p.free(address)
    again = [p.malloc(size) for size in sizes]
    assert sorted(again) == sorted(at)  # hits
    for address in again:
        p.free(address)
    assert fcdp.memory_allocated(0) == 0 and fcdp.max_memory_allocated(0) >= sum(sizes)
    p.do("empty_cache")
    assert fcdp.memory_reserved(0) == 0
    assert p.malloc(0) is None  # as an empty tensor's
    p.free(0)


@scenario
def memory_that_is_out_is_torchs_own_error(p, sim):
    held = [p.malloc(8 * MIB) for _ in range(7)]
    code, text, _ = p.try_malloc(16 * MIB)
    assert code == OUT_OF_MEMORY, (code, text)
    assert text.startswith("CUDA out of memory. Tried to allocate 16.8 MB."), text
    assert "58.7 MB to 10 MB" in text, text  # the memory of each holder
    assert fcdp.memory_stats(0)["num_ooms"] == 1
    for address in held:
        p.free(address)
    p.free(p.malloc(BUDGET))  # to the last page
    code, text, _ = p.try_malloc(BUDGET + 1)
    assert code == OUT_OF_MEMORY
    code, text, _ = p.try_malloc(1 << 63)
    assert code == C10_ERROR and "cannot be allocated" in text, (code, text)
    p.do("empty_cache")


@scenario
def wrong_frees_are_torchs_own_error(p, sim):
    at = p.malloc(MIB)
    p.free(at)
    code, text = p.call("free", ctypes.c_void_p(at))
    assert code == C10_ERROR and "not allocated here" in text, (code, text)


@scenario
def a_recorded_stream_holds_memory_back(p, sim):
    other = sim.stream()
    at = p.malloc(4 * MIB)
    p.record_stream(at, other)
    assert sim.lib.cuMemHostRegister_v2(sim.gate_at, ctypes.c_size_t(4096), 0) == 0
    assert sim.lib.cuStreamWaitValue32_v2(ctypes.c_void_p(other), ctypes.c_uint64(sim.gate_at.value), 1, 0) == 0
    p.free(at)
    assert p.malloc(4 * MIB) != at
    assert fcdp.memory_stats(0)["active_bytes.all.current"] == 8 * MIB
    blocks = [b for s in fcdp.snapshot()["segments"] for b in s["blocks"]]
    assert [b["address"] for b in blocks if b["state"] == "active_awaiting_free"] == [at]
    sim.gate[0:1] = b"\1"
    assert sim.lib.cuStreamSynchronize(ctypes.c_void_p(other)) == 0
    taken = [p.malloc(4 * MIB) for _ in range(15)]  # all of the budget: the block is among them
    for block in blocks:
        if block["state"] == "active_allocated":
            taken.append(block["address"])
    for address in taken:
        p.free(address)
    p.do("empty_cache")
    p.record_stream(0x5000, other)  # another library's tensor, say: not ours to hold back


@scenario
def what_nccl_asks_of_an_allocator_is_answered(p, sim):
    """With nothing: pages that move are not to be registered."""
    at = p.malloc(4 * MIB)
    p.do("init")
    n_segments = ctypes.c_size_t(77)
    p.do("snapshot", ctypes.byref(n_segments))
    assert n_segments.value == 0
    p.do("attach")
    assert p.lib.pluggable_is_current() and tensors.is_current()  # it is of its class still
    assert fcdp.memory_allocated(0) == 4 * MIB
    p.free(at)


@scenario
def a_graphs_pool_keeps_to_itself(p, sim):
    inside, outside = sim.stream(), sim.stream()
    p.do("begin_pool", 0, ctypes.c_uint64(5), ctypes.c_void_p(inside))
    code, text = p.call("begin_pool", 0, ctypes.c_uint64(5), ctypes.c_void_p(inside))
    assert code == C10_ERROR, (code, text)
    mine, theirs = p.malloc(4 * MIB, inside), p.malloc(4 * MIB, outside)
    p.do("end_pool", 0, ctypes.c_uint64(5))
    pools = {b["address"]: s["segment_pool_id"] for s in fcdp.snapshot()["segments"] for b in s["blocks"]}
    assert pools[mine] == (5, 7) and pools[theirs] == (0, 0), pools
    p.free(mine)
    assert p.malloc(4 * MIB, inside) != mine  # a graph may write there
    p.do("begin_pool", 0, ctypes.c_uint64(5), ctypes.c_void_p(inside))
    assert p.malloc(4 * MIB, inside) == mine
    p.do("end_pool", 0, ctypes.c_uint64(5))
    p.free(mine)
    p.do("release_pool", 0, ctypes.c_uint64(5))
    p.do("release_pool", 0, ctypes.c_uint64(5))
    for segment in fcdp.snapshot()["segments"]:
        for block in segment["blocks"]:
            if block["state"] == "active_allocated":
                p.free(block["address"])
    p.do("empty_cache")
    assert fcdp.memory_reserved(0) == 0, fcdp.memory_summary(0)


@scenario
def a_memory_fraction_is_of_the_whole_device(p, sim):
    p.do("set_fraction", ctypes.c_double(0.125), 0)  # of FCDP_SIM_CAPACITY=256M
    held = p.malloc(32 * MIB)
    code, text, _ = p.try_malloc(2 * MIB)
    assert code == OUT_OF_MEMORY and "the budget is 33.6 MB" in text, text
    p.free(held)
    p.do("set_fraction", ctypes.c_double(0.9), 0)  # FCDP_DEVICE_BUDGET binds nevertheless
    p.free(p.malloc(BUDGET))
    code, text, _ = p.try_malloc(BUDGET + 1)
    assert code == OUT_OF_MEMORY
    p.do("empty_cache")


@scenario
def a_filter_that_throws_is_the_callers_error(p, sim):
    at = p.malloc(MIB)
    p.do("begin_pool", 0, ctypes.c_uint64(9), ctypes.c_void_p(-1))
    code, text, _ = p.try_malloc(MIB)
    assert code == OTHER and text == "the filter throws", (code, text)
    p.do("end_pool", 0, ctypes.c_uint64(9))  # nothing was left locked
    p.do("release_pool", 0, ctypes.c_uint64(9))
    p.free(p.malloc(MIB))
    p.free(at)


@scenario
def a_forked_child_has_no_device(p, sim):
    at = p.malloc(MIB)
    child = os.fork()
    if child == 0:
        code, text, _ = p.try_malloc(MIB)
        p.call("free", ctypes.c_void_p(at))
        os._exit(0 if code == C10_ERROR and "not fcdp_alloc's" in text else 1)
    assert os.waitpid(child, 0)[1] == 0
    p.free(at)


@scenario
def cudnn_benchmark_stays_off(p, sim):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.backends.cudnn.benchmark = True
    assert "FCDP_ALLOC=native" in str(caught[0].message)
    assert not torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = False


@scenario
def torchs_functions_answer_with_ours(p, sim):
    torch.cuda.memory.is_initialized = lambda: True  # there is no GPU to initialise
    index = torch.cuda.memory._get_device_index
    torch.cuda.memory._get_device_index = lambda device, optional=False: 0
    p.do("empty_cache")  # three pages and one from here on
    try:
        torch.cuda.reset_peak_memory_stats(0)
        torch.cuda.reset_accumulated_memory_stats(0)
        torch.cuda.memory._record_memory_history(max_entries=100)
        at = [p.malloc(6 * MIB), p.malloc(100)]
        assert torch.cuda.memory_allocated(0) == 6 * MIB + 512 == fcdp.memory_allocated(0)
        p.free(at[0])
        assert torch.cuda.memory_allocated(0) == 512
        assert 6 * MIB <= torch.cuda.max_memory_allocated(0) <= 6 * MIB + 512
        assert torch.cuda.memory_reserved(0) == 8 * MIB
        assert torch.cuda.memory_stats(0) == fcdp.memory_stats(0)
        assert (
            fcdp.memory_stats(0)["allocation.all.allocated"] == 2 and fcdp.memory_stats(0)["allocation.all.freed"] == 1
        )
        table = torch.cuda.memory_summary(0)
        assert "6145 KiB" in table or "6144 KiB" in table, table
        assert table in fcdp.memory_summary(0)
        torch.cuda.memory._record_memory_history(None)
        p.free(at[1])
        whole = torch.cuda.memory._snapshot()
        assert [(e["action"], e["size"]) for e in whole["device_traces"][0]] == [
            ("alloc", 6 * MIB),
            ("alloc", 100),
            ("free_requested", 6 * MIB),
            ("free_completed", 6 * MIB),
        ]
        assert sum(segment["total_size"] for segment in whole["segments"]) == 8 * MIB
        assert torch.cuda.memory_snapshot() == whole["segments"]
        torch.cuda.memory._record_memory_history(max_entries=3)
        p.malloc(0)
        for size in (1000, 2000, 3000):
            p.free(p.malloc(size))
        torch.cuda.memory._record_memory_history(None)
        assert [(e["action"], e["size"]) for e in fcdp.snapshot()["device_traces"][0]] == [
            ("alloc", 3000),
            ("free_requested", 3000),
            ("free_completed", 3000),
        ]
        torch.cuda.reset_accumulated_memory_stats(0)
        p.do("empty_cache")
        assert min(value for key, value in fcdp.memory_stats(0).items() if key != "max_split_size") == 0
    finally:
        torch.cuda.memory._get_device_index = index


@scenario
def what_is_not_recorded_is_said(p, sim):
    if "record_pinned_host_memory" not in inspect.signature(torch.cuda.memory._record_memory_history).parameters:
        return  # torch before 2.15 does not know it
    fcdp.record_memory_history(max_entries=0, clear=True)
    for enabled in ("all", True):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.memory._record_memory_history(enabled, record_pinned_host_memory=True, record_cuda=False)
        assert "page-locked host memory is not recorded; FCDP_ALLOC=native" in str(caught[0].message)
        assert caught[0].filename == __file__, caught[0]
        p.free(p.malloc(MIB))
        assert fcdp.snapshot()["device_traces"][0] == []
        with warnings.catch_warnings(record=True) as caught:
            torch.cuda.memory._record_memory_history(enabled)
        p.free(p.malloc(MIB))
        assert not caught and fcdp.snapshot()["device_traces"][0] != []
        torch.cuda.memory._record_memory_history(None, clear_history=True)


@scenario
def the_visualiser_reads_a_snapshot(p, sim):
    from torch.cuda import _memory_viz

    at = p.malloc(5 * MIB)
    whole = fcdp.snapshot()
    assert "5.0" in _memory_viz.segsum(whole) or "5MiB" in _memory_viz.segsum(whole).replace(" ", "")
    assert "<html" in _memory_viz.trace_plot(whole) or "viz" in _memory_viz.trace_plot(whole)
    assert _memory_viz.segment_plot(whole) and _memory_viz.trace(whole) is not None
    p.free(at)


def one_group(sim):
    """An engine on the tensors' device, with a group of 32 MiB in a shard group of two nodes: (engine, shard
    group, group, tree)."""
    engine = _fcdp.create_engine(_fcdp.DRIVER_SIM, 0, sim.lib._name, True, True, True)
    assert engine.create_account()

    class Transport:
        def begin(self, lane, address, bytes_):
            ctypes.memmove(address + bytes_, address, bytes_)  # the other node's shard is the same

        def finish(self, lane, begun):
            assert begun is None

    shard_group = engine.create_shard_group((0).to_bytes(4, "little") + (1).to_bytes(4, "little"), 0, Transport())
    assert shard_group.create_host_memory()
    group = shard_group.create_group("block", [(16 * MIB, 1)])
    group.attach(group.allocate_host())
    return engine, shard_group, group, shard_group.create_tree()


@scenario
def a_gather_in_a_capture_is_refused_before_the_ranks_meet(p, sim):
    from fcdp import settings
    from fcdp.failures import call
    from fcdp.group import Group
    from fcdp.tree import Tree

    class OneShards:
        n_groups = 0

        def agree(self, vote):
            raise AssertionError("the ranks meet")

    engine, shard_group, handle, _ = one_group(sim)
    stream, shards = sim.stream(), OneShards()
    shards.comm = shard_group
    settings.options.update(_fcdp.options_load())
    group = Group("block", [types.SimpleNamespace(name="weight", in_c=False)], shards, handle, [16 * MIB], None)
    assert sim.lib.simgpu_capture(ctypes.c_void_p(stream), 1) == 0
    for by_hand in (False, True):
        try:
            group.unshard(Tree([]), True, by_hand, stream)
            raise AssertionError("it was not refused")
        except RuntimeError as error:
            assert "a CUDA graph is being captured, and 'block' cannot be gathered in it" in str(
                error
            ) and "FCDP=0" in str(error), error
    call(engine.order_writes, stream)
    assert sim.lib.simgpu_capture(ctypes.c_void_p(stream), 0) == 0  # nothing has broken it
    engine.destroy()


@scenario
def an_engine_shares_the_pages(p, sim):
    """A region's pages and a tensor's are the same: the budget binds both."""
    p.do("empty_cache")
    engine, _, group, tree = one_group(sim)
    shard = torch.arange(4 * MIB, dtype=torch.int32)
    owner = Owner(group, shard)
    owner.unshard(tree)
    group.wait(0)
    assert engine.stats()["device_bytes"]["current"] == 32 * MIB
    held = p.malloc(32 * MIB)
    code, text, _ = p.try_malloc(2 * MIB)  # the region is in use
    assert code == OUT_OF_MEMORY and "gathered parameters 33.6 MB" in text, text
    group.reshard(0)
    engine.drain()
    more = p.malloc(32 * MIB)
    device_bytes = engine.stats()["device_bytes"]
    assert device_bytes["current"] == 0 and 32 * MIB <= device_bytes["peak"] <= BUDGET == device_bytes["budget"], (
        device_bytes
    )
    p.free(held)
    owner.unshard(tree)  # takes the cache's pages
    group.wait(0)
    got = (ctypes.c_int32 * 4).from_address(group.address(0) + 24 * MIB)
    assert list(got) == shard[2 * MIB : 2 * MIB + 4].tolist()
    group.reshard(0)
    engine.drain()
    engine.destroy()
    p.free(more)
    p.free(p.malloc(BUDGET))


@scenario
def a_capture_of_another_stream_lets_no_gathered_parameter_sleep(p, sim):
    from fcdp.runtime import runtime

    engine, _, group, tree = one_group(sim)
    owner = Owner(group, torch.arange(4 * MIB, dtype=torch.int32))
    owner.unshard(tree)
    group.wait(0)
    group.reshard(0)
    engine.drain()
    gathered = engine.stats()["device_bytes"]["current"]
    captured, tensor = sim.stream(), p.malloc(3 * MIB)
    runtime.engine, runtime.device = engine, torch.device("cpu")
    p.do("begin_pool", 0, ctypes.c_uint64(11), ctypes.c_void_p(captured))
    assert sim.lib.simgpu_capture(ctypes.c_void_p(captured), 1) == 0
    try:
        fcdp.sleep()
        raise AssertionError("it slept")
    except fcdp.Error as error:
        assert "while a CUDA graph is captured" in str(error), error
    assert engine.stats()["device_bytes"]["current"] == gathered > 0
    assert sim.lib.simgpu_capture(ctypes.c_void_p(captured), 0) == 0  # nothing has broken it
    p.do("end_pool", 0, ctypes.c_uint64(11))
    fcdp.sleep()
    assert engine.stats()["device_bytes"]["current"] == 0
    fcdp.wake()
    runtime.engine = runtime.device = None
    p.do("release_pool", 0, ctypes.c_uint64(11))
    p.free(tensor)
    engine.destroy()


def main():
    p = Pluggable(sys.argv[1])
    sim_path = sys.argv[3]
    tensors.fcdp_alloc._allocator = tensors.make_pluggable(_fcdp.DRIVER_SIM, sim_path)
    torch.cuda.memory.change_current_allocator(fcdp.fcdp_alloc)
    assert p.lib.pluggable_is_current() and tensors.is_current()
    sim = Sim(sim_path)
    p.hooks = _fcdp.tensors_enable(_fcdp.DRIVER_SIM, sim_path)
    outcomes = {}
    for name, function in SCENARIOS.items():
        try:
            function(p, sim)
            outcomes[name] = "passed"
        except Exception:
            outcomes[name] = traceback.format_exc()
    with open(sys.argv[2], "w") as f:
        json.dump(outcomes, f)


if __name__ == "__main__":
    main()
