"""One rank of a job on a torch that FCDP may not know: next_torch_job.py RESULT. It trains an FSDP2 and an FSDP1 model,
with FCDP where USE_FCDP is set, and writes what it found to RESULT<RANK>.json. The package fcdp is on PYTHONPATH."""

import hashlib
import json
import os
import sys

import fcdp

if os.environ.get("USE_FCDP"):
    fcdp.enable()

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard


def net():
    torch.manual_seed(0)
    layers = [nn.Linear(64, 64) for _ in range(3)]
    layers[1].requires_grad_(False)
    return nn.Sequential(*layers)


def fsdp2():
    model = net()
    for module in [*model, model]:
        fully_shard(module)
        if hasattr(module, "set_force_sum_reduction_for_comms"):  # gloo has no average
            module.set_force_sum_reduction_for_comms(True)
    return model


def fsdp1():
    return FullyShardedDataParallel(net(), device_id=torch.device("cpu"), use_orig_params=True)


def train(model):
    """A digest of this rank's losses and shards, after each of a few steps."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    seen = hashlib.sha256()
    for step in range(4):
        loss = model(torch.full((2, 64), 0.1 * (1 + step + dist.get_rank()))).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        for tensor in (loss, *model.parameters()):
            local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
            seen.update(bytes(local.detach().reshape(-1).contiguous().view(torch.uint8).tolist()))
    return seen.hexdigest()


def mismatches():
    """What of this torch is not as FCDP knows it, by file."""
    from torch.distributed.fsdp import _flat_param, _runtime_utils
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives, _fsdp_param, _fsdp_param_group, _fsdp_state

    from fcdp import fsdp1 as seam1
    from fcdp import fsdp2 as seam2

    return {
        "fsdp2.py": list(seam2._mismatches(_fsdp_collectives, _fsdp_param_group, _fsdp_param, _fsdp_state)),
        "fsdp1.py": list(seam1._mismatches(_flat_param, _runtime_utils)),
    }


def main():
    torch.set_num_threads(1)
    result = {"torch": torch.__version__, "mismatches": {}}
    if not os.environ.get("USE_FCDP"):
        result["mismatches"] = mismatches()  # of what FCDP has not replaced
    dist.init_process_group("gloo")
    result["digests"] = {"FSDP2": train(fsdp2()), "FSDP1": train(fsdp1())}
    result["stats"] = {key: fcdp.stats()[key] for key in ("bypassed", "gathers")}
    dist.destroy_process_group()
    with open(f"{sys.argv[1]}{os.environ['RANK']}.json", "w") as file:
        json.dump(result, file)


if __name__ == "__main__":
    main()
