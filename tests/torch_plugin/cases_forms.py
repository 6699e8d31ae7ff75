"""Parameters that keep FSDP2's own storages while FCDP gathers them: sharded on another dimension, resharded to fewer
ranks after forward, gathered through extensions.  Other all-gathers than FSDP2's default one."""

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

import compat
from cases_basic import adamw
from cases_edit import local_of
from cases_optim import raw
from models import BF16_COMPUTE, IN, OUT, Net, shard, train_only, world_mesh
from place import DEVICE
from run import Unsupported, case, reshard_all
from subclass import Bf16AllGather, Noisy, OfASubclass, Scaled, extend


class Experts(nn.Module):
    def __init__(self, dim, hidden, n=3):
        super().__init__()
        self.up = nn.Parameter(torch.randn(n, dim, hidden) * 0.2)
        self.down = nn.Parameter(torch.randn(n, hidden, dim) * 0.2)

    def forward(self, x):
        hidden = torch.relu(torch.einsum("bd,edh->ebh", x, self.up))
        return x + torch.einsum("ebh,ehd->bd", hidden, self.down)


class Mixture(nn.Module):
    """Each block's experts are a group of their own, as in torchtitan."""

    def __init__(self, dim=24, hidden=32, n_blocks=3):
        super().__init__()
        self.embed = nn.Linear(IN, dim)
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"norm": nn.LayerNorm(dim), "experts": Experts(dim, hidden)}) for _ in range(n_blocks)
        )
        self.head = nn.Linear(dim, OUT)

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block["experts"](block["norm"](x))
        return self.head(x)


SECOND = {"shard_placement_fn": lambda p: Shard(1)}


def shard_experts(model, **kwargs):
    mesh = world_mesh()
    for block in model.blocks:
        fully_shard(block["experts"], mesh=mesh, **SECOND, **kwargs)
    fully_shard(model, mesh=mesh, **kwargs)
    compat.sum_only(model)
    return model


def experts(freeze=False, **kwargs):
    def train(run):
        model = Mixture()
        if freeze:
            train_only(model, "blocks.2", "head")
        shard_experts(model, **kwargs)
        optimizer = adamw(model)
        sharded = list(model.parameters())
        for _ in range(2):
            run.step(model, optimizer, micro_batches=2)
            run.evaluate(model, n=2)
            run.evaluate(model, mode=torch.inference_mode)
            for p in sharded:
                raw(local_of(p)).mul_(0.875)
            run.evaluate(model)
        run.finish(model)

    return train


case(experts(), name="experts_sharded_along_the_second_dimension")
case(experts(mp_policy=BF16_COMPUTE), name="experts_sharded_along_the_second_dimension_bf16")
case(experts(freeze=True), name="experts_sharded_along_the_second_dimension_frozen")
case(experts(reshard_after_forward=False), name="experts_sharded_along_the_second_dimension_kept_unsharded")


@case
def experts_sharded_along_the_second_dimension_edited_in_forward(run):
    """FSDP2 drops what is written into a gathered parameter at its reshard."""
    model = shard_experts(Mixture())
    optimizer = adamw(model)

    def spoil(module, inputs):
        with torch.no_grad():
            module.up.mul_(0.5)
            raw(module.down).mul_(0.5)

    for block in model.blocks:
        block["experts"].register_forward_pre_hook(spoil)
    for _ in range(2):
        run.step(model, optimizer, micro_batches=2)
        run.evaluate(model)
    run.finish(model)


def small_mesh(between=None, frozen=False, micro_batches=2, root=False, net=Net, mesh=None, **kwargs):
    """`between(run, model, sharded)` is called between forward and backward, while blocks hold the shards that they
    keep among two ranks."""

    def train(run):
        if run.world != 4:
            raise Unsupported("needs 4 ranks")
        model = train_only(net(), "blocks.1.up", "head") if frozen else net()
        roots = {"root": {"reshard_after_forward": 2}} if root else {}
        shard(model, reshard_after_forward=2, mesh=mesh and DeviceMesh(DEVICE.type, mesh), **roots, **kwargs)
        optimizer = adamw(model)
        sharded = list(model.parameters())
        for _ in range(3):
            for _ in range(micro_batches):
                loss = run.loss(model)
                if between:
                    between(run, model, sharded)
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            run.evaluate(model)
        run.finish(model)

    return train


def read(run, model, sharded):
    for name, p in model.named_parameters():
        run.record(f"between {name}", p)
        kept = [str(p.placements), p.device_mesh.mesh.tolist()] if isinstance(p, DTensor) else []
        run.record(f"kept {name}", [tuple(p.shape), *kept])


def edit_kept(run, model, sharded):
    """What FSDP2 gathers in backward are these shards."""
    for p in model.blocks[1].parameters():
        p.to_local().detach().mul_(0.875)
    raw(model.blocks[0].up.weight.to_local()).mul_(0.875)


def edit_sharded(run, model, sharded):
    """They are not read by this backward, but by the next forward."""
    for p in sharded:
        raw(local_of(p)).mul_(0.875)


def reshard_by_hand(run, model, sharded):
    model.blocks[1].reshard()
    for p in model.blocks[1].parameters():
        p.to_local().detach().mul_(0.875)


def save(run, model, sharded):
    for name, value in model.state_dict().items():
        run.record(f"saved {name}", value)


def evaluate(run, model, sharded):
    run.evaluate(model)


def forward_again(run, model, sharded):
    run.loss(model, "dropped loss")


for between in (read, edit_kept, edit_sharded, reshard_by_hand, save, evaluate, forward_again):
    case(small_mesh(between), name=f"reshard_after_forward_2_{between.__name__}")
case(small_mesh(read, root=True), name="reshard_after_forward_2_at_the_root")
case(small_mesh(frozen=True), name="reshard_after_forward_2_frozen")
case(small_mesh(read, mp_policy=BF16_COMPUTE), name="reshard_after_forward_2_bf16")
case(small_mesh(mesh=[0, 2, 1, 3]), name="reshard_after_forward_2_over_the_nodes")
case(
    small_mesh(net=lambda: Net(checkpoint_around="non_reentrant"), micro_batches=1),
    name="reshard_after_forward_2_checkpointed",
)


@case
def reshard_after_forward_2_edited_in_forward(run):
    """Such a write is in the shards that are kept, and so in the backward, but in no later forward."""
    if run.world != 4:
        raise Unsupported("needs 4 ranks")
    model = shard(Net(), reshard_after_forward=2)
    optimizer = adamw(model)

    def spoil(module, inputs):
        with torch.no_grad():
            module.weight.mul_(0.5)

    def spoil_raw(module, inputs):
        raw(module.weight).mul_(0.5)

    for block in model.blocks:
        block.up.register_forward_pre_hook(spoil)
        block.down.register_forward_pre_hook(spoil_raw)
    for _ in range(2):
        run.step(model, optimizer, micro_batches=2)
        run.evaluate(model)
    run.finish(model)


@case
def reshard_after_forward_2_then_true(run):
    model = shard(Net(), reshard_after_forward=2)
    optimizer = adamw(model)
    run.train(model, optimizer, micro_batches=2)
    for keeps in (True, False):
        model.set_reshard_after_forward(keeps)
        run.train(model, optimizer, micro_batches=2)
    run.finish(model)


@case
def two_backwards_after_a_step_between_them_reshard_after_forward_2(run):
    """The second backward's shards are of before the step."""
    model = shard(Net(), reshard_after_forward=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for _ in range(2):
        losses = [run.loss(model), run.loss(model)]
        for loss in losses:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    run.finish(model)


@case
def groups_of_all_forms_in_one_model(run):
    """While one group is gathered, the next ones are begun ahead, but not those that FSDP2 has gathered or keeps."""
    if run.world != 4:
        raise Unsupported("needs 4 ranks")
    model, mesh = Mixture(n_blocks=5), world_mesh()
    forms = ({}, {"reshard_after_forward": 2}, SECOND, SECOND | {"reshard_after_forward": False}, {})
    for block, form in zip(model.blocks, forms):
        fully_shard(block["experts"], mesh=mesh, **form)
    fully_shard(model, mesh=mesh)
    compat.sum_only(model)
    optimizer = adamw(model)
    for keeps in (False, True, False):
        model.set_reshard_after_backward(not keeps)
        run.step(model, optimizer, micro_batches=2)
        run.evaluate(model, n=2)
        run.step(model, optimizer)
        run.evaluate(model)
        reshard_all(model)
    run.finish(model)


def extended(kind=Bf16AllGather, freeze=False, between=None, **kwargs):
    """Tensor subclasses with fsdp_pre_all_gather, as float8 training has: gathered in another dtype."""

    def train(run):
        model = Net(dim=25)  # 80 rows: what an extension gathers must divide evenly
        extend(model.blocks, kind)
        if freeze:
            train_only(model, "blocks.1", "head")
        shard(model, **kwargs)
        optimizer = adamw(model)
        sharded = [block.up.weight for block in model.blocks]
        for _ in range(3):
            for _ in range(2):
                loss = run.loss(model)
                if between:
                    between(run, sharded)
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            run.evaluate(model, n=2)
        run.record("calls", [local_of(p).calls for p in sharded])
        run.finish(model)

    return train


def rescale(run, sharded):
    """What is gathered depends on more than the shard."""
    for p in sharded:
        local_of(p).scale *= 1.25


def rescale_on_one_rank(run, sharded):
    if run.rank == 2:
        rescale(run, sharded)


def edit_raw(run, sharded):
    for p in sharded:
        raw(local_of(p)._data).mul_(0.875)


case(extended(), name="all_gather_extension")
case(extended(freeze=True), name="all_gather_extension_frozen")
case(extended(Scaled), name="all_gather_extension_of_two_tensors")
case(extended(reshard_after_forward=False), name="all_gather_extension_kept_unsharded")
for kind in (Bf16AllGather, Scaled):
    case(extended(kind, between=rescale), name=f"all_gather_extension_{kind.__name__}_scaled_anew")
    case(extended(kind, between=rescale_on_one_rank), name=f"all_gather_extension_{kind.__name__}_scaled_on_one_rank")
    case(extended(kind, between=edit_raw), name=f"all_gather_extension_{kind.__name__}_edited_raw")
case(extended(Noisy), name="all_gather_extension_that_draws_random_numbers")
case(extended(OfASubclass), name="all_gather_extension_that_gathers_a_subclass")


class Doubling:
    """A user's own all-gather, which brings something else than FSDP2's."""

    def allocate(self, size, *, dtype, device):
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, async_op=False):
        work = torch.distributed.all_gather_into_tensor(output_tensor, input_tensor, group=group)
        output_tensor.mul_(0.5)
        return work


@case
def custom_all_gather(run):
    model = shard(Net())
    if not hasattr(model, "set_custom_all_gather"):
        raise Unsupported("this torch has no set_custom_all_gather")
    for module in (model, *model.blocks):
        module.set_custom_all_gather(Doubling())
    run.train(model, adamw(model), micro_batches=2)
    run.finish(model)


@case
def all_gather_into_the_process_groups_memory(run):
    """FSDP2's own all-gather, into buffers that the process group allocates if it can."""
    model = shard(Net())
    if not hasattr(model, "set_allocate_memory_from_process_group_for_comm"):
        raise Unsupported("this torch has no set_allocate_memory_from_process_group_for_comm")
    for module in (model, *model.blocks):
        module.set_allocate_memory_from_process_group_for_comm(True)
    run.train(model, adamw(model), micro_batches=2)
    run.finish(model)
