"""What programs do around training with tools of torch's own: parameters and optimizers are pickled and copied, a default
device is set.  Both FSDPs."""

import contextlib
import copy
import io
import pickle
import pickletools
import re
import zipfile

import torch
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import StateDictType
from torch.distributed.tensor import DTensor

from cases_basic import adamw
from models import Net, shard, train_only, trainable, wrap
from run import case, reshard_all


def outcome(run, tag, make):
    """What it makes, or the kind of the error that it raises."""
    try:
        made = make()
    except Exception as error:
        run.record(tag, f"raised {type(error).__name__}")
        run.extra[tag] = str(error)
        return None
    run.record(tag, "made")
    return made


ADDRESS = re.compile(rb"(?<!\d)\d{7,16}(?!\d)")  # of a storage, by which a pickle names it, is longer on some threads


def saved(thing, save=torch.save):
    buffer = io.BytesIO()
    save(thing, buffer)
    return buffer


def size_of(part, is_pickle):
    """But for numbers that are a process's own: addresses, and the hashes of DTensors' specs and meshes, of which each
    256th is a byte shorter than the others."""
    hashes = [n for code, n, _ in pickletools.genops(part) if code.name == "LONG1"] if is_pickle else []
    return len(ADDRESS.sub(b"address", part)) - sum(len(pickle.encode_long(n)) for n in hashes)


def sizes_in(buffer):
    """Of what is in the file, without its names and what aligns it: both depend on how long an address is."""
    if not zipfile.is_zipfile(buffer):
        return [size_of(buffer.getvalue(), is_pickle=True)]
    with zipfile.ZipFile(buffer) as archive:
        return [size_of(archive.read(name), is_pickle=name.endswith(".pkl")) for name in archive.namelist()]


def record_pickled(run, tag, thing, save=torch.save):
    """As many bytes as plain FSDP writes, and what comes back."""
    buffer = outcome(run, tag, lambda: saved(thing, save))
    if buffer is None:
        return
    run.record(f"{tag}: bytes", sizes_in(buffer))
    buffer.seek(0)
    back = outcome(
        run,
        f"{tag}, back",
        lambda: torch.load(buffer, weights_only=False) if save is torch.save else pickle.load(buffer),
    )
    for name, value in back.items() if isinstance(back, dict) else ():
        run.record(f"{tag} {name}", value)
        if isinstance(value, torch.Tensor):
            run.record(f"{tag} {name} is", (type(value).__name__, value.requires_grad, sorted(vars(value))))


def record_copied(run, tag, thing):
    back = outcome(run, f"{tag} copied", lambda: copy.deepcopy(thing))
    for name, value in back.items() if isinstance(back, dict) else ():
        run.record(f"{tag} {name} copied", value)
        run.record(f"{tag} {name} copied has", sorted(vars(value)))


def pickled(make):
    """Before the first forward, behind a backward, and behind a step."""

    def train(run):
        model = make()
        optimizer = adamw(model)

        def look(when):
            parameters = dict(model.named_parameters())
            record_pickled(run, f"{when}: parameters", parameters)
            record_pickled(run, f"{when}: parameters", parameters, pickle.dump)
            record_copied(run, f"{when}: parameters", parameters)
            record_pickled(run, f"{when}: optimizer", optimizer)
            record_copied(run, f"{when}: optimizer", optimizer)
            record_copied(run, f"{when}: model", model)
            local = FSDP.state_dict_type(model, StateDictType.LOCAL_STATE_DICT) if isinstance(model, FSDP) else None
            with local or contextlib.nullcontext():
                state = outcome(run, f"{when}: state", lambda: model.state_dict(keep_vars=True))
            if not isinstance(model, FSDP):
                record_pickled(run, f"{when}: state", state)
            run.record(f"{when}: attributes", [(name, sorted(vars(p))) for name, p in model.named_parameters()])

        look("at first")
        for _ in range(2):
            run.loss(model).backward()
            reshard_all(model)
            look("behind a backward")
            optimizer.step()
            optimizer.zero_grad()
            look("behind a step")
        run.finish(model, optimizer)

    return train


case(pickled(lambda: shard(train_only(Net(n_blocks=2, lora=2), "lora_", "head"))), name="parameters_are_pickled")
for use_orig_params in (False, True):
    case(
        pickled(lambda use=use_orig_params: wrap(Net(n_blocks=2), use_orig_params=use)),
        name="fsdp1_parameters_are_pickled" + ("_with_orig_params" if use_orig_params else ""),
    )


@contextlib.contextmanager
def default_device(device):
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)


class Quiet:
    """A run whose data is made while no default device is set."""

    def __init__(self, run, n):
        self.batches = [run.batch() for _ in range(n)]
        self.run = run

    def loss(self, model):
        x, y = self.batches.pop()
        loss = ((model(x).float() - y) ** 2).mean()
        self.run.record("loss", loss)
        return loss


def with_default_device(make, first):
    """Around the first forward, or all but that."""

    def train(run):
        model, data = make(), Quiet(run, 4)
        optimizer = torch.optim.SGD(trainable(model), lr=0.1)
        for step in range(4):
            with default_device("meta") if first or step else contextlib.nullcontext():
                data.loss(model).backward()
                optimizer.step()
                optimizer.zero_grad()
                for p in model.parameters() if step % 2 else ():
                    if isinstance(p, DTensor):
                        with torch.no_grad():
                            run.record("whole", p.full_tensor())
        run.finish(model)

    return train


for first in (True, False):
    suffix = "from_the_first_forward_on" if first else "behind_the_first_forward"
    case(with_default_device(lambda: shard(Net()), first), name=f"a_default_device_{suffix}")
    case(with_default_device(lambda: wrap(Net()), first), name=f"fsdp1_a_default_device_{suffix}")
