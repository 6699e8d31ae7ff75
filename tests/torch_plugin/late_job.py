"""plain_script.py, with FCDP off on rank 1 until another rank has seen that it is: late_job.py's arguments are its."""

import torch.distributed as dist

import plain_script
from models import shard


def turn_on_late(net):
    if dist.get_rank() == 1:
        store = dist.distributed_c10d._get_default_store()
        import fcdp
        from fcdp import presence

        assert store.get(f"{presence.name_of(dist.group.WORLD)}/0") == b"some"
        fcdp.enable()
    return shard(net)


if __name__ == "__main__":
    plain_script.shard = turn_on_late
    plain_script.main()
