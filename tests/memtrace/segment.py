"""A process that writes a trace, without FCDP: the segment of base/trace_format.h, made and filled from Python.

As a script it is such a process: it reads events as JSON, one list per line, writes them, and says "written"; an empty
line lets it end in order.
"""

import ctypes as c
import fcntl
import json
import mmap
import os
import sys
import time

RING = 1 << 10
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
N_COUNTERS, N_OBJECTS = 128, 4096
LIVE, IN_USE, KEPT = 1, 2, 4
ON_STREAM, BACKWARD = 1, 2


class Header(c.Structure):
    _fields_ = [
        ("magic", c.c_char * 8),
        ("version", c.c_uint32),
        ("header_bytes", c.c_uint32),
        ("n_counters", c.c_uint32),
        ("n_objects", c.c_uint32),
        ("ring_events", c.c_uint64),
        ("counters_at", c.c_uint64),
        ("objects_at", c.c_uint64),
        ("ring_at", c.c_uint64),
        ("segment_bytes", c.c_uint64),
        ("pid", c.c_int32),
        ("level", c.c_uint32),
        ("start_monotonic_ns", c.c_uint64),
        ("start_real_ns", c.c_uint64),
        ("rank", c.c_int32),
        ("world_size", c.c_int32),
        ("node", c.c_int32),
        ("n_nodes", c.c_int32),
        ("local_rank", c.c_int32),
        ("node_size", c.c_int32),
        ("page_bytes", c.c_uint64),
        ("device_budget_bytes", c.c_uint64),
        ("step", c.c_uint32),
        ("ended", c.c_uint32),
        ("host", c.c_char * 64),
        ("device", c.c_char * 64),
        ("command", c.c_char * 256),
        ("pad", c.c_char * 0),
    ]


HEAD_AT = (c.sizeof(Header) + 63) // 64 * 64
DROPPED_AT = HEAD_AT + 64
HEADER_BYTES = DROPPED_AT + 64


class Object(c.Structure):
    _fields_ = [
        ("generation", c.c_uint32),
        ("state", c.c_uint32),
        ("bytes", c.c_uint64),
        ("device_bytes", c.c_uint64),
        ("host_bytes", c.c_uint64),
        ("file_bytes", c.c_uint64),
        ("mapped_bytes", c.c_uint64),
        ("shard_group", c.c_uint64),
        ("reserved", c.c_uint64 * 5),
        ("name", c.c_char * 160),
    ]


class Event(c.Structure):
    _fields_ = [
        ("stamp", c.c_uint64),
        ("time_ns", c.c_uint64),
        ("duration_ns", c.c_uint64),
        ("bytes", c.c_uint64),
        ("kind", c.c_uint16),
        ("cause", c.c_uint8),
        ("flags", c.c_uint8),
        ("object", c.c_uint32),
        ("step", c.c_uint32),
        ("thread", c.c_uint32),
        ("a", c.c_uint64),
        ("b", c.c_uint64),
    ]


assert c.sizeof(Object) == 256 and c.sizeof(Event) == 64


class Segment:
    """Of this process. Times are in ns behind `epoch`."""

    def __init__(self, rank=0, world_size=1, ring=RING, version=1, command="python train.py", seals=SEALS):
        counters_at = 4096
        objects_at = counters_at + 8 * N_COUNTERS
        ring_at = objects_at + 256 * N_OBJECTS
        size = ring_at + 64 * ring
        size = (size + 4095) // 4096 * 4096
        self.fd = os.memfd_create("fcdp-trace", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.fchmod(self.fd, 0o600)
        os.ftruncate(self.fd, size)
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, seals)
        self.map = mmap.mmap(self.fd, size)
        self.epoch = time.monotonic_ns()
        self.header = Header.from_buffer(self.map)
        self.head = c.c_uint64.from_buffer(self.map, HEAD_AT)
        self.dropped = c.c_uint64.from_buffer(self.map, DROPPED_AT)
        self.counters = (c.c_uint64 * N_COUNTERS).from_buffer(self.map, counters_at)
        self.objects = (Object * N_OBJECTS).from_buffer(self.map, objects_at)
        self.ring = (Event * ring).from_buffer(self.map, ring_at)
        self.thread = os.getpid()
        h = self.header
        h.version, h.header_bytes, h.n_counters, h.n_objects = version, HEADER_BYTES, N_COUNTERS, N_OBJECTS
        h.ring_events, h.counters_at, h.objects_at, h.ring_at, h.segment_bytes = (
            ring,
            counters_at,
            objects_at,
            ring_at,
            size,
        )
        h.pid, h.level, h.rank, h.world_size = os.getpid(), 1, rank, world_size
        h.n_nodes, h.node, h.node_size, h.local_rank = world_size, rank, 1, 0
        h.start_monotonic_ns, h.start_real_ns = self.epoch, time.time_ns()
        h.host, h.device, h.command = b"host", b"simulated", command.encode()
        h.magic = b"FCDPTRC"

    def object(self, number, name, size=0, state=LIVE, **tiers):
        o = self.objects[number]
        o.generation += 1 if o.generation % 2 else 2
        o.state, o.bytes, o.name = state, size, name.encode()
        for tier, value in tiers.items():
            setattr(o, tier, value)

    def event(self, kind, time_ns=0, **fields):
        """What is not given is 0; the step is the header's."""
        n = self.head.value
        self.head.value = n + 1
        e = self.ring[n % len(self.ring)]
        e.stamp = 2 * n + 1
        values = {"duration_ns": 0, "bytes": 0, "cause": 0, "flags": 0, "object": 0, "a": 0, "b": 0}
        values |= {"step": self.header.step, "thread": self.thread} | fields
        e.kind, e.time_ns = kind, self.epoch + time_ns
        for name, value in values.items():
            setattr(e, name, value)
        e.stamp = 2 * n + 2
        return n

    def close(self):
        self.header.ended = 1
        for name in ("header", "head", "dropped", "counters", "objects", "ring"):
            delattr(self, name)
        self.map.close()
        os.close(self.fd)


def main():
    segment = Segment(**json.loads(sys.stdin.readline()))
    print("ready", flush=True)
    for line in sys.stdin:
        if not line.strip():
            break
        for name, arguments in json.loads(line):
            if name == "counter":
                segment.counters[arguments[0]] = arguments[1]
            elif name == "header":
                setattr(segment.header, *arguments)
            elif name == "object":
                segment.object(**arguments)
            else:
                segment.event(**arguments)
        print("written", flush=True)
    else:
        os.kill(os.getpid(), 9)
    segment.header.ended = 1


if __name__ == "__main__":
    main()
