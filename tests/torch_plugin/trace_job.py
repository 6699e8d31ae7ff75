"""One rank: trains, then reads this process's own trace as a reader would, beside fcdp.stats(). argv: the folder of
a file for each rank, the number of steps."""

import json
import mmap
import os
import pathlib
import re
import struct
import sys
import time

import torch
import torch.distributed as dist

import compat
from models import Net, shard

ROOT = pathlib.Path(__file__).resolve().parents[2]
LAYERS = ("alloc", "tiering", "comm", "torch_plugin")
ROW = re.compile(r'X\((\w+), (\d+), "([^"]*)"')
EVENT = struct.Struct("<QQQQHBBIIIQQ")


def rows(what):
    """{number: name} of FCDP_<LAYER>_<what> in the layers' trace_events.h."""
    found = {}
    for layer in LAYERS:
        text = (ROOT / layer / "trace_events.h").read_text().replace("\\\n", " ")
        for line in text.splitlines():
            if re.match(rf"#define FCDP_\w+_{what}\(X\)", line):
                found |= {int(number): name for _, number, name in ROW.findall(line)}
    return found


class Trace:
    def __init__(self):
        fds = [fd for fd in os.listdir("/proc/self/fd") if self._leads_to_one(fd)]
        assert len(fds) == 1, fds
        self.mode = os.stat(f"/proc/self/fd/{fds[0]}").st_mode & 0o7777
        self.map = mmap.mmap(int(fds[0]), 0, prot=mmap.PROT_READ)
        (self.n_events, self.counters_at, self.objects_at, self.ring_at) = struct.unpack_from("<QQQQ", self.map, 24)
        self.place = struct.unpack_from("<6i", self.map, 88)

    @staticmethod
    def _leads_to_one(fd):
        try:
            return os.readlink(f"/proc/self/fd/{fd}").startswith("/memfd:fcdp-trace")
        except OSError:
            return False

    def counters(self):
        return {n: struct.unpack_from("<Q", self.map, self.counters_at + 8 * k)[0] for k, n in rows("COUNTERS").items()}

    def events(self):
        kinds = rows("EVENTS")
        found = []
        for i in range(self.n_events):
            stamp, start, ns, bytes_, kind, cause, flags, obj, step, thread, a, b = EVENT.unpack_from(
                self.map, self.ring_at + i * EVENT.size
            )
            if stamp:
                found.append((stamp // 2 - 1, kinds[kind], cause, obj, bytes_, a, b, step, ns, flags))
        return sorted(found)

    def name(self, number):
        return self.map[self.objects_at + 256 * number :][96:256].split(b"\0")[0].decode()

    def shard_group(self, number):
        return struct.unpack_from("<Q", self.map, self.objects_at + 256 * number + 48)[0]


def summed(events):
    """Bytes and number of events by kind."""
    out = {}
    for _, kind, _, _, bytes_, a, b, *_ in events:
        entry = out.setdefault(kind, {"n": 0, "bytes": 0, "a": 0, "b": 0})
        for key, value in (("n", 1), ("bytes", bytes_), ("a", a), ("b", b)):
            entry[key] += value
    return out


def main():
    compat.prepare()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(1234)
    model = shard(Net(n_blocks=3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(int(sys.argv[2])):
        (model(torch.ones(3, 11)) ** 2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.barrier()
    import fcdp
    from fcdp.runtime import runtime

    runtime.engine.drain()  # what was on the streams has ended, and is written
    trace = Trace()
    for _ in range(100):  # the monitor may be at it
        counters = trace.counters()
        if counters["trace.spans_begun"] == counters["trace.spans_ended"] and counters["host.bytes"]:
            break
        time.sleep(0.05)
    events = trace.events()
    stale = [(trace.name(e[3]), e[2]) for e in events if e[1] == "stale"]
    causes = rows("CAUSES")
    out = {
        "stats": fcdp.stats(),
        "counters": trace.counters(),
        "sums": summed(events),
        "stale": [(name, causes[cause]) for name, cause in stale],
        "steps": [e[7] for e in events if not e[9] & 1],
        "untimed": sum(1 for e in events if e[9] & 1 and e[8] == 0),
        "shard_groups": sorted({trace.shard_group(e[3]) for e in events if e[1] == "use"}),
        "mode": trace.mode,
        "place": trace.place,
    }
    pathlib.Path(sys.argv[1], f"rank{os.environ['RANK']}.json").write_text(json.dumps(out))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
