"""fcdp-memtrace serve: the counters of live jobs, for Prometheus."""

from __future__ import annotations

import argparse
import sys
import threading
from collections.abc import Iterator

from fcdp_memtrace import _trace
from fcdp_memtrace.arguments import at_least

ABOUT = """\
Serve the counters of live jobs over HTTP, for Prometheus.

Finds the jobs of this user on this machine by itself, whenever they begin, at each request. A job that has ended is
left out. Run one on each node. Everyone who can reach the address can read it, so it is this machine's own by default.
"""
LABELS = ("rank", "node", "local_rank", "pid")
ABOUT_PROCESS = ("command", "host", "device", "world_size", "nodes")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--port", type=int, default=9464, metavar="PORT", help="default 9464; 0: a free one, which is printed")
    add("--address", default="127.0.0.1", metavar="ADDRESS", help="to listen on (default 127.0.0.1; 0.0.0.0: all)")
    add(
        "--pid", type=at_least(1), default=0, metavar="PID", help="only the job that this process is of, or has started"
    )


def metric_name(counter: str, unit: str) -> str:
    """As Prometheus wants it: base units, words joined by underscores. Its library appends _total."""
    name = "fcdp_" + counter.replace(".", "_")
    return name.removesuffix("_ns") + "_seconds" if unit == "ns" else name


class Collector:
    """Reads the processes at each request. Requests come on threads; the model is for one at a time."""

    def __init__(self, pid: int):
        self.model, self.pid, self.lock = _trace.top_create(0), pid, threading.Lock()

    def describe(self) -> list:
        """Describes no metrics in advance, so that nothing is read before the first request."""
        return []

    def _ranks(self) -> list[dict]:
        _trace.top_find(self.model, self.pid)
        _trace.top_poll(self.model)
        frames = [
            _trace.top_frame(self.model, pid, 0, (1 << 64) - 1, False, 2.0) for pid in _trace.top_jobs(self.model)
        ]
        ranks = [rank for frame in frames if frame for rank in frame["ranks"]]
        return [rank for rank in ranks if rank["state"] == "running"]

    def collect(self) -> Iterator:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        with self.lock:
            ranks = self._ranks()
        places = [[str(rank[label]) for label in LABELS] for rank in ranks]
        info = GaugeMetricFamily("fcdp_process", "a process with FCDP", labels=[*LABELS, *ABOUT_PROCESS])
        for rank, place in zip(ranks, places):
            described = {**rank, "nodes": rank["n_nodes"]}
            info.add_metric([*place, *(str(described[key]) for key in ABOUT_PROCESS)], 1)
        yield info
        for _, _, counter, unit, what, says in _trace.tables()["counters"]:
            family = (CounterMetricFamily if what in ("sum", "node sum") else GaugeMetricFamily)(
                metric_name(counter, unit), says, labels=LABELS
            )
            for rank, place in zip(ranks, places):
                value = rank["counters"][counter]
                family.add_metric(place, value / 1e9 if unit == "ns" else value)
            yield family


def run(args: argparse.Namespace) -> int:
    try:
        from prometheus_client import CollectorRegistry, start_http_server
    except ImportError:
        raise _trace.Error("serve needs prometheus_client: pip install prometheus-client") from None
    if not 0 <= args.port <= 65535:
        raise _trace.Error(f"--port must be 0 to 65535, not {args.port}")
    registry = CollectorRegistry()
    registry.register(Collector(args.pid))
    try:
        server, thread = start_http_server(args.port, args.address, registry)
    except OSError as error:
        raise _trace.Error(f"cannot listen on {args.address}:{args.port}: {error.strerror or error}") from None
    host = f"[{args.address}]" if ":" in args.address else args.address
    print(f"fcdp-memtrace: serving http://{host}:{server.server_port}/metrics", file=sys.stderr, flush=True)
    thread.join()
    return 0
