"""Shards whose storage is freed while they are not used: a block that forwards skip, or one that is filled right before
its use.  Both FSDPs."""

import contextlib

import torch
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

from cases_basic import adamw
from cases_whole import record_whole
from models import Net, shard, wrap
from run import case

SKIPPED = 1


def storages_of(block):
    """Of the block's shards on this rank: each once, with what it holds."""
    if isinstance(block, FSDP):
        shards = [block._handle.flat_param.data]
    else:
        shards = [p.to_local().detach() for p in block.parameters()]
    return [shard.untyped_storage() for shard in shards]


def free(storages):
    """What they held; a size of 0 frees them."""
    held = [storage.clone() for storage in storages]
    for storage in storages:
        storage.resize_(0)
    return held


def fill(storages, held):
    """Moves no counter."""
    for storage, bytes_ in zip(storages, held):
        storage.resize_(bytes_.nbytes())
        storage.copy_(bytes_)


def negated(held):
    """Floats of the other sign."""
    out = [bytes_.clone() for bytes_ in held]
    for bytes_ in out:
        torch.empty(0, device=bytes_.device).set_(bytes_).neg_() if bytes_.nbytes() else None
    return out


def skipped(make, ranks=range(4)):
    """A block is left out, and its shards are freed on these ranks; they come back as they were, then changed."""

    def train(run):
        model = make()
        net = model.module if isinstance(model, FSDP) else model
        optimizer = adamw(model)
        all_blocks, some = list(net.order), [i for i in net.order if i != SKIPPED]
        storages = storages_of(net.blocks[SKIPPED])
        mine = run.rank in ranks
        for change in (None, negated, None):
            run.step(model, optimizer)
            run.evaluate(model)
            held = free(storages) if mine else None
            net.order[:] = some
            run.step(model, optimizer, micro_batches=2)
            run.evaluate(model)
            if mine:
                fill(storages, change(held) if change else held)
            net.order[:] = all_blocks
            run.evaluate(model)
        run.step(model, optimizer)
        run.finish(model, optimizer)

    return train


case(skipped(lambda: shard(Net())), name="a_skipped_block_is_freed")
case(skipped(lambda: shard(Net()), ranks=(2,)), name="a_skipped_block_is_freed_on_one_rank")
case(skipped(lambda: shard(Net(), reshard_after_forward=False)), name="a_skipped_block_that_stays_gathered_is_freed")
for use_orig_params in (False, True):
    suffix = "_with_orig_params" if use_orig_params else ""
    make = lambda use=use_orig_params: wrap(Net(), use_orig_params=use)  # noqa: E731
    case(skipped(make), name=f"fsdp1_a_skipped_block_is_freed{suffix}")
    case(skipped(make, ranks=(1,)), name=f"fsdp1_a_skipped_block_is_freed_on_one_rank{suffix}")


@case
def shards_are_there_for_their_forward_alone(run):
    """A program's own offload: each block's shards are filled before its forward and freed behind it."""
    model = shard(Net())
    run.evaluate(model)  # FSDP2 looks at all shards when it begins
    kept = {}

    def take(block, *_):
        fill(storages_of(block), kept.pop(block))

    def give(block, *_):
        kept[block] = free(storages_of(block))

    with contextlib.ExitStack() as hooks:
        for block in model.blocks:
            give(block)
            hooks.enter_context(block.register_forward_pre_hook(take, prepend=True))
            hooks.enter_context(block.register_forward_hook(give))
        for round_ in range(3):
            run.evaluate(model, n=2)
            for block in model.blocks if round_ else ():
                kept[block] = negated(kept[block])
    for block in model.blocks:
        take(block)
    run.train(model, adamw(model))
    run.finish(model)


@case
def whole_beside_a_freed_shard(run):
    """The others of its group are asked for; and itself, once it is back."""
    model = shard(Net())
    optimizer = adamw(model)
    block = model.blocks[SKIPPED]
    sharded = list(block.parameters())
    model.order = [i for i in model.order if i != SKIPPED]
    run.step(model, optimizer)
    storage = sharded[2].to_local().untyped_storage()
    for ranks in (range(4), (3,)):
        held = free([storage]) if run.rank in ranks else None
        for p in sharded[3:]:
            p.data.mul_(0.5)
        with torch.no_grad():
            record_whole(run, "beside", sharded[3:])
            run.evaluate(model)
            record_whole(run, "again", sharded[3:])
        if held:
            fill([storage], held)
        with torch.no_grad():
            record_whole(run, "back", sharded)
    model.order = [0, 1, 2]
    run.step(model, optimizer)
    run.finish(model, optimizer)
