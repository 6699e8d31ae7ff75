"""A garbage collection may run on any thread, also on a stream's, while it calls a collective. What dies there
must not make the stream wait for itself. Run by test_handles.py, under a timeout. argv: the simulated
driver's path."""

import gc
import sys
import threading
import weakref

import torch

from fcdp import _fcdp
from owner import Owner

MIB = 1 << 20


class Dead:
    """A cycle, which the garbage collector alone frees."""

    def __init__(self, *handles):
        self.handles, self.me = handles, self


def main():
    gc.disable()
    _fcdp.options_load()
    engine = _fcdp.create_engine(_fcdp.DRIVER_SIM, 0, sys.argv[1], False, True, True)
    engine.create_account()
    collected_on = []

    class Transport:
        def begin(self, lane, address, bytes_):
            collected_on.append((threading.current_thread() is threading.main_thread(), gc.collect()))

        def finish(self, lane, begun):
            assert begun is None

    shard_group = engine.create_shard_group((0).to_bytes(4, "little") + (1).to_bytes(4, "little"), 0, Transport())
    shard_group.create_host_memory()
    tree = shard_group.create_tree()
    shard = torch.ones(MIB, dtype=torch.uint8)

    def group_make(name):
        group = shard_group.create_group(name, [(MIB, 1)])
        group.attach(group.allocate_host())
        return group

    # A group, one that has begun without a wait, and a tensor over a third one's pages.
    idle, busy, seen = group_make("idle"), group_make("busy"), group_make("seen")
    view = torch.from_dlpack(seen.dlpack(0, MIB, 1, 8, 1, 0))
    living = group_make("living")
    Owner(busy, shard).unshard(tree)
    Dead(idle), Dead(busy), Dead(view)
    del idle, busy, seen, view
    owner = Owner(living, shard)
    owner.unshard(tree)
    living.wait(0)
    assert any(count > 0 and not on_main for on_main, count in collected_on), collected_on
    engine.drain()  # the dead are ended by the next call
    stats = engine.stats()
    assert stats["device_bytes"]["current"] == 2 * MIB, stats
    assert stats["host_bytes"]["current"] == 2 * MIB + 4096, stats
    living.reshard(0)
    transport = Transport()
    transport.shard_group = engine.create_shard_group(
        (0).to_bytes(4, "little") + (1).to_bytes(4, "little"), 0, transport
    )
    cycle = weakref.ref(transport)
    del transport
    gc.collect()
    assert cycle() is None, "a shard group whose transport refers to it is never freed"
    # Two parameters cross by way of a buffer, which the shard group has when the engine has ended.
    pair = shard_group.create_group("pair", [(64, 1), (64, 1)])
    pair.attach(pair.allocate_host())
    pair_owner = Owner(pair, shard[:64], shard[64:128])
    pair_owner.unshard(tree)
    pair.wait(0)
    pair.reshard(0)
    engine.drain()
    engine.destroy()
    del pair, pair_owner, living, owner, tree
    shard_group = None
    gc.collect()
    print("fine")


if __name__ == "__main__":
    main()
