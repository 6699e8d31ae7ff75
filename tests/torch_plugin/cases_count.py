"""Cases that count instead of comparing: a model large enough that W, the bytes of its parameters, dwarfs any
agreement.  They record what comes out too, so that a count is never taken from a run that trained wrongly."""

import torch
from torch.distributed.tensor import Shard

from cases_basic import adamw
from cases_forms import Mixture, shard_experts
from ledger import Tower, open_ledger, parameter_bytes
from models import BF16_COMPUTE, Net, shard, train_only
from run import COUNTING, case, collect
from subclass import extend

DIM, BLOCKS = 192, 4


def large(**kwargs):
    return Net(dim=DIM, n_blocks=BLOCKS, **kwargs)


@case(into=COUNTING)
def count_full(run):
    model = large()
    run.record("W", parameter_bytes(model))
    shard(model)
    optimizer = adamw(model)
    run.step(model, optimizer)
    for step in range(3):
        run.mark("forward")
        loss = run.loss(model)
        run.mark("backward")
        loss.backward()
        run.mark("step")
        optimizer.step()
        optimizer.zero_grad()
    run.mark("end")
    run.finish(model)


@case(into=COUNTING)
def count_accumulation(run):
    model = large()
    run.record("W", parameter_bytes(model))
    shard(model)
    optimizer = adamw(model)
    run.step(model, optimizer)
    for step in range(2):
        for micro in range(4):
            run.mark("first" if micro == 0 else "later")
            run.loss(model).backward()
        run.mark("step")
        optimizer.step()
        optimizer.zero_grad()
    run.mark("end")
    run.finish(model)


@case(into=COUNTING)
def count_evaluation(run):
    model = large()
    run.record("W", parameter_bytes(model))
    shard(model)
    optimizer = adamw(model)
    for step in range(2):
        run.step(model, optimizer)
        run.mark("first evaluation")
        run.evaluate(model)
        for _ in range(3):
            run.mark("evaluation")
            run.evaluate(model)
        run.mark("step")
    run.mark("end")
    run.finish(model)


@case(into=COUNTING)
def count_frozen(run):
    model = train_only(large(), "blocks.3", "head")
    run.record("W", parameter_bytes(model))
    run.record("W frozen", sum(p.numel() * p.element_size() for p in model.blocks[:3].parameters()))
    shard(model)
    optimizer = adamw(model)
    run.mark("first")
    run.step(model, optimizer)
    for _ in range(3):
        run.mark("later")
        run.step(model, optimizer)
        run.evaluate(model)
    run.mark("end")
    run.finish(model)


@case(into=COUNTING)
def count_lora(run):
    model = train_only(large(lora=4), "lora_")
    run.record("W", parameter_bytes(model))
    run.record("W trainable", sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad))
    shard(model)
    optimizer = adamw(model)
    run.mark("first")
    run.step(model, optimizer)
    for _ in range(3):
        run.mark("later")
        run.step(model, optimizer)
    run.mark("end")
    run.finish(model)


@case(into=COUNTING)
def count_lora_beside_a_reference(run):
    """As DPO and GRPO do: between forward and backward the same model runs without gradients."""
    model = train_only(large(lora=4), "lora_")
    run.record("W", parameter_bytes(model))
    run.record("W trainable", sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad))
    shard(model)
    optimizer = adamw(model)
    run.mark("first")
    for step in range(4):
        loss = run.loss(model)
        run.evaluate(model)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.mark("later")
    run.mark("end")
    run.finish(model)


@case(into=COUNTING)
def count_bf16(run):
    model = large()
    run.record("W", parameter_bytes(model) // 2)
    shard(model, mp_policy=BF16_COMPUTE)
    optimizer = adamw(model)
    run.step(model, optimizer)
    for _ in range(2):
        run.mark("forward")
        loss = run.loss(model)
        run.mark("backward")
        loss.backward()
        run.mark("step")
        optimizer.step()
        optimizer.zero_grad()
    run.mark("end")
    run.finish(model)


def counted_passes(run, model, optimizer, evaluates=True):
    """A step to warm up, then two steps of two micro-batches and an evaluation."""
    run.step(model, optimizer)
    for _ in range(2):
        for micro in range(2):
            run.mark("later forward" if micro else "forward")
            loss = run.loss(model)
            run.mark("backward")
            loss.backward()
        if evaluates:
            run.mark("evaluation")
            run.evaluate(model)
            model.reshard()  # else FSDP2 keeps the root's parameters of before the step
        run.mark("step")
        optimizer.step()
        optimizer.zero_grad()
    run.mark("end")
    run.finish(model)


@case(into=COUNTING)
def count_second_dimension(run):
    model = Mixture(dim=192, hidden=512)
    run.record("W", parameter_bytes(model))
    shard_experts(model)
    counted_passes(run, model, adamw(model))


def small_mesh(frozen):
    def train(run):
        model = large()
        if frozen:
            train_only(model, "embed")
        run.record("W", parameter_bytes(model))
        shard(model, reshard_after_forward=2)
        # FSDP2 keeps an evaluation's shards too, and the next forward gathers those
        counted_passes(run, model, adamw(model), evaluates=False)

    return train


case(small_mesh(False), into=COUNTING, name="count_reshard_after_forward_2")
case(small_mesh(True), into=COUNTING, name="count_reshard_after_forward_2_frozen")


@case(into=COUNTING)
def count_extension(run):
    """W: as gathered, in bf16."""
    model = Net(dim=193, n_blocks=BLOCKS)  # 584 rows: what an extension gathers must divide evenly
    extend(model.blocks)
    run.record("W", sum(b.up.weight.numel() * 2 for b in model.blocks))
    run.record("W others", parameter_bytes(model) - sum(b.up.weight.numel() * 4 for b in model.blocks))
    shard(model)
    counted_passes(run, model, adamw(model))


@case(into=COUNTING)
def count_nothing_after_deletion(run):
    """A dead model holds no byte in any tier."""
    run.mark("before")
    model = shard(large())
    optimizer = adamw(model)
    run.train(model, optimizer, steps=2)
    run.mark("alive")
    run.finish(model)
    del model, optimizer
    collect()
    torch.distributed.barrier()
    run.mark("after")


def memory(exact, **kwargs):
    """Peaks of gathered parameters over steady steps: of FSDP2's own storages in either run, FCDP's beside them."""

    def train(run):
        model = Tower(exact=exact)
        run.record("W", parameter_bytes(model))
        ledger = open_ledger()
        try:
            shard(model, **kwargs)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            for step in range(3):
                if step == 1:
                    ledger.reset()
                    if run.fcdp:
                        run.fcdp.reset_peaks()
                loss = (model(run.randn(2, 512)) ** 2).mean()
                run.record("loss", loss)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            run.mark("end")
            run.extra["own_peak"] = ledger.peak
        finally:
            ledger.close()
        run.finish(model)

    return train


case(memory(True), into=COUNTING, name="memory_whole_pages")
case(memory(False), into=COUNTING, name="memory_odd_sizes")
case(memory(True, reshard_after_forward=2), into=COUNTING, name="memory_reshard_after_forward_2")
case(memory(True, shard_placement_fn=lambda p: Shard(1)), into=COUNTING, name="memory_second_dimension")
