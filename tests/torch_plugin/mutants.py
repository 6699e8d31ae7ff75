"""Wrong caches over plain FSDP's gathers, each wrong in one known way: the errors that the cases must catch.

The real collective always runs, so nothing hangs; then the part of the result that the mutant believes unchanged is
overwritten with what it remembers.  A case that no mutant fails has no teeth."""

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook


class Mutant:
    """`believes(param, state)` says whether a remembered gather is still good; `state` is what it saw at that
    gather."""

    def __init__(self):
        self.steps = 0
        self.flips = 0
        self.hooks_fired = False
        self.backwards = 0
        self.mode = None
        self.memory = {}

    def look(self, p):
        return ()

    def believes(self, p, seen):
        return seen == self.look(p)

    def key(self, p):
        return id(p)

    # What real caches watch.
    def counters(self, p):
        return (
            id(p.sharded_param),
            p.sharded_param._version,
            p._sharded_local_tensor._version,
            p._sharded_param_data._version,
            p._sharded_param_data.data_ptr(),
            p.sharded_param.requires_grad,
        )

    def optimizer_steps(self, p):
        return self.steps if p.sharded_param.requires_grad else 0

    def content(self, p):
        data = p._sharded_param_data
        return bytes(data.contiguous().view(torch.uint8).numpy().tobytes()) if data.numel() else b""

    def in_backward(self):
        return torch._C._current_graph_task_id() != -1


class Always(Mutant):
    """The first gather is good for ever."""


class VersionOnly(Mutant):
    look = Mutant.counters


class StepHookOnly(Mutant):
    look = Mutant.optimizer_steps


class Signals(Mutant):
    """Counters and optimizer hooks: rules 1 and 2."""

    def look(self, p):
        return self.counters(p), self.optimizer_steps(p)


class SignalsAndFlips(Mutant):
    """Rules 1 to 4: everything but the content."""

    def look(self, p):
        unannounced = 0 if self.hooks_fired else self.backwards
        return self.counters(p), self.optimizer_steps(p), self.flips, unannounced


class NeverInBackward(Mutant):
    """Right in forward; a backward takes what its forward had."""

    def look(self, p):
        return self.content(p)

    def believes(self, p, seen):
        return self.in_backward() or super().believes(p, seen)


class OwnShardOnly(Mutant):
    """Right about this rank's shard, deaf to the other ranks: no agreement."""

    def look(self, p):
        return self.content(p)


class Sum(Mutant):
    """Watches a fingerprint that no order changes."""

    def look(self, p):
        data = p._sharded_param_data
        return sorted(data.float().flatten().tolist())


class TrainableOnly(Mutant):
    """Frozen parameters never change, do they; the others are watched by content."""

    def look(self, p):
        return self.content(p) if p.sharded_param.requires_grad else b""


class ByName(Mutant):
    """Knows parameters by name and shape: another model's are the same to it."""

    def key(self, p):
        return p._param_fqn, tuple(p._orig_size)

    def look(self, p):
        return self.steps


class KeepsEdits(Mutant):
    """Stores a region when it is resharded: an edit of the gathered parameters is gathered ever after."""

    def look(self, p):
        return self.content(p)


class DrawsRandomNumbers(Mutant):
    def believes(self, p, seen):
        torch.rand(1)
        return False


class RemembersWholes(Mutant):
    """Right in FSDP's gathers. A whole parameter is what it was when it was first asked for."""

    def believes(self, p, seen):
        return False

    def look_whole(self, local):
        return ()


class WholesByOwnShard(RemembersWholes):
    """The same, as long as this rank's shard is what it was."""

    def look_whole(self, local):
        return bytes(local.contiguous().view(torch.uint8).numpy().tobytes()) if local.numel() else b""


MUTANTS = {
    "always": Always,
    "version_only": VersionOnly,
    "step_hook_only": StepHookOnly,
    "signals": Signals,
    "signals_and_flips": SignalsAndFlips,
    "never_in_backward": NeverInBackward,
    "own_shard_only": OwnShardOnly,
    "sum": Sum,
    "trainable_only": TrainableOnly,
    "by_name": ByName,
    "keeps_edits": KeepsEdits,
    "draws_random_numbers": DrawsRandomNumbers,
    "remembers_wholes": RemembersWholes,
    "wholes_by_own_shard": WholesByOwnShard,
}


class Switch:
    """FSDP2 with at most one mutant at work; `become` chooses it."""

    def __init__(self):
        self.active = None

    def become(self, name):
        self.active = MUTANTS[name]() if name else None


def remembered(mutant, p):
    return mutant.memory.get(mutant.key(p))


def spoil(mutant, fsdp_params, group, result):
    """Overwrites what the mutant takes for unchanged by what it remembers, and remembers the rest."""
    if isinstance(result.all_gather_work, dist.distributed_c10d.Work):
        result.all_gather_work.wait()
    rows = result.all_gather_output.view(group.size(), -1)
    at = 0
    for p, size in zip(fsdp_params, result.all_gather_input_split_sizes):
        part = rows[:, at : at + size]
        at += size
        if p.sharded_state.name != "SHARDED":
            continue
        known = remembered(mutant, p)
        if known and known[1].shape == part.shape and known[1].dtype == part.dtype and mutant.believes(p, known[0]):
            part.copy_(known[1])
        else:
            # The parameter is kept too: its id must not come to mean another one.
            mutant.memory[mutant.key(p)] = [mutant.look(p), part.clone(), p]


class FlatAsParam:
    """A flat parameter of FSDP1's with the names that the mutants look at."""

    def __init__(self, handle):
        self.handle = handle

    @property
    def sharded_param(self):
        return self.handle.flat_param

    @property
    def _sharded_local_tensor(self):
        return self.handle.flat_param._local_shard

    @property
    def _sharded_param_data(self):
        return self.handle.flat_param.data  # FSDP1 has made it what is gathered

    @property
    def _param_fqn(self):
        return tuple(self.handle.flat_param._fqns)

    @property
    def _orig_size(self):
        return self.handle.flat_param._unpadded_unsharded_size


def spoil_flat(mutant, handle, buffer):
    """As `spoil`, of a flat parameter; gathers in full precision are another parameter's."""
    params = handle.__dict__.setdefault("_as_params", {})
    p = params.setdefault(buffer.dtype, FlatAsParam(handle))
    known = remembered(mutant, p)
    if known and known[1].shape == buffer.shape and known[1].dtype == buffer.dtype and mutant.believes(p, known[0]):
        buffer.copy_(known[1])
    else:
        mutant.memory[mutant.key(p)] = [mutant.look(p), buffer.clone(), p]


def store_what_is_resharded(mutant, group):
    for p in group.fsdp_params:
        known = remembered(mutant, p)
        if known and len(p.all_gather_outputs) == 1:
            out = p.all_gather_outputs[0]
            if out.dtype == known[1].dtype and out.numel() == known[1].numel():
                known[1].copy_(out.view(known[1].shape))


def spoil_whole(mutant, local, whole):
    """What the mutant remembers of the whole of which `local` is this rank's shard."""
    key, now = (local.untyped_storage()._cdata, whole.shape), mutant.look_whole(local)
    known = mutant.memory.get(key)
    if known and known[0] == now:
        return known[1].clone()
    mutant.memory[key] = [now, whole.clone(), local]
    return whole


def install():
    from torch.distributed.fsdp._flat_param import FlatParamHandle
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group as module
    from torch.distributed.tensor import _redistribute as tensor_module

    redistribute = tensor_module.redistribute_local_tensor

    gather_flat = FlatParamHandle._all_gather_flat_param
    switch, Group = Switch(), module.FSDPParamGroup
    gather, reshard, pre_forward, post_backward = (
        module.foreach_all_gather,
        Group.reshard,
        Group.pre_forward,
        Group.post_backward,
    )

    def stepped(optimizer, args, kwargs):
        if switch.active:
            switch.active.steps += 1
            switch.active.hooks_fired = True

    @torch.no_grad()
    def foreach_all_gather(fsdp_params, group, *args, **kwargs):
        result = gather(fsdp_params, group, *args, **kwargs)
        if switch.active:
            spoil(switch.active, fsdp_params, group, result)
        return result

    @torch.no_grad()
    def all_gather_flat_param(handle, buffer):
        gather_flat(handle, buffer)
        if switch.active:
            spoil_flat(switch.active, handle, buffer)
        return buffer

    @torch.no_grad()
    def redistribute_local_tensor(local, current, target, *args, **kwargs):
        whole = redistribute(local, current, target, *args, **kwargs)
        is_whole = isinstance(switch.active, RemembersWholes) and type(local) is torch.Tensor
        return spoil_whole(switch.active, local, whole) if is_whole else whole

    def before_forward(group, *args, **kwargs):
        if switch.active:
            mode = torch.is_grad_enabled()
            switch.active.flips += switch.active.mode not in (None, mode)
            switch.active.mode = mode
        return pre_forward(group, *args, **kwargs)

    def after_backward(group, *args):
        if switch.active:
            switch.active.backwards += 1
        return post_backward(group, *args)

    def before_reshard(group):
        if isinstance(switch.active, KeepsEdits) and group.is_unsharded:
            with torch.no_grad():
                store_what_is_resharded(switch.active, group)
        return reshard(group)

    register_optimizer_step_post_hook(stepped)
    tensor_module.redistribute_local_tensor = redistribute_local_tensor
    FlatParamHandle._all_gather_flat_param = all_gather_flat_param
    module.foreach_all_gather, Group.pre_forward = foreach_all_gather, before_forward
    Group.post_backward, Group.reshard = after_backward, before_reshard
    return switch
