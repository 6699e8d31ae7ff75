"""One rank of a job under torchrun: runs the named cases one after another and writes what came out of each, a
line of JSON.

A case that raises on every rank alike is a result.  One that raises on some ranks leaves the others inside a
collective: the job ends there and the launcher starts another one for the cases that are left."""

import argparse
import datetime
import faulthandler
import gc
import json
import os
import signal
import sys
import time
import traceback

faulthandler.register(signal.SIGUSR1, all_threads=True)  # first: unregistered, the signal would end the process

import torch
import torch.distributed as dist

import cases  # noqa: F401  (fills the registries)
import compat
import place
import run as runs

FLIGHT_TIMEOUT_S = 40


def agree(store, key, rank, world, mine):
    """Every rank's word on a case, over the store: it works where the process group no longer does."""
    store.set(f"{key}/{rank}", mine)
    keys = [f"{key}/{other}" for other in range(world)]
    store.wait(keys, datetime.timedelta(seconds=2 * FLIGHT_TIMEOUT_S))
    return [store.get(k).decode() for k in keys]


def settle(run, result):
    """What the case recorded is read, and what it put on streams is waited for. A device that has failed tells nothing
    more."""
    try:
        run.read()
        place.synchronize()
    except Exception as error:
        result["error"] = result["error"] or f"{type(error).__name__}: {error}"
        del run.events[len(run.events) - len(run.unread) :]


def run_case(name, function, rank, world, fcdp):
    run = runs.Run(name, rank, world, fcdp)
    result = {"events": run.events, "marks": run.marks, "extra": run.extra, "error": None}
    before = fcdp.stats() if fcdp else None
    began, cpu_began = time.monotonic(), time.process_time()
    try:
        function(run)
        run.finish_process_state()
    except runs.Unsupported as reason:
        result["unsupported"] = str(reason)
    except Exception as error:
        result["error"] = f"{type(error).__name__}: {error}"
        result["traceback"] = traceback.format_exc()
    settle(run, result)
    result["seconds"], result["cpu_seconds"] = time.monotonic() - began, time.process_time() - cpu_began
    if fcdp:
        runs.collect()
        result["stats"] = [before]
    return result


def process_groups():
    return list(dist.distributed_c10d._world.pg_map)


def end_process_groups(but):
    """Those that a case has made, when every rank is through with it. Each has a thread of gloo's that wakes a hundred
    times a second; of all cases together these would be busier than the cases."""
    for group in process_groups():
        if group not in but:
            dist.destroy_process_group(group)


def blind():
    """No signal of a parameter moves, but what it is gathered as: its bytes alone can tell that it has changed."""
    from fcdp import fsdp1, fsdp2

    for extent in (fsdp1._Extent, fsdp2._Extent):
        seen, extent.in_c = extent.signals, False
        extent.signals = lambda self, group, seen=seen: (0, 0, 0, 0, 0, 0, seen(self, group)[6], 0)


def load_what_cases_would():
    """What the cases import as they go, most of it with dynamo's first compilation, is imported before the heap
    is frozen: the collections after every case would go through it each time, which is half of a small case's
    time."""
    torch._dynamo.reset()
    torch.compile(torch.nn.Linear(3, 3), backend="aot_eager")(torch.ones(2, 3)).sum().backward()
    torch._dynamo.reset()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument(
        "--cases", required=True, help="a file with one name a line; NAME@MUTANT: over a wrong cache (mutants.py)"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    compat.prepare()
    with open(arguments.cases) as f:
        names = f.read().split()
    switch = None
    if any("@" in name for name in names):
        import mutants

        switch = mutants.install()
    registry = {**runs.CASES, **runs.PARTICULAR, **runs.COUNTING}

    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    backend = "gloo" if place.KIND == "cpu" else None  # a device's own
    dist.init_process_group(backend, timeout=datetime.timedelta(seconds=FLIGHT_TIMEOUT_S))
    store = dist.PrefixStore("cases", dist.distributed_c10d._get_default_store())
    fcdp = runs.import_fcdp()
    if fcdp and os.environ.get("TEST_BLIND"):
        blind()
    if any(name.startswith("compiled_") for name in names):
        load_what_cases_would()
        runs.collect()
    gc.freeze()  # the collections that cases ask for look at the cases' own objects
    with open("/proc/self/maps") as f:
        ours_mapped = sorted({line.split()[-1] for line in f if "fcdp" in os.path.basename(line.split()[-1])})
    head = {
        "torch": torch.__version__,
        "modules": sorted(m for m in sys.modules if m.split(".")[0] in ("fcdp", "_fcdp")),
        "mapped": ours_mapped,
        "enabled": bool(fcdp),
    }
    # a line is written at once, or not read
    lines = open(os.path.join(arguments.out, f"rank{rank}.jsonl"), "w", buffering=1)
    lines.write(json.dumps(head) + "\n")

    broken, of_all = False, process_groups()
    for name in names:
        plain_name, _, mutant = name.partition("@")
        if switch:
            switch.become(mutant)
        result = run_case(plain_name, registry[plain_name], rank, world, fcdp)
        word = "lost its device" if place.is_lost() else "raised" if result["error"] else "done"
        words = agree(store, name, rank, world, word)
        if fcdp:  # host bytes are the node's: those of its other ranks' dead models have gone by now too
            result["stats"].append(fcdp.stats())
        broken = len(set(words)) > 1 or word.startswith("lost")
        if broken:
            result["error"] = result["error"] or "another rank raised: " + ", ".join(
                f"rank {r} {word}" for r, word in enumerate(words)
            )
        lines.write(json.dumps([name, result]) + "\n")
        if broken:
            print(f"case {name} broke the job: {words}", file=sys.stderr, flush=True)
            break
        end_process_groups(but=of_all)
    if broken:
        os._exit(17)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
