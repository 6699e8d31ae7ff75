"""fcdp_alloc, FCDP's allocator for CUDA tensors. Its statistics have the form of torch.cuda.memory's.

PyTorch refuses memory_stats, snapshots and peaks with a pluggable allocator. While fcdp_alloc is the current
one, the functions of torch._C that torch.cuda's are made of answer with FCDP's numbers instead, so
torch.cuda.max_memory_allocated, memory_summary and the others work as with PyTorch's own.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.cuda.memory
import torch.distributed

from fcdp import OptionError, _fcdp

log = logging.getLogger("fcdp")

# Of PyTorch's pluggable allocator: how each hook is set.
_SETTERS = {
    "init": "set_init_fn",
    "reset": "set_reset_fn",
    "memory_fraction": "set_memory_fraction_fn",
    "record_stream": "set_record_stream_fn",
    "begin_pool": "set_begin_allocate_to_pool",
    "end_pool": "set_end_allocate_to_pool_fn",
    "release_pool": "set_release_pool",
}


def make_pluggable(driver: int = _fcdp.DRIVER_CUDA, sim_library: str | None = None) -> Any:
    """A torch._C._CUDAPluggableAllocator over FCDP's heap. Raises RuntimeError where this torch cannot be served."""
    try:
        _fcdp.options_load()
    except _fcdp.Error as error:
        raise OptionError(error.args[0]) from None
    if not hasattr(torch._C, "_cuda_customAllocator"):
        raise RuntimeError("fcdp_alloc: this torch is built without CUDA")
    _no_tensor_registration()
    _torchs_nccl_starts()
    _no_graph_registration()
    hooks = _fcdp.tensors_enable(driver, sim_library)
    allocator = torch._C._cuda_customAllocator(hooks["malloc"], hooks["free"])
    missing = [setter for setter in _SETTERS.values() if not hasattr(allocator, setter)]
    if missing:
        raise RuntimeError(
            f"fcdp_alloc: the pluggable allocator of torch {torch.__version__} has no {missing[0]}; use torch 2.6 to 2.15"
        )
    for hook, setter in _SETTERS.items():
        getattr(allocator, setter)(hooks[hook])
    _answer()
    if torch.backends.cudnn.benchmark:
        _no_cudnn_benchmark(True)
    return allocator


def _no_graph_registration() -> None:
    """NCCL registers the buffers of collectives that a CUDA graph captures, by default, and takes each for one
    physical allocation (NCCL_GRAPH_REGISTER): pages are many, and jobs were seen to hang. NCCL reads the
    variable at the first captured collective, so here is early enough."""
    asked = os.environ.setdefault("NCCL_GRAPH_REGISTER", "0").strip()
    if asked not in ("", "0"):
        raise RuntimeError(
            f"NCCL_GRAPH_REGISTER={asked} lets NCCL register tensors in captured CUDA graphs as if each were one allocation, which "
            "fcdp_alloc's are not; unset it, or set it to 0"
        )
    os.environ["NCCL_GRAPH_REGISTER"] = "0"


def _no_tensor_registration() -> None:
    """This hook of torch's NCCL would be told of no memory: what a job asks for would not happen."""
    name = "TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK"
    if os.environ.get(name, "").strip().lower() not in ("", "0", "n", "no", "f", "false"):
        raise RuntimeError(
            f"{name}={os.environ[name]} lets NCCL register the tensors' memory, which fcdp_alloc moves; unset it, or set it to 0"
        )


def _torchs_nccl_starts() -> None:
    """torch 2.15's "nccl" asks the current allocator at its start for what PyTorch refuses to a pluggable one."""
    why_not = _fcdp.allocator_calls_find()
    if why_not and hasattr(torch.distributed, "ProcessGroupNCCL2") and os.environ.get("TORCH_DIST_USE_NCCL2") != "0":
        raise RuntimeError(
            f"fcdp_alloc: {why_not}, and the NCCL of torch {torch.__version__} takes one at its start; TORCH_DIST_USE_NCCL2=0 chooses the "
            "NCCL of earlier versions, which does not"
        )


class _FcdpAlloc(torch.cuda.memory._CUDAAllocator):
    """The object for torch.cuda.memory.change_current_allocator. Nothing happens before it is asked for its
    allocator."""

    def __init__(self) -> None:
        super().__init__(None)

    def allocator(self) -> Any:
        if self._allocator is None:
            self._allocator = make_pluggable()
        return self._allocator


fcdp_alloc = _FcdpAlloc()


def is_current() -> bool:
    """Do tensors come from fcdp_alloc?"""
    ours = fcdp_alloc._allocator
    return (
        ours is not None
        and torch._C._cuda_getAllocatorBackend() == "pluggable"
        and torch._C._cuda_getAllocator() is ours
    )


def share_device(engine: _fcdp.Engine) -> None:
    """PyTorch's own allocator and the engine's pages share the device: before one says that memory is out, the
    other gives back what it does not use."""
    asks = engine.share_device(torch.cuda.empty_cache)
    if not asks:
        log.info(
            "PyTorch's allocator cannot ask FCDP for memory before it raises an out-of-memory: libc10_cuda does not import cudaMalloc"
        )
    # Where it calls no cudaMalloc (expandable segments), at least the next attempt finds more.
    attach = getattr(torch._C, "_cuda_attach_out_of_memory_observer", None)
    if attach is not None and torch._C._cuda_getAllocatorBackend() == "native":
        attach(_on_out_of_memory)


def _on_out_of_memory(device: int, bytes_: int, total_bytes: int, free_bytes: int) -> None:
    """PyTorch calls it without its lock; the exception is as good as thrown, and what is raised here (a warning
    may be) would take its place."""
    given = _fcdp.neighbour_yield(bytes_)
    if given:
        log.warning(
            "PyTorch's allocator ran out of memory; %s that gathered parameters do not need now were given back, so another attempt "
            "may succeed",
            _fcdp.size_text(given),
        )


# Of a statistic of torch.cuda.memory_stats.
_STAT = ("current", "peak", "allocated", "freed")
_POOLS = ("all", "small_pool", "large_pool")
_since: dict[int, dict[str, int]] = {}  # by device: accumulated values when they were reset


def _class_stats(c: dict[str, int], page_bytes: int) -> dict[str, tuple[int, int, int, int]]:
    """Of one class of blocks: current, peak, ever allocated, ever freed. Segments are pages. What is not counted
    through all time (free bytes; pages of a class, which move between classes) has its current value as its
    peak, and 0 ever allocated and freed. Blocks that are held for other streams are active by their bytes
    alone."""
    reserved = c["allocated_bytes"] + c["free_bytes"] + c["busy_bytes"] - c["asleep_bytes"]
    active = c["allocated_bytes"] + c["busy_bytes"]
    freed = c["malloc_bytes"] - c["allocated_bytes"]
    pages, peak_pages = reserved // page_bytes, c["peak_reserved_bytes"] // page_bytes
    return {
        "allocation": (c["n_live"], c["peak_n_live"], c["n_mallocs"], c["n_frees"]),
        "segment": (pages, peak_pages, 0, 0),
        "active": (c["n_live"], c["peak_n_live"], c["n_mallocs"], c["n_frees"]),
        "inactive_split": (c["n_free"], c["n_free"], 0, 0),
        "allocated_bytes": (c["allocated_bytes"], c["peak_allocated_bytes"], c["malloc_bytes"], freed),
        "reserved_bytes": (reserved, c["peak_reserved_bytes"], 0, 0),
        "active_bytes": (active, max(active, c["peak_allocated_bytes"]), c["malloc_bytes"], freed),
        "inactive_split_bytes": (c["free_bytes"], c["free_bytes"], 0, 0),
        "requested_bytes": (
            c["requested_bytes"],
            c["peak_requested_bytes"],
            c["malloc_requested_bytes"],
            c["malloc_requested_bytes"] - c["requested_bytes"],
        ),
    }


class _Zeroes(dict):
    """Of a device that no tensor has been asked of."""

    def __missing__(self, key: str) -> Any:
        return _Zeroes() if key.endswith("_pool") else 1 if key == "page_bytes" else 0


_ZEROES = _Zeroes()


def nested_stats(device: int) -> dict[str, Any]:
    """As torch._C._cuda_memoryStats; zeroes before the first tensor."""
    core = _fcdp.tensors_stats(device) or _ZEROES
    pools = {pool: _class_stats(core[pool], core["page_bytes"]) for pool in _POOLS[1:]}
    out: dict[str, Any] = {}
    for stat in pools["small_pool"]:
        small, large = pools["small_pool"][stat], pools["large_pool"][stat]
        both = tuple(a + b for a, b in zip(small, large))
        out[stat] = {"all": both, "small_pool": small, "large_pool": large}
    # The heap's own peaks are of one moment; a sum of two peaks need not be.
    tops = {
        "allocated_bytes": core["peak_allocated_bytes"],
        "reserved_bytes": core["peak_reserved_bytes"],
        "segment": core["peak_reserved_bytes"] // core["page_bytes"],
    }
    taken, returned = core["n_taken"], core["n_taken"] - core["reserved_bytes"] // core["page_bytes"]
    for stat, entry in out.items():
        current, peak, allocated, freed = entry["all"]
        if stat in tops:
            peak = max(current, tops[stat])
        if stat == "segment":
            allocated, freed = taken, returned
        if stat == "reserved_bytes":
            allocated, freed = taken * core["page_bytes"], returned * core["page_bytes"]
        entry["all"] = (current, peak, allocated, freed)
        for pool in _POOLS:
            entry[pool] = dict(zip(_STAT, entry[pool]))
    none = dict.fromkeys(_STAT, 0)
    out.update(
        num_alloc_retries=core["n_retries"],
        num_ooms=core["n_ooms"],
        num_sync_all_streams=0,  # the last is not counted
        num_device_alloc=core["n_creates"],
        num_device_free=core["n_creates"]
        - (core["reserved_bytes"] + core["region_bytes"] + core["idle_bytes"]) // core["page_bytes"],
        max_split_size=-1,
        oversize_allocations=dict(none),
        oversize_segments=dict(none),
    )
    return _since_reset(device, out)


_ACCUMULATED = ("num_alloc_retries", "num_ooms", "num_device_alloc", "num_device_free")


def _accumulated(nested: dict[str, Any]) -> dict[str, int]:
    flat = {key: nested[key] for key in _ACCUMULATED}
    for stat, entry in nested.items():
        if isinstance(entry, dict) and "all" in entry:
            flat.update(
                {f"{stat}.{pool}.{kind}": entry[pool][kind] for pool in _POOLS for kind in ("allocated", "freed")}
            )
    return flat


def _since_reset(device: int, nested: dict[str, Any]) -> dict[str, Any]:
    for key, value in _since.get(device, {}).items():
        if "." in key:
            stat, pool, kind = key.split(".")
            nested[stat][pool][kind] -= value
        else:
            nested[key] -= value
    return nested


def _flat(prefix: str, value: Any, out: dict[str, int]) -> dict[str, int]:
    if isinstance(value, dict):
        for key, inner in value.items():
            _flat(f"{prefix}.{key}" if prefix else key, inner, out)
    else:
        out[prefix] = value
    return out


def _index(device: Any) -> int:
    if device is None:
        return torch.cuda.current_device() if torch.cuda.is_initialized() else 0
    if isinstance(device, int):
        return device
    index = torch.device(device).index
    return _index(None) if index is None else index


def memory_stats(device: Any = None) -> dict[str, int]:
    """The keys of torch.cuda.memory_stats; what each says of FCDP's pages is in _class_stats."""
    return dict(sorted(_flat("", nested_stats(_index(device)), {}).items()))


def memory_allocated(device: Any = None) -> int:
    return memory_stats(device)["allocated_bytes.all.current"]


def max_memory_allocated(device: Any = None) -> int:
    """Since the start or reset_peak_memory_stats; with several streams at most 2 MiB for each off the true peak."""
    return memory_stats(device)["allocated_bytes.all.peak"]


def memory_reserved(device: Any = None) -> int:
    return memory_stats(device)["reserved_bytes.all.current"]


def max_memory_reserved(device: Any = None) -> int:
    return memory_stats(device)["reserved_bytes.all.peak"]


def reset_peak_memory_stats(device: Any = None) -> None:
    _fcdp.tensors_reset_peaks(_index(device))


def reset_accumulated_memory_stats(device: Any = None) -> None:
    index = _index(device)
    _since.pop(index, None)
    _since[index] = _accumulated(nested_stats(index))


def memory_summary(device: Any = None, abbreviated: bool = False) -> str:
    """torch.cuda.memory_summary's table, then the device's pages by who has them."""
    index = _index(device)
    core = _fcdp.tensors_stats(index)
    if core is None:
        return f"fcdp_alloc: no tensor on device {index} yet"
    budget, reserved, regions, idle = (
        _fcdp.size_text(core[f"{key}_bytes"]) for key in ("budget", "reserved", "region", "idle")
    )
    pages = (
        f"device {index}: of a budget of {budget} tensors reserve {reserved}, gathered "
        f"parameters {regions}, idle {idle}; {core['n_hits']} hits, {core['n_grows']} "
        f"growths, {core['n_moved']} pages moved"
    )
    return (torch.cuda.memory_summary(index, abbreviated) + "\n" if is_current() else "") + pages


_STATES = {"live": "active_allocated", "held": "active_awaiting_free", "free": "inactive"}


def _segments(device: int) -> list[dict[str, Any]]:
    """Runs of mapped addresses, as PyTorch's expandable segments."""
    segments: list[dict[str, Any]] = []
    for stream, address, bytes_, requested, state, pool, small in _fcdp.tensors_blocks(device) or []:
        last = segments[-1] if segments else None
        if last is None or (last["stream"], last["_pool"], last["address"] + last["total_size"]) != (
            stream,
            (pool, small),
            address,
        ):
            last = {
                "device": device,
                "address": address,
                "total_size": 0,
                "allocated_size": 0,
                "active_size": 0,
                "requested_size": 0,
                "stream": stream,
                "segment_type": "small" if small else "large",
                "segment_pool_id": pool,
                "is_expandable": True,
                "frames": [],
                "blocks": [],
                "_pool": (pool, small),
            }
            segments.append(last)
        last["total_size"] += bytes_
        if state == "live":
            last["allocated_size"] += bytes_
            last["requested_size"] += requested
        if state != "free":
            last["active_size"] += bytes_
        last["blocks"].append(
            {"address": address, "size": bytes_, "requested_size": requested, "state": _STATES[state], "frames": []}
        )
    for segment in segments:
        del segment["_pool"]
    return segments


_skipped: set[str] = set()


def record_memory_history(
    enabled: Any = "all", max_entries: int = sys.maxsize, clear: bool = False, skip_actions: Any = ()
) -> None:
    """Record allocations and frees from now on, the last `max_entries` of them. None or False stops: what was
    recorded can be read until it begins again with another `max_entries`, or with `clear`. "state" records
    nothing: a snapshot has what lives anyway."""
    _skipped.clear()
    _skipped.update(skip_actions or ())
    _fcdp.history_record(max_entries if enabled and enabled != "state" else 0, clear)


def _traces(n_devices: int) -> list[list[dict[str, Any]]]:
    """What was recorded, by device. A trace has no frames: the allocator does not ask Python who calls."""
    traces: list[list[dict[str, Any]]] = [[] for _ in range(n_devices)]
    for action, address, bytes_, stream, time_us, device in _fcdp.history_entries():
        while device >= len(traces):
            traces.append([])
        if action in _skipped:
            continue
        where = "device_free" if action == "oom" else "addr"
        traces[device].append(
            {"action": action, where: address, "size": bytes_, "stream": stream, "time_us": time_us, "frames": []}
        )
    return traces


def snapshot() -> dict[str, Any]:
    """Every mapped block of every device, and what record_memory_history recorded, as
    torch.cuda.memory._snapshot gives it. PyTorch's own allocator's settings say nothing here: they are empty."""
    segments, n = [], 1
    for device in range(_fcdp.TENSORS_MAX_DEVICES):
        found = _segments(device)
        if found:
            segments += found
            n = device + 1
    return {"segments": segments, "device_traces": _traces(n), "allocator_settings": {}, "external_annotations": []}


def _answer() -> None:
    """torch.cuda's functions answer with FCDP's numbers while tensors are FCDP's."""

    def instead(name: str, ours: Callable) -> None:
        original = getattr(torch._C, name, None)
        if original is None or hasattr(original, "_fcdp"):
            return

        @functools.wraps(original)
        def either(*args: Any, **kwargs: Any) -> Any:
            return (ours if is_current() else original)(*args, **kwargs)

        either._fcdp = True
        setattr(torch._C, name, either)

    for name in ("_cuda_memoryStats", "_accelerator_getDeviceStats"):
        instead(name, nested_stats)
    for name in ("_cuda_resetPeakMemoryStats", "_accelerator_resetPeakStats"):
        instead(name, reset_peak_memory_stats)
    for name in ("_cuda_resetAccumulatedMemoryStats", "_accelerator_resetAccumulatedStats"):
        instead(name, reset_accumulated_memory_stats)
    instead("_cuda_getMemoryFraction", _memory_fraction)
    instead("_set_cudnn_benchmark", _no_cudnn_benchmark)
    flag = vars(type(torch.backends.cudnn)).get("benchmark")  # has taken the function already
    if hasattr(flag, "setter"):
        flag.setter = torch._C._set_cudnn_benchmark
    instead("_cuda_record_memory_history", _record)
    instead("_cuda_record_memory_history_legacy", _record_legacy)
    instead("_cuda_memorySnapshot", lambda mempool_id=None: _of_pool(snapshot(), mempool_id))


_set_cudnn_benchmark = getattr(torch._C, "_set_cudnn_benchmark", lambda value: None)


def _memory_fraction(device: int) -> float:
    core = _fcdp.tensors_stats(device)
    return min(1.0, core["budget_bytes"] / torch.cuda.get_device_properties(device).total_memory) if core else 1.0


def _no_cudnn_benchmark(value: bool) -> None:
    """cuDNN's benchmark asks the allocator for its largest free block, which PyTorch refuses to a pluggable one
    with an error."""
    _set_cudnn_benchmark(False)
    if value:
        warnings.warn(
            "fcdp: torch.backends.cudnn.benchmark needs PyTorch's own allocator and stays off; FCDP_ALLOC=native allows it",
            stacklevel=4,
        )


def _record(
    enabled: Any,
    context: Any = None,
    stacks: Any = None,
    max_entries: int = sys.maxsize,
    clear: bool = False,
    compile_context: Any = False,
    annotations: Any = False,
    skip_actions: Any = (),
    pinned: bool = False,
    tensors: bool = True,
    *rest: Any,
) -> None:
    if pinned:
        _leave_out_pinned()
    if tensors:
        record_memory_history(
            enabled, max_entries, clear, skip_actions if isinstance(skip_actions, (list, tuple, set)) else ()
        )


def _record_legacy(enabled: Any, context: Any = None, max_entries: int = 1, *rest: Any) -> None:
    pinned, tensors = rest[6:8] if len(rest) >= 8 else (False, True)  # torch 2.15
    if pinned:
        _leave_out_pinned()
    if tensors:
        record_memory_history(enabled, max(max_entries, 1))


def _leave_out_pinned() -> None:
    warnings.warn(
        "fcdp: record_pinned_host_memory needs PyTorch's own allocator, so page-locked host memory is not recorded; FCDP_ALLOC=native "
        "records it",
        stacklevel=6,
    )


def _of_pool(whole: dict[str, Any], mempool_id: tuple | None) -> dict[str, Any]:
    wanted = tuple(mempool_id[:2]) if mempool_id is not None else (0, 0)
    if mempool_id is not None and len(mempool_id) > 2 and not mempool_id[2]:
        whole["device_traces"] = []
    if wanted != (0, 0):
        whole["segments"] = [segment for segment in whole["segments"] if segment["segment_pool_id"] == wanted]
    return whole
