"""One rank of a job of a framework: runs a script as it is, and writes down what must be the same with FCDP as without
it. The loss of every backward, and after every optimizer step the bytes of all parameters (frozen ones too), of their
gradients and of the optimizer's state. Beside that: which FSDP shards the model, and fcdp.stats().

rank.py --out FOLDER SCRIPT [ARGUMENTS]: the script runs in FOLDER, as the main program, and finds examples/."""

import argparse
import datetime
import faulthandler
import gc
import hashlib
import json
import os
import pathlib
import runpy
import signal
import sys
import weakref

faulthandler.register(signal.SIGUSR1, all_threads=True)  # first: unregistered, the signal would end the process

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook

EXAMPLES = pathlib.Path(__file__).resolve().parents[2] / "examples"
FLIGHT_TIMEOUT_S = 180


def digest(value):
    """Of a tensor's local bytes, its type and its shape; of anything else, of what it prints as."""
    value = getattr(value, "_local_tensor", value)
    if not isinstance(value, torch.Tensor):
        return repr(value)
    if hasattr(value, "__tensor_flatten__"):  # a subclass: of what it holds
        return repr([digest(getattr(value, name)) for name in value.__tensor_flatten__()[0]])
    data = value.detach().cpu().contiguous().flatten().view(torch.uint8)
    return hashlib.sha256(f"{value.dtype}{tuple(value.shape)}".encode() + data.numpy().tobytes()).hexdigest()


class Record:
    """`steps`: what every optimizer step left behind. `model`: how all that is sharded is, looked at when an optimizer has
    first stepped; models that were found live on. `stats`: of FCDP, after the last step."""

    def __init__(self):
        self.losses, self.steps, self.model, self.stats = [], [], None, None
        self.roots, self.known = [], weakref.WeakSet()

    def watch(self):
        backward = torch.autograd.backward

        def recorded(tensors, *args, **kwargs):
            for tensor in [tensors] if isinstance(tensors, torch.Tensor) else tensors:
                if isinstance(tensor, torch.Tensor):  # a pipeline's stage may give the edge of a graph
                    self.losses.append([digest(tensor), float(tensor.detach().double().sum())])
            return backward(tensors, *args, **kwargs)

        torch.autograd.backward = recorded
        register_optimizer_step_post_hook(self.after_step)

    def look(self):
        """The roots are the sharded modules that are in no other one."""
        gc.collect()
        modules = [o for o in gc.get_objects() if issubclass(type(o), torch.nn.Module)]
        sharded = [m for m in modules if isinstance(m, (FSDPModule, FullyShardedDataParallel))]
        inner = {id(c) for m in sharded for c in m.modules() if c is not m}
        self.roots = [m for m in sharded if id(m) not in inner]
        self.model = {
            "fsdp2": sum(type(o).__name__ == "FSDPParamGroup" and bool(o.fsdp_params) for o in gc.get_objects()),
            "fsdp1": sum(isinstance(m, FullyShardedDataParallel) and m._handle is not None for m in modules),
            "ddp": sum(isinstance(m, DistributedDataParallel) for m in modules),
            "frozen": sum(not p.requires_grad for root in self.roots for p in root.parameters()),
        }

    def after_step(self, optimizer, args, kwargs):
        if optimizer not in self.known:
            self.known.add(optimizer)
            self.look()
        seen = {}
        for root in self.roots:
            for name, parameter in root.named_parameters():  # models may be of one kind, and come in any order
                seen[f"parameter {name}"] = sorted([*seen.get(f"parameter {name}", []), digest(parameter)])
        for i, parameter in enumerate(p for group in optimizer.param_groups for p in group["params"]):
            seen[f"gradient {i}"] = digest(parameter.grad)
            for key, value in optimizer.state.get(parameter, {}).items():
                seen[f"optimizer {i} {key}"] = digest(value)
        self.steps.append(seen)
        if "fcdp" in sys.modules:
            self.stats = sys.modules["fcdp"].stats()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True, type=pathlib.Path)
    parser.add_argument("script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    arguments = parser.parse_args()
    os.chdir(arguments.out)
    torch.set_num_threads(1)
    dist.distributed_c10d.default_pg_timeout = datetime.timedelta(seconds=FLIGHT_TIMEOUT_S)
    record = Record()
    record.watch()
    sys.argv = [arguments.script, *arguments.arguments]
    sys.path[0] = str(pathlib.Path(arguments.script).parent)
    sys.path.append(str(EXAMPLES))
    runpy.run_path(arguments.script, run_name="__main__")
    out = {
        "modules": sorted(m for m in sys.modules if m.split(".")[0] == "fcdp"),
        "losses": record.losses,
        "steps": record.steps,
        "model": record.model,
        "stats": record.stats,
        "end": sys.modules["fcdp"].stats() if "fcdp" in sys.modules else None,
    }
    path = pathlib.Path(f"rank{os.environ['RANK']}.json")
    path.with_suffix(".part").write_text(json.dumps(out))
    path.with_suffix(".part").rename(path)


if __name__ == "__main__":
    main()
