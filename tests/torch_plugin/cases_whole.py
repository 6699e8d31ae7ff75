"""Whole tensors of sharded parameters: full_tensor(), redistribute and full state dicts, at each moment of training and
behind each way to write.  What comes out must be the bytes that the shards have at that moment."""

import gc
import threading

import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from cases_basic import adamw
from cases_edit import ONE_RANK, WRITES, scaled_state
from ledger import parameter_bytes
from models import BF16_COMPUTE, Net, TiedLM, shard, train_only, world_mesh
from place import DEVICE
from run import COUNTING, case, reshard_all


def record_whole(run, tag, parameters):
    """Each as a whole, and what a program may ask of it; then the tensor is written, which must reach nothing else."""
    for i, parameter in enumerate(parameters):
        whole = parameter.full_tensor()
        run.record(f"{tag} {i}", whole)
        about = (
            type(whole),
            whole.dtype,
            whole.device == DEVICE,
            whole.stride(),
            whole.storage_offset(),
            whole.requires_grad,
        )
        run.record(f"{tag} {i} is", about)
        with torch.no_grad():
            whole.zero_()


def asked(make=Net, mode=torch.no_grad, **kwargs):
    """At each moment of two steps with two micro-batches: first all of them, then one alone, which leaves the others."""

    def train(run):
        model = shard(make(), **kwargs)
        optimizer = adamw(model)
        sharded = list(model.parameters())

        def ask(tag):
            with mode():
                record_whole(run, tag, sharded)
                record_whole(run, f"{tag}, one", sharded[3:4])

        ask("before the first forward")
        for _ in range(2):
            for _ in range(2):
                loss = run.loss(model)
                reshard_all(model)
                ask("behind a forward")
                loss.backward()
                ask("behind a backward")
            optimizer.step()
            optimizer.zero_grad()
            ask("behind a step")
            run.evaluate(model)
            ask("behind an evaluation")
            ask("once more")
        run.finish(model, optimizer)

    return train


case(asked(), name="whole_at_each_moment")
case(asked(mode=torch.inference_mode), name="whole_in_inference_mode")
case(asked(mode=torch.enable_grad), name="whole_with_grad_mode")
case(asked(lambda: train_only(Net(lora=3), "lora_", "head")), name="whole_of_frozen_and_trainable")
case(asked(mp_policy=BF16_COMPUTE), name="whole_beside_bf16_copies")
case(asked(lambda: Net().to(torch.bfloat16).float(), reshard_after_forward=False), name="whole_of_kept_groups")


@case
def whole_over_replicas(run):
    """HSDP: shard groups across the nodes, whose parameters are replicated."""
    model = shard(Net(), mesh=DeviceMesh(DEVICE.type, [[0, 2], [1, 3]], mesh_dim_names=("replicate", "shard")))
    optimizer = adamw(model)
    sharded = list(model.parameters())
    for _ in range(2):
        run.step(model, optimizer)
        record_whole(run, "whole", [p.detach() for p in sharded])
        run.evaluate(model)
        record_whole(run, "evaluated", [p.detach() for p in sharded])
    run.finish(model)


def behind(writes, rank=None):
    """Each write comes between a forward, which has gathered everything, and the question."""

    def train(run):
        model = shard(Net(n_blocks=2, lora=2))
        optimizer = adamw(model)
        sharded = list(model.parameters())
        run.step(model, optimizer)
        for write in writes:
            run.evaluate(model)
            reshard_all(model)
            if rank is None or run.rank == rank:
                write(sharded)
            with torch.no_grad():
                record_whole(run, write.__name__, sharded)
            run.evaluate(model)
        run.step(model, optimizer)
        run.finish(model)

    return train


for kind, writes in WRITES.items():
    case(behind(writes), name=f"whole_behind_{kind}_writes")
case(behind(ONE_RANK, rank=1), name="whole_behind_writes_on_one_rank")


@case
def whole_of_what_the_program_wrote_into(run):
    """A forward writes into gathered parameters, on one rank and then on all. That is gone with the reshard."""
    model = shard(Net())
    optimizer = adamw(model)

    def hook(module, inputs):
        with torch.no_grad():
            module.weight.data.mul_(0.5)

    for ranks in ([1], range(4)):
        run.step(model, optimizer)
        run.evaluate(model)
        hooks = [block.up.register_forward_pre_hook(hook) for block in model.blocks if run.rank in ranks]
        run.evaluate(model)
        for handle in hooks:
            handle.remove()
        reshard_all(model)
        record_whole(run, "whole", [p.detach() for p in model.parameters()])
    run.finish(model, optimizer)


@case
def whole_behind_a_loaded_state_dict(run):
    model = shard(Net(n_blocks=2))
    optimizer = adamw(model)
    for assign in (False, True, False):
        run.step(model, optimizer)
        run.evaluate(model)
        model.load_state_dict(scaled_state(model), assign=assign)
        with torch.no_grad():
            record_whole(run, f"assign={assign}", model.parameters())
        run.evaluate(model)
        optimizer = adamw(model)
    run.finish(model)


@case
def whole_between_writes_of_single_parameters(run):
    """Each parameter is asked for right behind a write into it: what the ranks agreed on for its group is old by then."""
    model = shard(Net(n_blocks=2))
    optimizer = adamw(model)
    sharded = list(model.parameters())
    for _ in range(2):
        loss = run.loss(model)
        reshard_all(model)
        with torch.no_grad():
            for i, p in enumerate(sharded):
                p.data.mul_(0.5) if i % 2 else p.mul_(0.5)
                record_whole(run, "behind a write", [p])
                p.data.mul_(2.0)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    run.finish(model)


@case
def whole_of_tied_weights(run):
    model = shard(TiedLM())
    optimizer = adamw(model)
    for _ in range(3):
        logits = model(run.tokens())
        logits.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        for name, value in sorted(model.state_dict().items()):
            run.record(name, value.full_tensor())
    run.finish(model)


@case
def whole_state_dicts(run):
    """Of a model and of its optimizer, whose tensors look like parameters and are none."""
    model = shard(Net(n_blocks=2))
    optimizer = adamw(model)
    for _ in range(2):
        run.step(model, optimizer)
        for options in (
            StateDictOptions(full_state_dict=True),
            StateDictOptions(full_state_dict=True, cpu_offload=True),
            StateDictOptions(full_state_dict=True, ignore_frozen_params=True),
        ):
            weights, state = get_state_dict(model, optimizer, options=options)
            for name in sorted(weights):
                run.record(f"weights {name}", weights[name])
            for name, entry in sorted(state.get("state", {}).items()):
                for key in sorted(entry):
                    run.record(f"state {name} {key}", entry[key])
        run.evaluate(model)
        weights = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
        for name in sorted(weights):
            run.record(f"evaluated {name}", weights[name])
    run.finish(model, optimizer)


@case
def whole_with_gradients_through_it(run):
    """A penalty on whole weights: autograd goes through the tensor as ever."""
    model = shard(Net(n_blocks=2))
    optimizer = adamw(model)
    for _ in range(2):
        run.loss(model).backward()
        reshard_all(model)
        penalty = sum(p.full_tensor().square().sum() for p in model.parameters())
        run.record("penalty", penalty)
        penalty.backward()
        for i, p in enumerate(model.parameters()):
            run.record(f"gradient {i}", p.grad)
        optimizer.step()
        optimizer.zero_grad()
    run.finish(model)


@case
def whole_inside_a_forward_and_a_backward(run):
    """Another block's weights, and their own, while the model runs: groups are in use, begun ahead, or at rest."""
    model = shard(Net())
    optimizer = adamw(model)
    sharded = [list(block.parameters()) for block in model.blocks]

    def ask(block):
        def hook(*_):
            with torch.no_grad():
                for i, parameters in enumerate(sharded):
                    record_whole(run, f"in {block}, of {i}", parameters[:3])

        return hook

    run.step(model, optimizer)
    for i, block in enumerate(model.blocks):
        block.norm.register_forward_pre_hook(ask(i))
        block.down.register_full_backward_hook(ask(f"the backward of {i}"))
    run.train(model, optimizer, steps=2)
    run.finish(model)


@case
def whole_while_unsharded_by_hand(run):
    model = shard(Net())
    optimizer = adamw(model)
    sharded = list(model.parameters())
    run.step(model, optimizer)
    model.blocks[1].unshard()
    record_whole(run, "one is unsharded", [p.detach() for p in sharded])
    model.blocks[1].reshard()
    record_whole(run, "none is", [p.detach() for p in sharded])
    handle = model.blocks[2].unshard(async_op=True)
    record_whole(run, "one is on its way", [p.detach() for p in sharded])
    handle.wait()
    run.step(model, optimizer)
    run.finish(model)


@case
def whole_of_what_is_not_a_parameter(run):
    """Views, products, copies, other placements; and a tensor that is the shard on all ranks but one."""
    model = shard(Net(n_blocks=2))
    optimizer = adamw(model)
    for _ in range(2):
        run.step(model, optimizer)
        run.evaluate(model)
        reshard_all(model)
        for i, p in enumerate(model.parameters()):
            p = p.detach()
            local = p.to_local()
            local = local.clone() if run.rank == 1 else local
            other = DTensor.from_local(local, p.device_mesh, p.placements, shape=p.shape, stride=p.stride())
            for tag, value in {
                "data": p.data,
                "alias": p.view_as(p),
                "product": p * 2,
                "negative": -p,
                "copy": p.clone(),
                "part": p[:1],
                "on one rank a copy": other,
            }.items():
                run.record(f"{tag} {i}", value.full_tensor())
            run.record(f"replica {i}", p.redistribute(placements=[Replicate()]).to_local())
            if p.ndim == 2:
                run.record(f"columns {i}", p.redistribute(placements=[Shard(1)]).to_local())
                run.record(f"transposed {i}", p.t().full_tensor())
    run.finish(model)


@case
def whole_of_two_models_alike(run):
    """In turn, and one after the other was made again."""
    for _ in range(2):
        models = [shard(Net(n_blocks=2)) for _ in range(2)]
        optimizers = [adamw(model) for model in models]
        for _ in range(2):
            for model, optimizer in zip(models, optimizers):
                run.step(model, optimizer)
            for pair in zip(*(model.parameters() for model in models)):
                record_whole(run, "of two", [p.detach() for p in pair])
        for model in models:
            run.finish(model)
        del models, optimizers, model, optimizer, pair


@case
def whole_after_its_model_is_gone(run):
    """On two ranks alone the garbage collector has been there."""
    model = shard(Net(n_blocks=2))
    optimizer = adamw(model)
    run.step(model, optimizer)
    run.evaluate(model)
    reshard_all(model)
    sharded = list(model.parameters())
    run.finish(model)
    keeps = (model, optimizer) if run.rank % 2 else None
    del model, optimizer
    gc.collect()
    record_whole(run, "of the dead", [p.detach() for p in sharded])
    del keeps


def on_a_thread(of_rank):
    """Like a program that saves in the background: on the ranks with `of_rank`, the others on the main thread."""

    def save(run):
        model = shard(Net(n_blocks=2))
        optimizer = adamw(model)
        for _ in range(2):
            run.step(model, optimizer)
            run.evaluate(model)
            reshard_all(model)
            state = model.state_dict()
            if of_rank(run.rank):
                thread = threading.Thread(target=record_whole, args=(run, "there", state.values()))
                thread.start()
                thread.join()
            else:
                record_whole(run, "there", state.values())
            record_whole(run, "here", state.values())
        run.finish(model)

    return save


case(on_a_thread(lambda rank: True), name="whole_on_a_thread_of_its_own")
case(on_a_thread(lambda rank: rank == 0), name="whole_on_a_thread_of_one_rank")


@case
def whole_to_a_sampler_after_each_step(run):
    """As reinforcement learning does: the weights go to another model, which runs before the next step."""
    model, sampler = shard(Net()), Net().to(DEVICE)
    optimizer = adamw(model)
    for _ in range(3):
        run.train(model, optimizer, steps=1, micro_batches=2)
        with torch.no_grad():
            for name, p in model.named_parameters():
                sampler.get_parameter(name).copy_(p.full_tensor())
            x, _ = run.batch()
            run.record("sample", sampler(x))
    run.finish(model, optimizer)


@case
def whole_in_compiled_code(run):
    """The graphs that dynamo makes of it are part of what must be equal."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = shard(Net(n_blocks=2))
    optimizer = adamw(model)

    @torch.compile(backend="aot_eager")
    def norm(p):
        return p.full_tensor().square().sum()

    for _ in range(2):
        run.step(model, optimizer)
        run.evaluate(model)
        reshard_all(model)
        with torch.no_grad():
            for i, p in enumerate(model.blocks[0].parameters()):
                run.record(f"norm {i}", norm(p))
                record_whole(run, f"{i} outside", [p])
    run.finish(model)
    run.record("dynamo's graphs", sorted(torch._dynamo.utils.counters["stats"].items()))
    torch._dynamo.reset()


def question(run, model, label):
    run.mark(label)
    with torch.no_grad():
        for name, p in sorted(model.named_parameters()):
            run.record(f"{label} {name}", p.full_tensor())


@case(into=COUNTING)
def count_whole(run):
    """Whole parameters and full state dicts behind an evaluation, and behind a step."""
    model = Net(dim=192, n_blocks=4)
    run.record("W", parameter_bytes(model))
    run.record("W parameters", len(list(model.parameters())))
    shard(model)
    optimizer = adamw(model)
    run.step(model, optimizer)
    for _ in range(2):
        run.mark("evaluation")
        run.evaluate(model)
        reshard_all(model)
        question(run, model, "fresh")
        run.mark("state dict")
        for name, value in get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)).items():
            run.record(f"saved {name}", value)
        run.mark("step")
        run.step(model, optimizer)
        question(run, model, "stale")
        run.mark("evaluation behind it")
        run.evaluate(model)
        run.mark("step")
        run.step(model, optimizer)
        run.mark("state dict behind a step")
        for name, value in get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)).items():
            run.record(f"saved {name}", value)
    run.mark("end")
    run.finish(model)


@case(into=COUNTING)
def count_whole_beside_bf16(run):
    """The copies are of another dtype than the parameters: torch gathers."""
    model = Net(dim=192, n_blocks=4)
    run.record("W", parameter_bytes(model))
    shard(model, mp_policy=BF16_COMPUTE, mesh=world_mesh())
    run.evaluate(model)
    reshard_all(model)
    question(run, model, "whole")
    run.mark("end")
    run.finish(model)
