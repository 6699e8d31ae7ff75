"""Lives in every rank of the lab: one JSON line per optimizer step into $LAB_PROBE_DIR/rank<r>.<pid>.jsonl.

A file of its own without imports from the package: it is loaded by path, in whatever Python runs the script. Never
imports torch; waits for the script to do so. What it does between t_in and t_out is not part of a step's time.

Lines, by `kind`: start, model (once, at the first step), step, error (an uncaught exception), end.
"""

import atexit
import ctypes
import functools
import hashlib
import importlib.abc
import importlib.machinery
import inspect
import json
import os
import sys
import time
import traceback
import weakref

_OPTIMIZER = "torch.optim.optimizer"
_PARAM_GROUP = "torch.distributed.fsdp._fully_shard._fsdp_param_group"


class _Log:
    """Opened by its first line, so that a rank's children that never step leave no file."""

    def __init__(self):
        self._folder = os.environ["LAB_PROBE_DIR"]
        self._rank = int(os.environ["RANK"])
        self._file = None

    def write(self, kind, **fields):
        if self._file is None:
            path = os.path.join(self._folder, f"rank{self._rank}.{os.getpid()}.jsonl")
            self._file = open(path, "a", buffering=1)
        self._file.write(json.dumps({"kind": kind, "t": time.monotonic(), **fields}) + "\n")


class _Gathered:
    """Bytes of gathered parameters that plain FSDP2 holds: live = outputs + unsharded + kept shards; peak of it."""

    def __init__(self):
        self.live = self.peak = 0
        self._unsharded = {}  # storage -> bytes
        self.tracked = False

    def _add(self, n_bytes):
        self.live += n_bytes
        self.peak = max(self.peak, self.live)

    def hold(self, tensor):
        """Counts a tensor that owns its storage until it is gone."""
        n_bytes = tensor.untyped_storage().nbytes()
        self._add(n_bytes)
        weakref.finalize(tensor, self._add, -n_bytes)

    def set_unsharded(self, tensor):
        storage = tensor.untyped_storage()
        key, n_bytes = storage._cdata, storage.nbytes()
        if key not in self._unsharded:
            weakref.finalize(tensor, self._drop, key)
        self._add(n_bytes - self._unsharded.get(key, 0))
        self._unsharded[key] = n_bytes

    def _drop(self, key):
        self._add(-self._unsharded.pop(key, 0))

    def watch(self, group_module):
        """Wraps the places where FSDP2 allocates and frees; torch 2.6 to 2.15 have the same ones."""
        param_module = sys.modules[group_module.__name__.rpartition(".")[0] + "._fsdp_param"]
        names = ("foreach_all_gather", "AllGatherResult", "FSDPParam")
        if not all(hasattr(group_module, n) for n in names) or not hasattr(param_module, "alloc_storage"):
            print("fcdp-lab: this torch's FSDP2 is unknown; device bytes are not measured", file=sys.stderr)
            return
        self._watch_gathers(group_module)
        for name in ("alloc_storage", "free_storage"):
            self._watch_storages(name, [m for m in (param_module, group_module) if hasattr(m, name)])
        self._watch_kept_shards(param_module.FSDPParam)
        self.tracked = True

    def _watch_gathers(self, module):
        gather = module.foreach_all_gather

        def foreach_all_gather(*args, **kwargs):
            result = gather(*args, **kwargs)
            if result is not None:
                self.hold(result.all_gather_output)
            return result

        module.foreach_all_gather = foreach_all_gather

    def _watch_storages(self, name, modules):
        change = getattr(modules[0], name)

        def changed(tensor):
            change(tensor)
            self.set_unsharded(tensor)

        for module in modules:
            setattr(module, name, changed)

    def _watch_kept_shards(self, cls):
        reshard = cls.to_sharded_post_forward

        def to_sharded_post_forward(param, *args, **kwargs):
            reshard(param, *args, **kwargs)
            self.hold(param._sharded_post_forward_param_data)

        cls.to_sharded_post_forward = to_sharded_post_forward


class _Sent:
    """Bytes that this rank sends to other nodes by collective, where FCDP does not count them: from their sizes, and a
    ring over the group's ranks in which each sends to the next. FSDP looks these functions up when it calls them."""

    def __init__(self):
        self.by_kind = {}
        self.counts = False

    def watch(self, group_module):
        dist = sys.modules["torch.distributed"]
        for name, kind, hops in (
            ("all_gather_into_tensor", "plain_gather", self._gather),
            ("all_gather_single", "plain_gather", self._gather),  # its name since torch 2.15
            ("reduce_scatter_tensor", "reduce_scatter", self._reduce_scatter),
            ("reduce_scatter_single", "reduce_scatter", self._reduce_scatter),
            ("all_reduce", "all_reduce", self._all_reduce),
        ):
            if hasattr(dist, name):
                self._wrap(dist, name, kind, hops)
        self.counts = True

    def _wrap(self, dist, name, kind, hops):
        collective = getattr(dist, name)
        signature = inspect.signature(collective)

        @functools.wraps(collective)
        def counted(*args, **kwargs):
            bound = signature.bind(*args, **kwargs).arguments
            self._count(dist, kind, bound.get("group"), lambda n: hops(bound, n))
            return collective(*args, **kwargs)

        setattr(dist, name, counted)

    def _count(self, dist, kind, group, bytes_per_hop):
        group = group if group is not None else dist.group.WORLD
        if not isinstance(group, dist.ProcessGroup):
            return
        ranks = dist.get_process_group_ranks(group)
        mine = dist.get_rank()
        if mine not in ranks or len(ranks) < 2:
            return
        node_size = int(os.environ["LOCAL_WORLD_SIZE"])
        following = ranks[(ranks.index(mine) + 1) % len(ranks)]
        if following // node_size != mine // node_size:
            self.by_kind[kind] = self.by_kind.get(kind, 0) + bytes_per_hop(len(ranks))

    @staticmethod
    def _gather(bound, n):
        return _n_bytes([bound["input_tensor"]]) * (n - 1)

    @staticmethod
    def _reduce_scatter(bound, n):
        output = bound["output"]
        rounds = 1 if output.is_cuda else 2  # gloo, of CPUs and of "sim", reduces everywhere and keeps a part
        return rounds * _n_bytes([output]) * (n - 1)

    @staticmethod
    def _all_reduce(bound, n):
        return 2 * _n_bytes([bound["tensor"]]) * (n - 1) // n

    def stats(self):
        """As fcdp.stats() has them."""
        return {kind: {"inter_bytes_sent": n} for kind, n in self.by_kind.items()} if self.counts else None


class _Digest:
    """Digests of the bytes of an optimizer's local shards, in order, and of their shapes, which say what can be
    compared."""

    def __init__(self):
        try:
            import xxhash

            self._new, self.name = xxhash.xxh3_128, "xxh3_128"
        except ImportError:
            self._new, self.name = lambda: hashlib.blake2b(digest_size=16), "blake2b"

    def of(self, tensors):
        content, layout = self._new(), self._new()
        for tensor in tensors:
            layout.update(f"{tuple(tensor.shape)}{tensor.dtype};".encode())
            flat = tensor.detach().contiguous().cpu()
            if flat.numel():
                content.update((ctypes.c_char * (flat.numel() * flat.element_size())).from_address(flat.data_ptr()))
        return content.hexdigest(), layout.hexdigest()


def _local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _n_bytes(tensors):
    return sum(t.numel() * t.element_size() for t in map(_local, tensors))


def _accelerator(params):
    """The device that they are on; None: the CPU."""
    return next((p.device for p in params if p.device.type not in ("cpu", "meta")), None)


def _device_bytes(params):
    """How much of the device's memory is taken; None on a CPU."""
    device = _accelerator(params)
    if device is None:
        return None
    free, total = sys.modules["torch"].get_device_module(device).mem_get_info(device)
    return total - free


def _counters():
    sent = received = 0
    with open("/proc/self/net/dev") as f:
        for line in f:
            name, colon, rest = line.partition(":")
            if colon and name.strip() != "lo":
                fields = rest.split()
                received += int(fields[0])
                sent += int(fields[8])
    return {"sent": sent, "received": received}


def _fcdp_stats(whole=False):
    fcdp = sys.modules.get("fcdp")
    if fcdp is None or not hasattr(fcdp, "stats"):
        return None
    stats = dict(fcdp.stats())
    if not whole:
        stats["groups"] = len(stats["groups"])
    return stats


class Probe:
    def __init__(self):
        self._log = _Log()
        self._gathered = _Gathered()
        self._sent = _Sent()
        self._digest = _Digest()
        self._optimizers = weakref.WeakKeyDictionary()  # optimizer -> [index, steps done]

    def install(self):
        """The rank's own hooks, and those that wait for torch."""
        on_import = {_OPTIMIZER: self._hook_optimizers}
        if os.environ.get("FCDP", "") in ("", "0"):
            on_import[_PARAM_GROUP] = self._watch_plain
        sys.meta_path.insert(0, _AfterImport(on_import))
        self._report_exceptions()
        atexit.register(self._end)
        self._log.write(
            "start",
            rank=int(os.environ["RANK"]),
            local_rank=int(os.environ.get("LOCAL_RANK", 0)),
            node=int(os.environ.get("GROUP_RANK", 0)),
            pid=os.getpid(),
        )

    def _watch_plain(self, group_module):
        self._sent.watch(group_module)
        self._gathered.watch(group_module)

    def _report_exceptions(self):
        earlier = sys.excepthook

        def hook(kind, value, trace):
            if not issubclass(kind, KeyboardInterrupt):
                text = "".join(traceback.format_exception(kind, value, trace))
                self._log.write("error", traceback=text)
            earlier(kind, value, trace)

        sys.excepthook = hook

    def _hook_optimizers(self, module):
        module.register_optimizer_step_post_hook(self._after_step)

    def _after_step(self, optimizer, args, kwargs):
        params = [p for group in optimizer.param_groups for p in group["params"]]
        self._synchronize(params)
        t_in = time.monotonic()
        counters = _counters()
        mine = self._optimizers.setdefault(optimizer, [len(self._optimizers), 0])
        if mine == [0, 1]:  # after a first whole step: gradients and optimizer state exist
            self._describe_model(optimizer, params)
        digest, layout = self._digest.of([_local(p) for p in params])
        mine[1] += 1
        self._log.write(
            "step",
            optimizer=mine[0],
            step=mine[1],
            digest=digest,
            layout=layout,
            **counters,
            gathered=self._gathered_bytes(),
            device=_device_bytes(params),
            fcdp=_fcdp_stats(),
            collectives=self._sent.stats(),
            t_in=t_in,
            t_out=time.monotonic(),
        )

    @staticmethod
    def _synchronize(params):
        device = _accelerator(params)
        if device is not None:
            sys.modules["torch"].get_device_module(device).synchronize(device)

    def _gathered_bytes(self):
        return {"current": self._gathered.live, "peak": self._gathered.peak} if self._gathered.tracked else None

    def _describe_model(self, optimizer, params):
        import gc

        stored = gathered = sharded = 0
        held = [o for o in gc.get_objects() if type(o).__name__ == "FSDPParam" and hasattr(o, "_sharded_param_data")]
        for p in held:
            n = p._orig_size.numel()
            stored += n * p.orig_dtype.itemsize
            gathered += n * (p.param_dtype or p.orig_dtype).itemsize
            sharded += _n_bytes([p.sharded_param])
        tensors = sys.modules["torch"].Tensor
        state = [v for s in optimizer.state.values() for v in s.values() if isinstance(v, tensors)]
        self._log.write(
            "model",
            digest=self._digest.name,
            fsdp_parameters=len(held),
            parameter_bytes=stored,
            gathered_bytes=gathered,
            shard_bytes=sharded or _n_bytes(params),
            gradient_bytes=_n_bytes([p.grad for p in params if p.grad is not None]),
            optimizer_bytes=_n_bytes(state),
        )

    def _end(self):
        try:
            self._log.write("end", **_counters(), gathered=self._gathered_bytes(), fcdp=_fcdp_stats(whole=True))
        except Exception as error:
            self._log.write("end", failed=repr(error))


class _AfterImport(importlib.abc.MetaPathFinder):
    """Calls a function with a module right after the import system has executed it."""

    def __init__(self, calls):
        self._calls = calls

    def find_spec(self, name, path, target=None):
        if name not in self._calls:
            return None
        call = self._calls.pop(name)
        for finder in sys.meta_path:
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _Loader(spec.loader, call)
                return spec
        return None


class _Loader(importlib.abc.Loader):
    def __init__(self, loader, call):
        self._loader, self._call = loader, call

    def create_module(self, spec):
        return self._loader.create_module(spec)

    def exec_module(self, module):
        module.__loader__ = module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        try:
            self._call(module)
        except Exception as error:
            print(f"fcdp-lab: the probe could not hook {module.__name__}: {error!r}", file=sys.stderr)

    def __getattr__(self, name):  # what others ask of the real loader
        return getattr(self._loader, name)


def install():
    Probe().install()
