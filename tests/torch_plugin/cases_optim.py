"""How parameters change, and when: inside backward, by hand, through raw pointers, inside a closure, or not at all
through autograd.  The classical ways for a cached copy to go stale unseen."""

import ctypes

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from cases_basic import adamw
from models import BF16_COMPUTE, Net, shard, train_only, trainable
from place import DEVICE
from run import case, reshard_all


def raw(tensor):
    """The bytes of a rank's shard as a tensor of float32 over its address: with a version counter of its own, and no hook."""
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    if local.numel() == 0:
        return torch.empty(0, device=local.device)
    if local.device.type != "cpu":  # what a kernel of the script's own would write
        return (
            torch.empty(0, device=local.device)
            .set_(local.untyped_storage(), local.storage_offset(), local.shape)
            .view(-1)
        )
    at = ctypes.cast(local.data_ptr(), ctypes.POINTER(ctypes.c_float))
    return torch.from_numpy(np.ctypeslib.as_array(at, (local.numel(),)))


def sgd_raw(parameter, lr=0.05):
    if parameter.grad is not None:
        raw(parameter).sub_(lr * raw(parameter.grad))


def sgd_data(parameter, lr=0.05):
    parameter.data.add_(parameter.grad, alpha=-lr)


def sgd_local(parameter, lr=0.05):
    with torch.no_grad():
        parameter.to_local().sub_(parameter.grad.to_local() * lr)


def sgd_foreach(parameters, lr=0.05):
    with torch.no_grad():
        torch._foreach_add_(list(parameters), [p.grad for p in parameters], alpha=-lr)


def by_hand(update, evaluate=False, micro_batches=1, **shard_kwargs):
    def train(run):
        model = shard(Net(n_blocks=2), **shard_kwargs)
        parameters = trainable(model)
        for _ in range(2):
            for _ in range(micro_batches):
                run.loss(model).backward()
            if update is sgd_foreach:
                update(parameters)
            else:
                for parameter in parameters:
                    update(parameter)
            for parameter in parameters:
                parameter.grad = None
            if evaluate:
                run.evaluate(model, n=2)
        run.finish(model)

    return train


for update in (sgd_raw, sgd_data, sgd_local, sgd_foreach):
    short = update.__name__[4:]
    case(by_hand(update), name=f"hand_written_{short}")
    case(by_hand(update, micro_batches=2, evaluate=True), name=f"hand_written_{short}_accumulated_with_evaluation")
case(by_hand(sgd_raw, mp_policy=BF16_COMPUTE), name="hand_written_raw_bf16")


@case
def raw_optimizer_beside_torch_optim(run):
    """An optimizer hook fires, but for half of the parameters only; frozen-looking weights are written raw."""
    model = shard(Net(n_blocks=4))
    mine = [p for n, p in model.named_parameters() if "blocks.1" in n or "blocks.3" in n]
    theirs = [p for n, p in model.named_parameters() if "blocks.1" not in n and "blocks.3" not in n]
    optimizer = torch.optim.AdamW(theirs, lr=1e-2, foreach=True)
    for step in range(3):
        run.loss(model).backward()
        optimizer.step()
        run.evaluate(model)
        for parameter in mine:
            sgd_raw(parameter)
            parameter.grad = None
        optimizer.zero_grad()
        run.evaluate(model)
    run.finish(model)


@case
def raw_optimizer_steps_every_other_backward(run):
    model = shard(Net())
    optimizer = adamw(model)
    for step in range(6):
        run.loss(model).backward()
        if step % 3 == 0:
            optimizer.step()
        else:
            for parameter in trainable(model):
                sgd_raw(parameter)
        optimizer.zero_grad()
    run.finish(model)


@case
def raw_write_to_frozen_weights_each_step(run):
    """No gradient, no optimizer, no counter: only the bytes of the shard say that a frozen weight moved."""
    model = train_only(Net(lora=4), "lora_", "head")
    shard(model)
    optimizer = adamw(model)
    frozen = [p for p in model.parameters() if not p.requires_grad]
    for _ in range(2):
        run.step(model, optimizer)
        for parameter in frozen:
            raw(parameter).mul_(0.875)
    run.finish(model)


def in_backward(update, order=None, frozen=(), around=None, micro_batches=1):
    """Optimizers that step as soon as a gradient is reduced, so that parameters change inside backward."""

    def train(run):
        model = Net(checkpoint_around=around)
        if frozen:
            train_only(model, *frozen)
        shard(model)
        if order:
            model.order = order
        optimizers = {}
        for parameter in trainable(model):
            if update == "torch":
                optimizers[parameter] = torch.optim.AdamW([parameter], lr=1e-2)

            def hook(parameter):
                if update == "torch":
                    optimizers[parameter].step()
                    optimizers[parameter].zero_grad()
                else:
                    {"raw": sgd_raw, "data": sgd_data}[update](parameter)
                    parameter.grad = None

            parameter.register_post_accumulate_grad_hook(hook)
        for _ in range(2):
            for _ in range(micro_batches):
                run.loss(model).backward()
        run.finish(model)

    return train


for update in ("torch", "raw", "data"):
    case(in_backward(update), name=f"step_in_backward_{update}")
    case(in_backward(update, order=[0, 1, 0, 2]), name=f"step_in_backward_{update}_block_twice")
    case(
        in_backward(update, order=[0, 1, 1, 2, 0], around="non_reentrant"),
        name=f"step_in_backward_{update}_block_twice_checkpointed",
    )
case(in_backward("raw", frozen=("blocks.1", "head")), name="step_in_backward_raw_half_frozen")
case(in_backward("torch", micro_batches=2), name="step_in_backward_torch_two_backwards")


class ClosureSteps(torch.optim.Optimizer):
    """Moves the parameters several times inside one step(): its post-hook fires only at the end."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr})

    def step(self, closure):
        parameters, lr = self.param_groups[0]["params"], self.param_groups[0]["lr"]
        for _ in range(2):
            with torch.enable_grad():
                loss = closure()
            with torch.no_grad():
                torch._foreach_add_(list(parameters), [p.grad for p in parameters], alpha=-lr)
        return loss


@case
def optimizer_with_a_closure(run):
    model = shard(Net())
    optimizer = ClosureSteps(trainable(model), 0.05)

    def closure():
        optimizer.zero_grad()
        loss = run.loss(model)
        loss.backward()
        return loss

    for _ in range(2):
        optimizer.step(closure)
    run.finish(model)


@case
def sharpness_aware(run):
    """SAM: perturb by .data, run forward and backward there, return, step."""
    model = shard(Net())
    parameters = trainable(model)
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    for _ in range(2):
        run.loss(model).backward()
        held = [p.data.clone() for p in parameters]
        for p in parameters:
            p.data.add_(p.grad, alpha=0.05)
        optimizer.zero_grad()
        run.loss(model).backward()
        for p, old in zip(parameters, held):
            p.data.copy_(old)
        optimizer.step()
        optimizer.zero_grad()
    run.finish(model)


def zeroth_order(write):
    """MeZO: no backward, no grad mode change, no optimizer; the parameters move between forwards under no_grad."""

    def train(run):
        model = shard(Net())
        parameters = list(model.parameters())
        with torch.no_grad():
            for step in range(3):
                noise = [p.detach().clone() for p in parameters]
                for z in noise:
                    z._local_tensor.copy_(run.randn(*z._local_tensor.shape))

                def move(scale):
                    for p, z in zip(parameters, noise):
                        if write == "data":
                            p.data.add_(z, alpha=scale)
                        else:
                            raw(p).add_(scale * raw(z))
                    reshard_all(model)

                move(1e-2)
                plus = run.loss(model, "plus")
                move(-2e-2)
                minus = run.loss(model, "minus")
                move(1e-2 - 0.1 * float(plus - minus))
        run.finish(model)

    return train


case(zeroth_order("data"), name="zeroth_order_data")
case(zeroth_order("raw"), name="zeroth_order_raw")


@case
def fp32_masters(run):
    """The optimizer holds masters of its own; they reach the model after an evaluation of the old weights."""
    model = shard(Net())
    parameters = trainable(model)
    masters = [p.to_local().detach().clone().double() for p in parameters]
    optimizer = torch.optim.AdamW(masters, lr=1e-2, foreach=True)
    for _ in range(2):
        run.loss(model).backward()
        for master, p in zip(masters, parameters):
            master.grad, p.grad = p.grad.to_local().double(), None
        optimizer.step()
        run.evaluate(model)
        for master, p in zip(masters, parameters):
            p.data._local_tensor.copy_(master)
        reshard_all(model)
    run.finish(model)


@case
def step_between_forward_and_backward(run):
    """The gradients of one batch are applied while the next one is between its forward and its backward."""
    model = shard(Net())
    optimizer = adamw(model)
    run.loss(model).backward()
    for _ in range(2):
        loss = run.loss(model)
        optimizer.step()
        optimizer.zero_grad()
        loss.backward()
    optimizer.step()
    run.finish(model)


@case
def raw_step_between_forward_and_backward(run):
    model = shard(Net())
    parameters = trainable(model)
    run.loss(model).backward()
    for _ in range(2):
        loss = run.loss(model)
        for parameter in parameters:
            sgd_raw(parameter)
            parameter.grad = None
        loss.backward()
    run.finish(model)


@case
def two_models_in_turn(run):
    """A GAN's loop: requires_grad of each flips at every half step, with an optimizer each."""
    make, judge = shard(Net()), shard(Net(dim=16, n_blocks=2))
    optimizers = [adamw(make), adamw(judge)]
    held = [list(make.parameters()), list(judge.parameters())]
    adapt = torch.nn.Linear(5, 11).to(DEVICE).requires_grad_(False)
    for step in range(3):
        for turn in (0, 1):
            for i in (0, 1):
                for p in held[i]:
                    p.requires_grad_(i == turn)
            x, y = run.batch()
            score = judge(adapt(make(x)))
            loss = (score.mean() if turn else -score.mean()) + (score**2).mean()
            run.record("loss", loss)
            loss.backward()
            optimizers[turn].step()
            for o in optimizers:
                o.zero_grad()
    for p in held[0] + held[1]:
        p.requires_grad_(True)
    run.finish(make)
    run.finish(judge)


@case
def teacher_is_a_moving_average(run):
    """Frozen weights that move at every step, through .data, while the student trains."""
    student, teacher = shard(Net()), shard(train_only(Net(), "nothing"))
    optimizer = adamw(student)
    pairs = list(zip(teacher.parameters(), student.parameters()))
    for _ in range(2):
        x, y = run.batch()
        with torch.no_grad():
            target = teacher(x)
        run.record("target", target)
        loss = ((student(x) - target - y) ** 2).mean()
        run.record("loss", loss)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        for t, s in pairs:
            t.data.mul_(0.9).add_(s.data, alpha=0.1)
        reshard_all(teacher)
    run.finish(student)
    run.finish(teacher)
