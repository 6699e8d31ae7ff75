"""What one rank does alone - another optimizer, another model, an edit, a forward that gathers nothing - and
shard groups of different shapes side by side.  Plain FSDP2 trains through all of it; a rank that asked its
peers on its own would hang."""

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import compat
from cases_basic import adamw
from cases_edit import data_mul, param_mul, raw_scale, scaled_state
from cases_flow import on_gradient
from models import Block, Net, shard, world_mesh
from place import DEVICE
from run import case, reshard_all


class Other:
    """A module of this rank's own, outside of every FSDP model, with an optimizer that steps it."""

    def __init__(self):
        self.module = nn.Linear(3, 3).to(DEVICE)
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=0.1)

    def step(self, *args):
        with torch.enable_grad():
            for p in self.module.parameters():
                p.grad = torch.ones_like(p)
            self.optimizer.step()


def other_optimizer(place):
    def train(run):
        model = shard(Net())
        optimizer = adamw(model)
        other = Other()
        if run.rank == 0 and place == "in_forward":
            for block in model.blocks:
                block.up.register_forward_hook(other.step)
        if run.rank == 0 and place == "in_backward":
            for block in model.blocks:
                on_gradient(block.up, other.step)
        for _ in range(3):
            run.step(model, optimizer, micro_batches=2)
            if place == "before_an_unshard_by_hand":
                if run.rank == 0:
                    other.step()
                for block in model.blocks:
                    block.unshard()
                    run.record("by hand", block.up.weight)
                    block.reshard()
        run.finish(model, optimizer)

    return train


for place in ("in_forward", "in_backward", "before_an_unshard_by_hand"):
    case(other_optimizer(place), name=f"alone_another_optimizer_{place}")


def other_model(place):
    """An FSDP model of a group of one rank, run in a hook on rank 0."""

    def train(run):
        model = shard(Net())
        optimizer = adamw(model)
        group = dist.new_group([0])
        if run.rank == 0:
            small = nn.Sequential(nn.Linear(24, 24), nn.Linear(24, 4))
            mesh = DeviceMesh.from_group(group, DEVICE.type)
            for layer in small:
                fully_shard(layer, mesh=mesh)
            fully_shard(small, mesh=mesh)
            compat.sum_only(small)
            its_optimizer = torch.optim.AdamW(small.parameters(), lr=1e-2)

            def train_it(*args):
                with torch.enable_grad():
                    loss = (small(torch.ones(2, 24, device=DEVICE)) ** 2).mean()
                    loss.backward()
                    its_optimizer.step()
                    its_optimizer.zero_grad()
                run.record("the other's loss", loss)

            def look_at_it(*args):
                with torch.no_grad():
                    run.record("the other's output", small(torch.ones(2, 24, device=DEVICE)))

            for block in model.blocks:
                if place == "in_forward":
                    block.up.register_forward_hook(train_it)
                else:
                    on_gradient(block.up, look_at_it)
        run.train(model, optimizer, steps=3, micro_batches=2)
        run.finish(model, optimizer)
        dist.barrier()

    return train


for place in ("in_forward", "in_backward"):
    case(other_model(place), name=f"alone_another_model_{place}")


@case
def alone_a_forward_that_gathers_nothing(run):
    """All ranks unshard the model; one of them then runs it by itself, before, between and after passes of all."""
    model = shard(Net(), reshard_after_forward=False, root={"reshard_after_forward": False})
    optimizer = adamw(model)
    x = run.randn(6, 11)
    for _ in range(3):
        for module in (model, *model.blocks):
            module.unshard()
        if run.rank == 0:
            with torch.no_grad():
                run.record("alone", model(x))
        loss = run.loss(model)
        if run.rank == 0:
            with torch.no_grad():
                run.record("alone", model(x))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        reshard_all(model)
    run.finish(model, optimizer)


class ExpertBlock(nn.Module):
    """A dense part, and an expert that is another one on every other rank: expert parallelism inside a node of two."""

    def __init__(self, dim, which):
        super().__init__()
        self.dense = Block(dim)
        torch.manual_seed(77 + which)
        self.expert = Block(dim)

    def forward(self, x):
        return self.dense(x) + 0.1 * self.expert(x)


class ExpertNet(Net):
    def __init__(self, which, dim=24, n_blocks=2):
        super().__init__(dim, n_blocks)
        self.blocks = nn.ModuleList(ExpertBlock(dim, which) for _ in range(n_blocks))


def experts(rows, train):
    """`rows`: the shard groups of the experts; rank r's experts are those of its row."""

    def run_it(run):
        groups = [dist.new_group(row) for row in rows]
        mine = next(i for i, row in enumerate(rows) if run.rank in row)
        model = ExpertNet(mine)
        mesh = DeviceMesh.from_group(groups[mine], DEVICE.type)
        for block in model.blocks:
            fully_shard(block.expert, mesh=mesh)
            fully_shard(block.dense, mesh=world_mesh())
        fully_shard(model, mesh=world_mesh(), ignored_params={p for b in model.blocks for p in b.expert.parameters()})
        compat.sum_only(model)
        train(run, model, mine)
        run.finish(model)
        dist.barrier()

    return run_it


def train_all(run, model, mine):
    optimizer = adamw(model)
    for _ in range(3):
        run.step(model, optimizer, micro_batches=2)
        run.evaluate(model)


def step_experts_in_backward(where):
    """Their optimizer steps as soon as gradients are reduced, but only where they got tokens."""

    def train(run, model, mine):
        mine_steps = where(run.rank, mine)
        of_experts = {p for b in model.blocks for p in b.expert.parameters()}
        dense = torch.optim.AdamW([p for p in model.parameters() if p not in of_experts], lr=1e-2)
        for p in of_experts:
            optimizer = torch.optim.AdamW([p], lr=1e-2)

            def hook(p, optimizer=optimizer):
                if mine_steps:
                    optimizer.step()
                optimizer.zero_grad()

            p.register_post_accumulate_grad_hook(hook)
        for _ in range(3):
            run.loss(model).backward()
            dense.step()
            dense.zero_grad()
            run.evaluate(model)

    return train


ONE_RANK_PER_NODE, INSIDE_A_NODE, EVERYWHERE = [[0, 2], [1, 3]], [[0, 1], [2, 3]], [[0, 1, 2, 3]]
case(experts(ONE_RANK_PER_NODE, train_all), name="experts_one_rank_per_node_beside_dense_layers")
case(experts(INSIDE_A_NODE, train_all), name="experts_inside_a_node_beside_dense_layers")
case(
    experts(ONE_RANK_PER_NODE, step_experts_in_backward(lambda rank, mine: mine == 0)),
    name="experts_step_in_backward_in_one_group",
)
case(
    experts(EVERYWHERE, step_experts_in_backward(lambda rank, mine: rank == 0)),
    name="experts_step_in_backward_on_one_rank",
)


def edited_then_unsharded(edit, rank=None):
    """An edit outside of any forward and backward, then an unshard by hand: what it shows has the edit in it."""

    def train(run):
        model = shard(Net())
        optimizer = adamw(model)
        sharded = list(model.parameters())
        for _ in range(2):
            run.step(model, optimizer)
            for place in ("after a step", "after an evaluation", "between forward and backward"):
                loss = None
                if place == "after an evaluation":
                    run.evaluate(model)
                elif place == "between forward and backward":
                    loss = run.loss(model)
                reshard_all(model)
                if rank is None or run.rank == rank:
                    edit(model, sharded)
                for module in (model, *model.blocks):
                    module.unshard()
                for name, p in model.named_parameters():
                    run.record(f"{name} {place}", p)
                reshard_all(model)
                if loss is not None:
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
        run.finish(model, optimizer)

    return train


def load(model, sharded):
    model.load_state_dict(scaled_state(model))


def set_state(model, sharded):
    set_model_state_dict(model, scaled_state(model), options=StateDictOptions(full_state_dict=False))


for name, edit in {"counted": param_mul, "data": data_mul, "raw": raw_scale}.items():
    case(edited_then_unsharded(lambda model, ps, edit=edit: edit(ps)), name=f"edited_then_unsharded_by_hand_{name}")
    if name != "counted":
        case(
            edited_then_unsharded(lambda model, ps, edit=edit: edit(ps), rank=1),
            name=f"alone_edited_then_unsharded_by_hand_{name}",
        )
case(edited_then_unsharded(load), name="edited_then_unsharded_by_hand_load_state_dict")
case(edited_then_unsharded(set_state), name="edited_then_unsharded_by_hand_set_model_state_dict")
