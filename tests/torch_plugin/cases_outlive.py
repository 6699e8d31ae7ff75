"""Tensors that outlive a reshard: what plain FSDP2 raises on must raise, and what it serves must be served."""

import torch
import torch.nn as nn
import torch.nn.functional as F

from models import IN, OUT, Net, TiedLM, shard
from place import DEVICE
from run import Unsupported, case, reshard_all


def needs_raising_storages():
    if not hasattr(torch._C, "_set_storage_data_ptr_access_error_msg"):
        raise Unsupported("this torch cannot make a storage raise")


def outcome(run, tag, use):
    """What a use gives, or what it raises; its text is for the tests of FCDP alone."""
    try:
        run.record(tag, use())
    except Exception as error:
        run.record(tag, f"raised {type(error).__name__}")
        run.extra[tag] = str(error)


def adam(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


class Plainer(nn.Module):
    """Blocks whose backward begins with a matrix product: with an elementwise one plain FSDP2 dies by SIGSEGV."""

    def __init__(self, dim=24):
        super().__init__()
        self.embed = nn.Linear(IN, dim)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(dim, 31), nn.GELU(), nn.Linear(31, dim)) for _ in range(3))
        self.head = nn.Linear(dim, OUT)

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


@case
def backward_of_a_block_left_sharded(run):
    """Its backward needs the weights that its forward resharded."""
    needs_raising_storages()
    model = shard(Plainer())
    run.train(model, adam(model), steps=1)
    model.blocks[1].set_unshard_in_backward(False)
    loss = run.loss(model)
    outcome(run, "backward", loss.backward)
    run.finish(model)


@case
def backward_of_a_root_left_sharded(run):
    """reshard_after_forward is off for the root by default; here it is on, so that its head is sharded when
    backward begins."""
    needs_raising_storages()
    model = shard(Net(), root={"reshard_after_forward": True})
    run.train(model, adam(model), steps=1)
    model.set_unshard_in_backward(False)
    loss = run.loss(model)
    outcome(run, "backward", loss.backward)
    run.finish(model)


@case
def a_block_left_sharded_that_needs_no_weight(run):
    """What set_unshard_in_backward is for: the gradient of the first layer's weight needs its input alone."""
    model = Net()
    model = shard(model, blocks=[model.embed, *model.blocks])
    model.embed.set_unshard_in_backward(False)
    optimizer = adam(model)
    run.train(model, optimizer, steps=3, micro_batches=2)
    run.finish(model, optimizer)


class KeepsItsWeight(nn.Linear):
    """Appends views of the gathered weight to `kept`, a list, while it is gathered."""

    def forward(self, x):
        if getattr(self, "kept", None) is not None:
            self.kept[:] = [
                self.weight,
                self.weight.detach(),
                self.weight.view(-1),
                self.weight.t(),
                self.weight[2:],
                self.weight.data,
            ]
        return super().forward(x)


def net_that_keeps():
    model = Net(dim=24)
    for block in model.blocks:
        block.up = KeepsItsWeight(24, 77)
    return shard(model)


def use_in_every_way(run, tag, kept):
    """As far as plain FSDP2 raises: an elementwise operation on freed storage kills it."""
    ones = torch.ones(1, 77, device=DEVICE)
    outcome(run, f"{tag} mm", lambda: ones @ kept[0])
    outcome(run, f"{tag} linear", lambda: F.linear(torch.ones(1, 24, device=DEVICE), kept[1]))
    outcome(run, f"{tag} tolist", lambda: kept[2].tolist())
    outcome(run, f"{tag} mm of a transposed one", lambda: torch.ones(1, 24, device=DEVICE) @ kept[3])
    outcome(run, f"{tag} mm of rows", lambda: torch.ones(1, 75, device=DEVICE) @ kept[4])
    outcome(run, f"{tag} softmax", lambda: kept[1].softmax(0))
    outcome(run, f"{tag} embedding", lambda: F.embedding(torch.tensor([3], device=DEVICE), kept[5]))
    outcome(run, f"{tag} item", lambda: kept[5][0, 0].item())


@case
def views_that_outlive_a_reshard(run):
    """Used after forward, after backward and after the step they raise; gathered again, they show what is gathered."""
    needs_raising_storages()
    model = net_that_keeps()
    optimizer = adam(model)
    kept = model.blocks[1].up.kept = []
    loss = run.loss(model)
    use_in_every_way(run, "after forward", kept)
    loss.backward()
    use_in_every_way(run, "after backward", kept)
    optimizer.step()
    use_in_every_way(run, "after the step", kept)
    model.blocks[1].unshard()
    use_in_every_way(run, "unsharded by hand", kept)
    model.blocks[1].reshard()
    use_in_every_way(run, "resharded by hand", kept)
    optimizer.zero_grad()
    run.train(model, optimizer)
    run.finish(model, optimizer)


class Doubled(torch.autograd.Function):
    """Saves a view of the weight, which autograd hands back in a backward of its own."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(weight.t())
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        (kept,) = ctx.saved_tensors
        return gradient + 0 * (torch.ones(1, kept.shape[0], device=DEVICE) @ kept).sum(), None


@case
def a_tensor_that_autograd_saved(run):
    """Saved inside of the block, read by a backward that runs while the block is sharded."""
    needs_raising_storages()
    model = net_that_keeps()
    optimizer = adam(model)
    kept = model.blocks[0].up.kept = []
    run.loss(model, tag="first")
    x = torch.ones(3, device=DEVICE, requires_grad=True)
    model.blocks[0].unshard()
    y = Doubled.apply(x, kept[0]).sum()
    run.record("while it is gathered", torch.autograd.grad(y, x, retain_graph=True)[0])
    model.blocks[0].reshard()
    outcome(run, "while it is sharded", lambda: torch.autograd.grad(y, x)[0])
    reshard_all(model)
    run.train(model, optimizer)
    run.finish(model, optimizer)


@case
def an_evaluation_between_the_views_and_their_use(run):
    """Under no_grad, where the gathered parameters are another's view, and with a tied weight, whose storage two
    modules show."""
    needs_raising_storages()
    model = shard(TiedLM())
    optimizer = adam(model)
    kept = []
    model.blocks[0].up.register_forward_hook(lambda module, *_: kept.append(module.weight.t()))
    model.head.register_forward_hook(lambda module, *_: kept.append(module.weight.t()))
    with torch.no_grad():
        run.record("logits", model(run.tokens()))
    outcome(run, "a block's", lambda: torch.ones(1, 24, device=DEVICE) @ kept[0])
    model.reshard()
    outcome(run, "the tied one's", lambda: torch.ones(1, 24, device=DEVICE) @ kept[1])
    for _ in range(2):
        model(run.tokens()).float().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    run.finish(model, optimizer)
