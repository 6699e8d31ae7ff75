"""What programs use of torch's own beside FSDP while they train."""

import copy
import os
import tempfile
import threading

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
import torch.nn.utils.prune
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed import checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from cases_basic import adamw
from cases_edit import local_of
from models import Net, TiedLM, shard, train_only, trainable
from place import DEVICE
from run import case, reshard_all


def parametrized(register):
    def train(run):
        model = Net()
        for block in model.blocks:
            register(block)
        shard(model)
        optimizer = adamw(model)
        run.train(model, optimizer, steps=3)
        run.evaluate(model)
        run.train(model, optimizer)
        run.finish(model, optimizer)

    return train


def weight_norm(block):
    nn.utils.parametrizations.weight_norm(block.up)


def spectral_norm(block):
    nn.utils.parametrizations.spectral_norm(block.down)


def old_weight_norm(block):
    nn.utils.weight_norm(block.up)


def pruned(block):
    nn.utils.prune.random_unstructured(block.up, "weight", amount=0.3)


for register in (weight_norm, spectral_norm, old_weight_norm, pruned):
    case(parametrized(register), name=f"under_{register.__name__}")


def scaled(kind):
    """Two of six steps are skipped: an optimizer that steps and changes nothing, or is not called."""

    def train(run):
        model = shard(Net(), mp_policy=MixedPrecisionPolicy(torch.float16, torch.float32))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=kind == "fused", foreach=kind == "foreach")
        scaler = torch.amp.GradScaler(DEVICE.type, init_scale=2.0**10, growth_interval=2)
        for step in range(6):
            x, y = run.batch()
            loss = (model(x).float() - y).square().mean()
            run.record("loss", loss)
            if step in (1, 4):
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        run.finish(model, optimizer)

    return train


for kind in ("fused", "foreach", "loop"):
    case(scaled(kind), name=f"scaled_with_skipped_steps_{kind}")


@case
def tensor_parallel_blocks(run):
    mesh = init_device_mesh(DEVICE.type, (2, 2), mesh_dim_names=("dp", "tp"))
    model = Net(dim=24)
    for block in model.blocks:
        block.up, block.down = nn.Linear(24, 64), nn.Linear(64, 24)
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    for block in model.blocks:
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    run.train(model, optimizer, steps=3)
    run.evaluate(model)
    run.train(model, optimizer, micro_batches=2)
    run.finish(model, optimizer)


@case
def saved_asynchronously_while_training(run):
    model = shard(Net())
    optimizer = adamw(model)
    run.train(model, optimizer)
    group = dist.new_group(backend="gloo")
    folder = [tempfile.mkdtemp() if run.rank == 0 else None]
    dist.broadcast_object_list(folder, group=group)
    future = dcp.async_save({"model": model.state_dict()}, checkpoint_id=folder[0], process_group=group)
    run.train(model, optimizer)
    future.result()
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=folder[0], process_group=group)
    model.load_state_dict(state["model"])
    run.train(model, optimizer)
    run.finish(model, optimizer)


@case
def selective_checkpointing(run):
    class Saves(Net):
        def forward(self, x):
            x = self.embed(x)
            for block in self.blocks:
                x = checkpoint(
                    block,
                    x,
                    use_reentrant=False,
                    context_fn=lambda: create_selective_checkpoint_contexts(
                        lambda ctx, op, *args, **kwargs: (
                            CheckpointPolicy.MUST_SAVE
                            if op is torch.ops.aten.addmm.default
                            else CheckpointPolicy.PREFER_RECOMPUTE
                        )
                    ),
                )
            return self.head(x)

    model = shard(Saves())
    optimizer = adamw(model)
    run.train(model, optimizer, steps=3)
    run.finish(model, optimizer)


@case
def gradient_penalty(run):
    model = shard(Net(), reshard_after_forward=False, root={"reshard_after_forward": False})
    model.set_reshard_after_backward(False)
    optimizer = adamw(model)
    for _ in range(3):
        x, y = run.batch()
        x.requires_grad_()
        out = model(x)
        (gradient,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        loss = (out - y).square().mean() + gradient.square().mean()
        run.record("loss", loss)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        reshard_all(model)
    run.finish(model, optimizer)


@case
def parameters_of_odd_dtypes(run):
    class Odd(Net):
        def __init__(self):
            super().__init__()
            self.flags = nn.Parameter(torch.arange(17) % 3 == 0, requires_grad=False)
            self.small = nn.Parameter(torch.randn(9).to(torch.float8_e4m3fn), requires_grad=False)
            self.count = nn.Parameter(torch.arange(21), requires_grad=False)

        def forward(self, x):
            extra = self.flags.sum() + self.small.float().sum() + 0.01 * self.count.sum()
            return super().forward(x) + extra

    model = shard(Odd())
    optimizer = torch.optim.SGD(trainable(model), lr=0.01)
    run.train(model, optimizer)
    with torch.no_grad():
        local_of(model.count).add_(1)
        local_of(model.flags).logical_not_()
    run.train(model, optimizer)
    run.finish(model, optimizer)


@case
def loaded_from_a_mapped_file(run):
    model = shard(Net())
    optimizer = adamw(model)
    run.train(model, optimizer)
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "state")
        torch.save({k: v.to_local() for k, v in model.state_dict().items()}, path)
        run.train(model, optimizer)
        loaded = torch.load(path, mmap=True)
        own = model.state_dict()
        made = {
            k: DTensor.from_local(v, own[k].device_mesh, own[k].placements, shape=own[k].shape, stride=own[k].stride())
            for k, v in loaded.items()
        }
        model.load_state_dict(made, assign=True)
        run.evaluate(model)
    run.train(model, adamw(model))
    run.finish(model)


@case
def adapters_merged_and_taken_out(run):
    model = Net(lora=4)
    train_only(model, "lora")
    shard(model)
    optimizer = adamw(model)
    run.train(model, optimizer)
    for _ in range(2):
        deltas = [(b.lora_b.weight.full_tensor() @ b.lora_a.weight.full_tensor()).sum() * 1e-3 for b in model.blocks]
        with torch.no_grad():
            for block, delta in zip(model.blocks, deltas):
                local_of(block.down.weight).add_(delta.item())
        run.evaluate(model)
        with torch.no_grad():
            for block, delta in zip(model.blocks, deltas):
                local_of(block.down.weight).sub_(delta.item())
        run.train(model, optimizer)
    run.finish(model, optimizer)


@case
def generates_token_by_token(run):
    model = shard(TiedLM(), blocks=None)
    optimizer = adamw(model)

    def train():
        tokens = run.tokens()
        loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        run.record("loss", loss)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(2):
        train()
        tokens = run.tokens()
        with torch.no_grad():
            for _ in range(5):
                tokens = torch.cat([tokens, model(tokens)[:, -1:].argmax(-1)], dim=1)
        run.record("tokens", tokens)
    train()
    run.finish(model, optimizer)


@case
def shards_in_one_flat_buffer(run):
    model = shard(Net())
    locals_ = [local_of(p) for p in model.parameters()]
    flat = torch.cat([t.flatten() for t in locals_])
    at = 0
    for t in locals_:
        t.data = flat[at : at + t.numel()].view_as(t)
        at += t.numel()
    for p, t in zip(model.parameters(), locals_):
        p._local_tensor.data = t.data
    for _ in range(3):
        run.loss(model).backward()
        grads = torch.cat([p.grad._local_tensor.flatten() for p in model.parameters()])
        flat.sub_(0.05 * grads)
        model.zero_grad()
    run.finish(model)


@case
def a_model_of_fake_tensors_in_mid_run(run):
    """As tools that estimate memory make one, with an optimizer that the hooks on all optimizers see."""
    model = shard(Net())
    optimizer = adamw(model)
    run.train(model, optimizer)
    with FakeTensorMode():
        fake = Net()
        fake(torch.randn(3, 11)).sum().backward()
        torch.optim.SGD(fake.parameters(), lr=0.1).step()
    run.train(model, optimizer)
    run.finish(model, optimizer)


@case
def weights_clipped_behind_each_step(run):
    model = shard(Net())
    optimizer = adamw(model)

    def clip(*_):
        with torch.no_grad():
            torch._foreach_clamp_max_([local_of(p) for p in model.parameters()], 0.05)

    optimizer.register_step_post_hook(clip)
    run.train(model, optimizer, steps=3)
    run.finish(model, optimizer)


@case
def vectors_to_parameters(run):
    model = shard(Net())
    optimizer = adamw(model)
    for _ in range(2):
        run.train(model, optimizer)
        locals_ = [local_of(p) for p in model.parameters()]
        vector = nn.utils.parameters_to_vector(locals_)
        nn.utils.vector_to_parameters(vector * 0.99, locals_)
        run.evaluate(model)
    run.finish(model, optimizer)


@case
def an_average_beside_its_model(run):
    model = shard(Net())
    average = shard(Net())
    average.load_state_dict(model.state_dict())
    optimizer = adamw(model)
    for _ in range(3):
        run.train(model, optimizer)
        reshard_all(model)
        reshard_all(average)
        with torch.no_grad():
            torch._foreach_lerp_(
                [local_of(p) for p in average.parameters()], [local_of(p) for p in model.parameters()], 0.5
            )
        run.evaluate(average)
    run.finish(average)


@case
def muon_like(run):
    model = shard(Net())
    for _ in range(3):
        run.loss(model).backward()
        with torch.no_grad():
            for p in model.parameters():
                g = p.grad.full_tensor()
                if g.dim() == 2:
                    g = torch.linalg.qr(g)[0] if g.shape[0] >= g.shape[1] else torch.linalg.qr(g.T)[0].T
                update = distribute_tensor(g.contiguous(), p.device_mesh, p.placements)
                p.add_(update, alpha=-0.02)
                p.grad = None
    run.finish(model)


@case
def forward_and_backward_on_other_threads(run):
    model = shard(Net())
    optimizer = adamw(model)
    for _ in range(3):
        worker = threading.Thread(target=lambda: run.loss(model).backward())
        worker.start()
        worker.join()
        optimizer.step()
        optimizer.zero_grad()
    run.finish(model, optimizer)


@case
def tensors_saved_to_the_cpu(run):
    model = shard(Net())
    optimizer = adamw(model)
    for _ in range(3):
        with torch.autograd.graph.save_on_cpu(pin_memory=False):
            loss = run.loss(model)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    run.finish(model, optimizer)


@case
def a_deep_copy_trains_beside(run):
    model = Net()
    other = copy.deepcopy(model)
    shard(model)
    shard(other)
    a, b = adamw(model), adamw(other)
    for _ in range(2):
        run.step(model, a)
        run.step(other, b)
    other.load_state_dict(model.state_dict())
    run.evaluate(other)
    run.finish(other)
