"""What tools/clean_machine.sh trains: FSDP2 with nothing but torch installed. A digest of every loss and of the
final shards, and FCDP's own counters, in result<RANK>.json under the folder that it is given."""

import hashlib
import json
import pathlib
import sys

import torch
import torch.distributed as dist

import compat
from models import BATCH, IN, OUT, Net, shard


def raw_bytes(tensor):
    return bytes(tensor.detach().contiguous().view(-1).view(torch.uint8).tolist())


def main():
    torch.set_num_threads(1)
    compat.prepare()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(1234)
    data = torch.Generator().manual_seed(1000 + rank)
    model = shard(Net(dim=128, n_blocks=4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    digest = hashlib.blake2b()
    for _ in range(5):
        x, y = torch.randn(BATCH, IN, generator=data), torch.randn(BATCH, OUT, generator=data)
        loss = ((model(x) - y) ** 2).mean()
        digest.update(raw_bytes(loss))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    for parameter in model.parameters():
        digest.update(raw_bytes(parameter.to_local()))
    stats = sys.modules["fcdp"].stats() if "fcdp" in sys.modules else None
    pathlib.Path(sys.argv[1], f"result{rank}.json").write_text(
        json.dumps({"digest": digest.hexdigest(), "loss": float(loss.detach()), "stats": stats})
    )
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
