"""What evidence.c reads of FSDP2's parameters is what these few lines of Python say of them, in whatever state a program
leaves them. One process of a fake process group; argv: a seed."""

import inspect
import os
import random
import sys
from array import array

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from fcdp import _fcdp
from fcdp.fsdp2 import _Extent, _groups_of


class Group:
    by_device, by_host, steps = False, True, 0

    def ask_again(self):
        pass


class Oracle:
    """One extent's evidence, as a reader would write it."""

    def __init__(self):
        self.objects, self.serial, self.written_version, self.codes = None, 0, 0, {}

    def version(self, tensor):
        return 0 if tensor.is_inference() else tensor._version

    def code(self, dtypes):
        """Any, but of these alone."""
        code = _fcdp.dtype_codes(*dtypes)
        assert self.codes.setdefault(code, dtypes) == dtypes
        return code

    def is_read(self, group, data):
        return group.by_device or (group.by_host and data.device.type == "cpu")

    def signals(self, group, extent):
        p = extent.fsdp_param
        param, data = p.sharded_param, p._sharded_param_data
        objects = param, param._local_tensor, data
        if self.objects is None or any(a is not b for a, b in zip(objects, self.objects)):
            self.objects, self.serial = objects, self.serial + 1
        dtypes = data.dtype, p.param_dtype or data.dtype
        anonymous = group.steps if param.requires_grad and not self.is_read(group, data) else 0
        return [
            self.serial,
            data.untyped_storage().data_ptr(),
            *map(self.version, objects),
            extent.steps + anonymous,
            self.code(dtypes),
            int(param.requires_grad),
        ]

    def place(self, group, extent):
        data = extent.fsdp_param._sharded_param_data
        storage, read = data.untyped_storage(), self.is_read(group, data)
        there = storage.nbytes() >= data.storage_offset() * data.itemsize + data.nbytes
        address = data.data_ptr() or 1 if there or not data.nbytes else 0
        return address if read else 0, data.nbytes if read or not address else 0

    def written(self, extent):
        unsharded = getattr(extent.fsdp_param, "_unsharded_param", None)
        if unsharded is None or extent.is_copied:
            return False
        before, self.written_version = self.written_version, self.version(unsharded)
        return self.written_version != before


def model():
    torch.manual_seed(0)
    layers = torch.nn.Linear(6, 5), torch.nn.Linear(5, 3, bias=False), torch.nn.Linear(3, 1)
    return torch.nn.Sequential(*layers)


def states(chance, params, extents, group):
    """Named ways to change them, each of one parameter, drawn by `chance`."""
    p = chance.choice(params)

    def swap():
        p.sharded_param = torch.nn.Parameter(p.sharded_param.detach().clone(), p.sharded_param.requires_grad)

    def data():
        p._sharded_param_data = p._sharded_param_data.clone()

    def local():
        p.sharded_param._local_tensor = p.sharded_param._local_tensor.clone()

    def inference():
        with torch.inference_mode():
            p._sharded_param_data = torch.ones_like(p._sharded_param_data)

    def inference_local():
        with torch.inference_mode():
            p.sharded_param._local_tensor = torch.ones_like(p.sharded_param._local_tensor)

    def free():
        p._sharded_param_data.untyped_storage().resize_(0)

    def fill():
        p._sharded_param_data.untyped_storage().resize_(p._sharded_param_data.nbytes + 64)

    def offset():
        p._sharded_param_data = torch.zeros(p._sharded_param_data.numel() + 3)[3:]

    def empty():
        p._sharded_param_data = torch.empty(0)

    def cast():
        p._sharded_param_data = p._sharded_param_data.to(chance.choice((torch.float32, torch.float64, torch.bfloat16)))

    def policy():
        p.param_dtype = chance.choice((None, torch.bfloat16, torch.float16))

    def meta():
        p._sharded_param_data = p._sharded_param_data.to("meta")

    def is_there(q):
        local = q.sharded_param._local_tensor
        return local.untyped_storage().nbytes() >= local.nbytes

    def write():
        if not is_there(p):
            return
        with torch.no_grad():
            p.sharded_param.mul_(2)

    def write_local():
        if not is_there(p):
            return
        with torch.no_grad():
            p.sharded_param.to_local().add_(1)

    def flip():
        p.sharded_param.requires_grad_(not p.sharded_param.requires_grad)

    def optimize():
        chosen = [q.sharded_param for q in params if q.sharded_param.requires_grad and is_there(q)]
        for param in chosen:
            param.grad = torch.ones_like(param)
        if chosen:
            torch.optim.SGD(chosen, lr=0.1, foreach=chance.random() < 0.5).step()

    def count():
        chance.choice(extents).steps += 1
        group.steps += 1

    def readers():
        group.by_device, group.by_host = chance.choice(((False, True), (True, False), (False, False)))

    def gathered():
        p._unsharded_param = chance.choice((None, torch.nn.Parameter(torch.ones(4))))

    def write_gathered():
        if getattr(p, "_unsharded_param", None) is not None:
            p._unsharded_param.data.detach_()
            with torch.no_grad():
                p._unsharded_param.add_(1)

    def copied():
        extent = chance.choice(extents)
        extent.is_copied = not extent.is_copied

    return [value for name, value in locals().items() if inspect.isfunction(value) and name != "is_there"]


def compare(group, extents, oracles):
    want = [o.signals(group, e) for o, e in zip(oracles, extents)]
    got = array("Q", _fcdp.evidence_signals(group, extents)).tolist()
    assert got == [value for row in want for value in row], (got, want)
    places = [o.place(group, e) for o, e in zip(oracles, extents)]
    addresses, sizes = (array("Q", column).tolist() for column in _fcdp.evidence_places(group, extents))
    assert list(zip(addresses, sizes)) == places, (addresses, sizes, places)
    written = [o.written(e) for o, e in zip(oracles, extents)]
    assert _fcdp.evidence_written(extents) == any(written)


def raises(group, extents):
    """What an attribute raises comes out as it was."""

    class Broken:
        @property
        def _sharded_param_data(self):
            raise KeyError("the parameter's own")

    extents[0].fsdp_param = Broken()
    for function in (_fcdp.evidence_signals, _fcdp.evidence_places):
        try:
            function(group, extents)
        except KeyError as error:
            assert error.args == ("the parameter's own",)
        else:
            raise AssertionError(function)


def main():
    seed = int(sys.argv[1])
    print(f"seed {seed}", flush=True)
    chance, group = random.Random(seed), Group()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    module = fully_shard(model())
    params = _groups_of(module._get_fsdp_state())[0].fsdp_params
    for param in params:
        param.param_dtype = None  # FSDP2 sets it in the first forward
    extents = [_Extent(p, i) for i, p in enumerate(params)]
    oracles = [Oracle() for _ in extents]
    seen = set()
    compare(group, extents, oracles)
    for _ in range(600):
        change = chance.choice(states(chance, params, extents, group))
        try:
            change()
            seen.add(change.__name__)
        except (RuntimeError, NotImplementedError, ValueError):  # what torch does not allow in this state
            pass
        compare(group, extents, oracles)
    raises(group, extents)
    print(f"compared after {len(seen)} kinds of changes", flush=True)
    assert len(seen) >= 18, seen
    os._exit(0)  # a fake process group ends with a warning


if __name__ == "__main__":
    main()
