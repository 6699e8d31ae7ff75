"""How a model is cut and where it lies: nesting, meshes, placements, tensor subclasses, meta init, compile, other
models beside it, other modes of torch around it."""

import contextlib

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.utils.flop_counter import FlopCounterMode

import compat
from cases_basic import adamw
from models import BF16_COMPUTE, Block, Net, shard, train_only, world_mesh
from place import DEVICE
from run import Unsupported, case, collect, reshard_all


@case
def nested_groups(run):
    model = Net()
    mesh = world_mesh()
    for block in model.blocks:
        fully_shard(block.up, mesh=mesh)
        fully_shard(block.down, mesh=mesh)
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    compat.sum_only(model)
    optimizer = adamw(model)
    for _ in range(2):
        run.step(model, optimizer, micro_batches=2)
        run.evaluate(model)
    run.finish(model)


@case
def nested_groups_checkpointed(run):
    model = Net(checkpoint_around="non_reentrant")
    mesh = world_mesh()
    for block in model.blocks:
        fully_shard(block.up, mesh=mesh)
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    compat.sum_only(model)
    run.train(model, adamw(model))
    run.finish(model)


def in_parts(frozen=False, checkpointed=False, **kwargs):
    """fcdp.split(): of two layers, each part is a group of its own."""

    def train(run):
        import fcdp

        model = Net(checkpoint_around="non_reentrant" if checkpointed else None)
        if frozen:
            train_only(model, "blocks.2")
        layers = [model.blocks[0].up, model.blocks[2].down, model.head]
        for part in (part for layer in layers for part in fcdp.split(layer, 3)):
            fully_shard(part, mesh=world_mesh(), **kwargs)
        shard(model, **kwargs)
        optimizer = adamw(model)
        for _ in range(2):
            run.step(model, optimizer, micro_batches=2)
            run.evaluate(model)
            model.load_state_dict(model.state_dict())
        run.finish(model, optimizer)

    return train


case(in_parts(), name="linear_layers_in_parts")
case(in_parts(frozen=True, mp_policy=BF16_COMPUTE), name="linear_layers_in_parts_frozen_bf16")
case(in_parts(checkpointed=True), name="linear_layers_in_parts_checkpointed")


@case
def one_group_in_all(run):
    model = Net()
    fully_shard(model, mesh=world_mesh())
    compat.sum_only(model)
    optimizer = adamw(model)
    for _ in range(2):
        run.step(model, optimizer, micro_batches=2)
        run.evaluate(model)
    run.finish(model)


@case
def groups_without_parameters(run):
    model = Net()
    model.blocks.insert(1, nn.Dropout(0.1))
    model.order = [0, 1, 2, 3]
    shard(model)
    run.train(model, adamw(model))
    run.finish(model)


@case
def tiny_parameters(run):
    """Groups of fewer elements than ranks: most shards are empty, and a slice holds several parameters."""
    model = nn.Sequential(*(nn.Linear(n, n + 1) for n in (1, 2, 3, 4)))
    for layer in model:
        fully_shard(layer, mesh=world_mesh())
    fully_shard(model, mesh=world_mesh())
    compat.sum_only(model)
    optimizer = adamw(model)
    for _ in range(4):
        x = run.randn(3, 1)
        loss = (model(x) ** 2).mean()
        run.record("loss", loss)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    run.finish(model)


@case
def parameter_without_elements(run):
    model = Net()
    for block in model.blocks:
        block.nothing = nn.Parameter(torch.empty(0, 7))
    shard(model)
    run.train(model, adamw(model))
    run.finish(model)


@case
def parameters_of_many_dimensions(run):
    class Conv(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 7, 3, padding=1)
            self.norm = nn.BatchNorm2d(7)
            self.back = nn.ConvTranspose2d(7, 3, 3, padding=1)

        def forward(self, x):
            return x + self.back(torch.relu(self.norm(self.conv(x))))

    model = nn.Sequential(Conv(), Conv())
    for layer in model:
        fully_shard(layer, mesh=world_mesh())
    fully_shard(model, mesh=world_mesh())
    compat.sum_only(model)
    optimizer = adamw(model)
    for _ in range(2):
        loss = (model(run.randn(2, 3, 5, 5)) ** 2).mean()
        run.record("loss", loss)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    run.finish(model)


@case
def double_precision(run):
    model = shard(Net().double())
    optimizer = adamw(model)
    for _ in range(2):
        x, y = run.batch(torch.float64)
        loss = ((model(x) - y) ** 2).mean()
        run.record("loss", loss)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    run.finish(model)


@case
def sharded_along_the_second_dimension(run):
    model = Net(dim=24)

    def placement(parameter):
        return Shard(1) if parameter.ndim == 2 and parameter.shape[1] % 4 == 0 else None

    shard(model, shard_placement_fn=placement)
    optimizer = adamw(model)
    run.train(model, optimizer, micro_batches=2)
    run.finish(model)


def hybrid(rows):
    """HSDP over a given arrangement of the ranks: rows are shard groups, columns replicate."""

    def train(run):
        if run.world != 4:
            raise Unsupported("needs 4 ranks")
        mesh = DeviceMesh(DEVICE.type, torch.tensor(rows), mesh_dim_names=("replicate", "shard"))
        model = shard(Net(), mesh=mesh)
        optimizer = adamw(model)
        for _ in range(2):
            run.step(model, optimizer, micro_batches=2)
            run.evaluate(model)
        run.finish(model)

    return train


case(hybrid([[0, 1], [2, 3]]), name="hsdp_sharded_inside_the_nodes")
case(hybrid([[0, 2], [1, 3]]), name="hsdp_sharded_across_the_nodes")


@case
def mesh_in_another_order(run):
    """The shard group's ranks alternate between the nodes: a node's blocks are not contiguous in it."""
    if run.world != 4:
        raise Unsupported("needs 4 ranks")
    model = shard(Net(), mesh=DeviceMesh(DEVICE.type, [0, 2, 1, 3]))
    run.train(model, adamw(model), micro_batches=2)
    run.finish(model)


@case
def mesh_of_half_of_the_ranks(run):
    """Two models, each on two ranks of different nodes, train at a different pace."""
    if run.world != 4:
        raise Unsupported("needs 4 ranks")
    mesh = init_device_mesh(DEVICE.type, (2, 2), mesh_dim_names=("a", "b"))["a"]
    model = shard(Net(), mesh=mesh)
    optimizer = adamw(model)
    run.train(model, optimizer, steps=2 + run.rank % 2)
    run.finish(model)


@case
def parameters_offloaded_to_cpu(run):
    model = shard(Net(), offload_policy=CPUOffloadPolicy(pin_memory=False))
    run.train(model, adamw(model), micro_batches=2)
    run.finish(model)


@case
def ignored_parameters(run):
    model = Net().to(DEVICE)  # FSDP2 moves no others than its own
    ignored = {p for b in model.blocks for p in b.norm.parameters()}
    for p in ignored:
        p.requires_grad_(False)
    mesh = world_mesh()
    try:
        for block in model.blocks:
            fully_shard(block, mesh=mesh, ignored_params=ignored)
        fully_shard(model, mesh=mesh, ignored_params=ignored)
    except TypeError as error:
        raise Unsupported(str(error)) from None
    compat.sum_only(model)
    run.train(model, adamw(model))
    run.finish(model)


@case
def built_on_meta(run):
    with torch.device("meta"):
        model = Net()
    shard(model)
    model.to_empty(device=DEVICE)
    with torch.no_grad():
        for p in model.parameters():
            local = p.to_local()
            local.copy_(run.randn(*local.shape) * 0.2)
    run.train(model, adamw(model))
    run.finish(model)


@case
def materialized_again_in_mid_run(run):
    """_apply gives every parameter a new tensor."""
    model = shard(Net())
    run.train(model, adamw(model), steps=2)
    model._apply(lambda t: t.clone())
    run.evaluate(model)
    model._apply(lambda t: t * 0.875)
    run.train(model, adamw(model), steps=2)
    run.finish(model)


@case
def teacher_beside_a_student(run):
    student, teacher = shard(Net()), shard(train_only(Net(dim=16), "nothing"))
    optimizer = adamw(student)
    for _ in range(2):
        x, y = run.batch()
        with torch.no_grad():
            target = teacher(x)
        loss = ((student(x) - target - y) ** 2).mean()
        run.record("loss", loss)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    run.finish(student)


@case
def teacher_inside_of_the_students_forward(run):
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.student = Net()
            self.teacher = [shard(train_only(Net(dim=16), "nothing"))]  # no submodule, and so no part of the tree

        def forward(self, x):
            with torch.no_grad():
                target = self.teacher[0](x)
            return self.student(x) - target

    model = Both()
    shard(model, blocks=model.student.blocks)
    optimizer = adamw(model)
    run.train(model, optimizer)
    run.finish(model)


@case
def model_deleted_and_made_again(run):
    """New parameters come to lie, and to be counted, where the dead ones were."""
    for dim in (24, 24, 16):
        model = shard(Net(dim=dim))
        optimizer = adamw(model)
        run.train(model, optimizer, steps=2)
        run.evaluate(model)
        run.finish(model)
        del model, optimizer
        collect()


@case
def optimizer_made_again(run):
    model = shard(Net())
    for _ in range(2):
        optimizer = adamw(model)
        run.train(model, optimizer, steps=1)
        del optimizer
        collect()
        run.evaluate(model)
    run.finish(model)


def compiled(what, backend="aot_eager", fullgraph=False, first=False):
    """`first`: compiled before it is sharded, which is how frameworks do it. What dynamo compiled, and where it
    broke off, is part of what must be equal."""

    def compile_it(model):
        if what == "whole":
            return torch.compile(model, backend=backend, fullgraph=fullgraph)
        for part in {"blocks": model.blocks, "inside": [b.up for b in model.blocks], "in_place": [model]}[what]:
            part.compile(backend=backend, fullgraph=fullgraph)
        return model

    def train(run):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        model = Net(dim=16, n_blocks=2)
        if first:
            compile_it(model)
        shard(model)
        runs = model if first else compile_it(model)
        optimizer = adamw(model)
        run.train(runs, optimizer, steps=2)
        run.evaluate(runs)
        run.train(runs, optimizer, steps=1)
        run.finish(model)
        counters = torch._dynamo.utils.counters
        run.record("dynamo's frames", sorted(counters["frames"].items()))
        run.record("dynamo's graphs", sorted(counters["stats"].items()))
        run.record("dynamo's breaks", sorted(counters["graph_break"].items()))
        torch._dynamo.reset()

    return train


case(compiled("blocks"), name="compiled_blocks_aot_eager")
case(compiled("inside", backend="eager"), name="compiled_inside_of_blocks")
case(compiled("blocks", fullgraph=True, first=True), name="compiled_blocks_fullgraph_before_sharding")
case(compiled("blocks", first=True), name="compiled_blocks_before_sharding")
case(compiled("in_place"), name="compiled_in_place")
case(compiled("in_place", first=True), name="compiled_in_place_before_sharding")
case(compiled("whole"), name="compiled_whole_model")


@contextlib.contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def counting_flops(run):
    counter = FlopCounterMode(display=False)
    with counter:
        yield
    run.record("flops", counter.get_total_flops())


def inside(context):
    def train(run):
        model = shard(Net(n_blocks=2))
        optimizer = adamw(model)
        for _ in range(2):
            with context(run):
                loss = run.loss(model)
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        run.finish(model)

    return train


CONTEXTS = {
    "default_dtype_bfloat16": lambda run: default_dtype(torch.bfloat16),
    "device_context": lambda run: DEVICE,
    "flop_counter": counting_flops,
    "anomaly_mode": lambda run: torch.autograd.set_detect_anomaly(True),
    "saved_tensors_copied": lambda run: torch.autograd.graph.save_on_cpu(pin_memory=False),
    "saved_tensors_cloned": lambda run: torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t),
    "deterministic": lambda run: deterministic(),
    "autocast": lambda run: torch.autocast(DEVICE.type, torch.bfloat16),
    "profiler": lambda run: torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]),
}


@contextlib.contextmanager
def deterministic():
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


for name, context in CONTEXTS.items():
    case(inside(context), name=f"inside_{name}")


@case
def collectives_of_the_users_own(run):
    """A script's own collectives stand between FSDP2's, in the middle of forward and backward."""
    model = shard(Net())
    optimizer = adamw(model)

    def sum_up(tensor):
        total = tensor.detach().clone()
        dist.all_reduce(total)
        return total

    model.blocks[1].register_forward_hook(lambda module, inputs, output: output - sum_up(output).mean())
    for _ in range(2):
        loss = run.loss(model)
        run.record("mean", sum_up(loss))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        dist.barrier()
    run.finish(model)


@case
def ranks_of_uneven_speed(run):
    """One rank does far more of its own work between the collectives: nothing may depend on which rank comes first."""
    model = shard(Net())
    optimizer = adamw(model)
    x = run.randn(300, 300)

    def work(module, inputs):
        for _ in range(4):
            torch.mm(x, x)

    if run.rank == 1:
        for block in model.blocks:
            block.up.register_forward_pre_hook(work)
    run.train(model, optimizer, micro_batches=2)
    reshard_all(model)
    run.finish(model)


@case
def new_block_put_in_mid_run(run):
    """The model is built anew around old blocks: groups come and go."""
    model = shard(Net())
    run.train(model, adamw(model), steps=2)
    state = {k: v.full_tensor() for k, v in model.state_dict().items()}
    torch.manual_seed(99)
    grown = Net(n_blocks=4)
    grown.load_state_dict(state, strict=False)
    del model
    collect()
    grown.blocks[3] = Block(24)
    shard(grown)
    run.train(grown, adamw(grown), steps=2)
    run.finish(grown)


@case
def counted_by_comm_debug_mode(run):
    """Nothing of FCDP's is in its counts: all-gathers are FCDP's own, and so are its agreements; the rest is as
    before."""
    from torch.distributed.tensor.debug import CommDebugMode

    model = shard(Net())
    optimizer = adamw(model)
    for _ in range(3):
        with CommDebugMode() as forward:
            loss = run.loss(model)
        with CommDebugMode() as backward:
            loss.backward()
        for name, mode in (("forward", forward), ("backward", backward)):
            counts = {str(kind): n for kind, n in mode.get_comm_counts().items() if "allgather" not in str(kind)}
            run.record(f"collectives in {name}", sorted(counts.items()))
        optimizer.step()
        optimizer.zero_grad()
        run.evaluate(model)
    run.finish(model)


@case
def two_parameter_groups_of_one_block(run):
    """The large weights of every block, and of the root, are sharded over a process group of their own."""
    try:
        from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, ShardPlacementResult
    except ImportError:
        raise Unsupported("parameters with a mesh of their own are newer than this torch") from None
    other = FSDPMeshInfo(DeviceMesh.from_group(dist.new_group(list(range(run.world))), DEVICE.type), shard_mesh_dim=0)

    def placement(parameter):
        return ShardPlacementResult(Shard(0), other) if parameter.ndim == 2 else None

    model = shard(Net(), shard_placement_fn=placement)
    optimizer = adamw(model)
    run.train(model, optimizer, steps=3, micro_batches=2)
    if run.fcdp:
        run.extra["groups"] = [[group["name"], group["gathers_avoided"]] for group in run.fcdp.stats()["groups"]]
    run.finish(model, optimizer)
