"""What FCDP's objects say where they cannot serve: each text, without a job of several ranks."""

import types

import pytest
import torch

from conftest import needs_fcdp

pytestmark = needs_fcdp
CPU = torch.device("cpu")


def has(**attributes):
    return types.SimpleNamespace(**attributes)


def test_a_process_serves_one_device(monkeypatch):
    from fcdp import runtime
    from fcdp.c10d import Unsupported

    here = runtime.Runtime()
    here.engine, here.device = object(), CPU
    here.need_engine(CPU)
    with pytest.raises(Unsupported) as refused:
        here.need_engine(torch.device("cuda", 1))
    said = "this process serves another device already (cpu, this shard group is on cuda:1)"
    assert str(refused.value) == said


def test_a_driver_that_does_not_fit_the_device_is_named(monkeypatch):
    from fcdp import _fcdp, runtime
    from fcdp.c10d import Unsupported

    monkeypatch.setitem(runtime.options, "driver", _fcdp.DRIVER_SIM)
    with pytest.raises(Unsupported) as refused:
        runtime.Runtime().need_engine(torch.device("cuda", 0))
    assert str(refused.value) == "FCDP_DRIVER=sim, but the model is on a CUDA device; use FCDP_DRIVER=auto"


def test_a_process_group_that_moves_nothing_is_named(monkeypatch):
    from fcdp import c10d

    def none(device):
        raise RuntimeError("No backend type associated with device type cuda")

    monkeypatch.setattr(c10d.dist, "get_backend", lambda group: "fake")
    with pytest.raises(c10d.Unsupported) as refused:
        c10d._backend_of(None, CPU)
    said = "its process group is of the backend 'fake', which moves no bytes between processes"
    assert str(refused.value) == said
    monkeypatch.setattr(c10d.dist, "get_backend", lambda group: "gloo")
    with pytest.raises(c10d.Unsupported) as refused:
        c10d._backend_of(has(_get_backend=none), torch.device("cuda", 0))
    said = "its process group (gloo) serves no tensors of cuda:0: No backend type associated with device type cuda"
    assert str(refused.value) == said


def test_a_shard_that_has_another_size_now_is_named():
    from fcdp.group import Group

    group = Group.__new__(Group)
    group.shard_bytes, group.n, group.inputs = [8, 4], 2, None
    group.extents = [has(name="blocks.0.weight"), has(name="blocks.0.bias")]
    group.collect = lambda wanted: {0: torch.ones(2), 1: torch.ones(3)}
    with pytest.raises(RuntimeError) as refused:
        group.make_inputs(b"\1\1", None)
    assert str(refused.value) == (
        "fcdp: the shard of blocks.0.bias has 12 bytes now, 4 when FCDP first saw it; "
        "a parameter's size and dtype must not change after the first forward"
    )


def test_too_little_device_memory_is_torchs_error():
    """In the words for which scripts look that try a smaller batch."""
    from fcdp import _fcdp, failures

    def fails(status):
        raise _fcdp.Error("no pages for 'blocks.0'", status)

    with pytest.raises(torch.OutOfMemoryError, match="^CUDA out of memory. fcdp: no pages for 'blocks.0'$"):
        failures.call(fails, _fcdp.ERR_NO_DEVICE_MEM)
    with pytest.raises(RuntimeError, match="^fcdp: no pages for 'blocks.0'$"):
        failures.call(fails, _fcdp.ERR_INVALID)


def test_a_reduction_that_fails_names_its_parameters(monkeypatch):
    from fcdp import seam

    monkeypatch.setattr(seam.group, "by_id", {1: None})
    monkeypatch.setattr(seam.plain, "count", lambda *_, **__: None)
    monkeypatch.setattr(seam.reduce, "count_flat", lambda: None)
    with (
        pytest.raises(RuntimeError, match="Connection closed by peer") as failed,
        seam.reduction(has(size=lambda: 4), CPU, 8, lambda: "blocks.0.weight"),
    ):
        raise RuntimeError("Connection closed by peer")
    note = "fcdp: the gradients of blocks.0.weight were not reduced over 4 ranks"
    assert note in [*getattr(failed.value, "__notes__", []), *str(failed.value).splitlines()]


def test_a_rank_that_does_not_say_what_it_kept_is_an_error():
    from fcdp.reduce import Reducer

    def late(key):
        raise RuntimeError("Timed out")

    here = has(n_compared=0, within=has(place=0, size=2), of_node=has(get=late))
    with pytest.raises(RuntimeError) as failed:
        Reducer._compare_kept(here, "digest")
    said = "FCDP_REDUCE=hierarchical: a rank of this node did not say what it kept in backwards without gradient "
    assert said in str(failed.value) and str(failed.value).endswith("synchronisation: Timed out")


def test_why_fsdp_reduces_is_said_once(monkeypatch):
    from fcdp import fsdp2_reduce, reduce
    from fcdp.c10d import Unsupported

    class Own:
        """A program's reduce-scatter."""

    said = []
    monkeypatch.setattr(reduce.words, "write", said.append)
    monkeypatch.setattr(reduce, "_reasons", [])
    monkeypatch.setattr(reduce, "is_on", lambda: True)
    monkeypatch.setattr(reduce.shard_groups, "known", lambda group: None)
    for _ in range(2):
        assert not reduce.Reducer.serves(has(within=has(size=1)), torch.distributed.ReduceOp.MAX)
        assert reduce.reducer_of(None) is None
        assert fsdp2_reduce._reducer(None, None, None) is None
        assert fsdp2_reduce._reducer(None, None, Own()) is None
    reasons = [
        "it does not reduce by RedOpType.MAX",
        "FCDP gathers no parameters of this process group",
        "FSDP2's reduce-scatter can be replaced from torch 2.9 on",
        "it has a reduce-scatter of another kind (Own)",
    ]
    assert said == [f"FCDP_REDUCE=hierarchical: {reason}; FSDP's own reduce-scatter runs" for reason in reasons]
    with pytest.raises(Unsupported, match="no backend of the kind 'mpi' can be made beside the job's own"):
        reduce._backend(has(name=lambda: "mpi"), None, 0, 2, None)


def test_ranks_at_different_agreements_do_not_agree():
    from fcdp.c10d import Shards

    shards = Shards.__new__(Shards)
    shards.local, shards.node_size = 0, 1
    shards.control = has(max_=lambda ballot: None)
    assert shards._max(b"\1\0", 5)[0] == b"\1\0"
    shards.control = has(max_=lambda ballot: ballot[-1].fill_(255))
    with pytest.raises(RuntimeError, match=r"the ranks are not at the same agreement \(2 votes on this rank\)"):
        shards._max(b"\1\0", 5)


def test_pytorchs_allocator_that_is_out_of_memory_is_helped_and_told(monkeypatch, caplog):
    from fcdp import tensors

    monkeypatch.setattr(tensors._fcdp, "neighbour_yield", lambda bytes_: 0)
    tensors._on_out_of_memory(0, 1 << 20, 0, 0)
    assert not caplog.messages
    monkeypatch.setattr(tensors._fcdp, "neighbour_yield", lambda bytes_: 2 * bytes_)
    tensors._on_out_of_memory(0, 1 << 20, 0, 0)
    (said,) = caplog.messages
    assert said.startswith(
        "PyTorch's allocator ran out of memory; 2.1 MB that gathered parameters do not need now were"
    )
    assert said.endswith("given back, so another attempt may succeed")


def test_a_name_that_fcdp_does_not_have():
    import fcdp

    with pytest.raises(AttributeError, match="module 'fcdp' has no attribute 'summarise'"):
        fcdp.summarise  # noqa: B018
