"""One rank of a job of a kind that FCDP has something to say about: words_job.py KIND FOLDER. Its fcdp.stats()
go to stats<RANK>.json there."""

import datetime
import faulthandler
import json
import os
import pathlib
import select
import signal
import subprocess
import sys

faulthandler.register(signal.SIGUSR1, all_threads=True)  # first: unregistered, the signal would end the process

import torch
import torch.distributed as dist

import compat
import subclass
from models import Net, shard, world_mesh
from run import Run

PATIENCE_S = 200


class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, i):
        return torch.full((3,), float(i))


def ddp(net):
    return torch.nn.parallel.DistributedDataParallel(net)


def fsdp1(net, strategy="FULL_SHARD"):
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

    return FullyShardedDataParallel(
        net, device_id=torch.device("cpu"), sharding_strategy=getattr(ShardingStrategy, strategy)
    )


class OwnGather:
    def allocate(self, size, *, dtype, device):
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, async_op=False):
        return dist.all_gather_into_tensor(output_tensor, input_tensor, group=group)


def partly(net):
    """One block has an all-gather of its own, which is left to FSDP2."""
    shard(net)
    net.blocks[1].set_custom_all_gather(OwnGather())
    return net


def extended(net):
    """Its blocks' extensions gather another dtype of the same size in the second step."""
    net = Net(dim=25, n_blocks=4)
    subclass.extend(net.blocks)
    return shard(net)


def small_mesh(net):
    """One block keeps shards of its own after forward, from which FSDP2 gathers in backward."""
    from torch.distributed.fsdp import fully_shard

    fully_shard(net.blocks[1], mesh=world_mesh(), reshard_after_forward=2)
    return shard(net, blocks=[block for i, block in enumerate(net.blocks) if i != 1])


def stderr(kind):
    """`partly`, as a line is said of it before the first step, with a stderr that takes nothing."""

    def wrap(net):
        if kind == "full":
            os.dup2(os.open("/dev/full", os.O_WRONLY), 2)
        elif kind == "closed":
            os.close(2)
        else:
            sys.stderr = None
        return partly(net)

    return wrap


def steps_in_backward(net):
    """Each parameter has an optimizer of its own, which steps it when its gradient is there."""
    shard(net)
    for parameter in net.parameters():
        optimizer = torch.optim.SGD([parameter], lr=1e-2)
        parameter.register_post_accumulate_grad_hook(lambda _, optimizer=optimizer: optimizer.step())
    return net


def on_mesh(net):
    """Over the mesh that the environment's TEST_MESH makes."""
    from torch.distributed.device_mesh import init_device_mesh

    return shard(net, mesh=eval(os.environ["TEST_MESH"], {"init_device_mesh": init_device_mesh}))


def captured(net):
    """As where the first forward is part of a CUDA graph's capture, which there is none of on a CPU."""
    from fcdp import seam

    seam.captures = lambda device: True
    return shard(net)


def no_interface(net):
    """gloo has none on rank 1, as in a container whose host name has no address."""
    from fcdp import c10d

    if dist.get_rank() == 1:
        c10d._has_interface = lambda: False
    return shard(net)


def sets_options(net):
    """The script sets them itself, after it has imported FSDP."""
    shard(net)
    os.environ |= {"FCDP_LOCAL_SIZE": "1", "FCDP_ALLOC": "native"}
    return net


def sets_a_wrong_option(net):
    shard(net)
    os.environ["FCDP_LOCAL_SIZE"] = "two"
    return net


WRAP = {
    "ddp": ddp,
    "captured": captured,
    "no interface": no_interface,
    "fsdp1": fsdp1,
    "fsdp1 NO_SHARD": lambda net: fsdp1(net, "NO_SHARD"),
    "partly": partly,
    "late": shard,
    "freed": shard,
    "killed": shard,
    "steps in backward": steps_in_backward,
    **{f"stderr {kind}": stderr(kind) for kind in ("full", "closed", "none")},
    "changing": extended,
    "small mesh": small_mesh,
    "absent": shard,
    "sharded": shard,
    "reconfigurable": shard,
    "reconfigured": shard,
    "mesh": on_mesh,
    "busy": ddp,
    "sets options": sets_options,
    "sets a wrong option": sets_a_wrong_option,
}


def stay_away(rank, store):
    """Rank 2 takes no part until all others have ended."""
    store.set(f"pid{rank}", str(os.getpid()))
    if rank != 2:
        return
    for other in (0, 1, 3):
        descriptor = os.pidfd_open(int(store.get(f"pid{other}")))
        select.select([descriptor], [], [], PATIENCE_S)
        os.close(descriptor)
    sys.exit("the others have ended")


def keep_busy():
    """Processes that a training job starts beside its ranks: none of them has to say anything."""
    loader = torch.utils.data.DataLoader(Numbers(), num_workers=1, multiprocessing_context="spawn")
    assert len(list(loader)) == 4
    helper = "import torch; import torch.distributed; p = torch.nn.Parameter(torch.ones(1)); p.sum().backward(); torch.optim.SGD([p], 0.1).step()"
    subprocess.run([sys.executable, "-c", helper], check=True)


def reconfigure(rank, store, round_):
    """The world, with the ranks that it has."""
    world = dist.group.WORLD
    store.set(f"{round_}/{rank}", world.get_reconfigure_handle())
    handles = [store.get(f"{round_}/{other}").decode() for other in range(2)]
    dist.distributed_c10d._reconfigure(uuid=round_, handles=handles).wait()


def main():
    kind, folder = sys.argv[1:]
    torch.set_num_threads(1)
    compat.prepare()
    options = {"enable_reconfigure": True} if kind == "reconfigurable" else {}
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=PATIENCE_S), **options)
    rank = dist.get_rank()
    if kind == "reconfigurable":
        reconfigure(rank, dist.distributed_c10d._get_default_store(), 1)
    run = Run(kind, rank, dist.get_world_size())
    model = WRAP.get(kind, lambda net: net)(Net(n_blocks=4))
    optimizer = torch.optim.AdamW(model.parameters() if kind != "steps in backward" else [torch.ones(1)], lr=1e-2)
    if kind == "busy":
        keep_busy()
    for step in range(2):
        if kind == "sets options" and step == 1:
            os.environ["FCDP_TAU"] = "0.5"
        if kind == "killed" and step == 1:
            dist.barrier()
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == "late" and step == 1:
            model.blocks[1].set_custom_all_gather(OwnGather())
        if kind == "freed" and step == 1 and rank == 1:
            model.blocks[1].norm.weight.to_local().untyped_storage().resize_(0)
        if kind == "changing" and step == 1:
            subclass.Bf16AllGather.fsdp_pre_all_gather = lambda self, mesh: ((self._data.to(torch.float16),), None)
        if kind == "reconfigured" and step == 1:
            reconfigure(rank, dist.distributed_c10d._get_default_store(), 1)
        if kind == "absent" and step == 1:
            stay_away(rank, dist.distributed_c10d._get_default_store())
        if kind == "evaluation":
            run.evaluate(model)
            continue
        run.loss(model).backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}", flush=True)
    fcdp = sys.modules.get("fcdp")
    pathlib.Path(folder, f"stats{rank}.json").write_text(json.dumps(fcdp.stats() if fcdp else None))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
