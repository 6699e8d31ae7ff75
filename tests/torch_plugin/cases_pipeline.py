"""Pipelines whose stages are sharded: each shard group runs forwards that the ranks of other stages do not run,
at times of its own."""

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import compat
from cases_basic import adamw
from models import Block
from place import DEVICE
from run import Unsupported, case

DIM, ROWS, MICRO_BATCHES = 24, 8, 4
STAGES, PIPELINES = [[0, 2], [1, 3]], [[0, 1], [2, 3]]  # a stage spans the nodes, a pipeline is within one


def square_error(output, target):
    return ((output - target) ** 2).mean()


class GroupsMade:
    """Counts the process groups, and so the communicators, that are made through torch inside."""

    def __enter__(self):
        self.n, self.original = 0, distributed_c10d._new_process_group_helper

        def counted(*args, **kwargs):
            self.n += 1
            return self.original(*args, **kwargs)

        distributed_c10d._new_process_group_helper = counted
        return self

    def __exit__(self, *exception):
        distributed_c10d._new_process_group_helper = self.original


def pipeline(schedule):
    def train(run):
        try:
            from torch.distributed import pipelining
        except ImportError:
            raise Unsupported("no torch.distributed.pipelining") from None
        stages, pipelines = ([dist.new_group(row) for row in rows] for rows in (STAGES, PIPELINES))
        number = run.rank % 2
        module = nn.Sequential(Block(DIM), Block(DIM), Block(DIM))
        mesh = DeviceMesh.from_group(stages[number], DEVICE.type)
        for block in module:
            fully_shard(block, mesh=mesh)
        fully_shard(module, mesh=mesh)
        compat.sum_only(module)
        optimizer = adamw(module)
        given, made = (
            torch.zeros(ROWS // MICRO_BATCHES, DIM, device=DEVICE, requires_grad=needs) for needs in (number > 0, True)
        )
        stage = pipelining.PipelineStage(
            module,
            number,
            2,
            DEVICE,
            input_args=(given,),
            output_args=made,
            group=pipelines[run.rank // 2],
        )
        runs = getattr(pipelining, schedule)(stage, MICRO_BATCHES, loss_fn=square_error)
        with GroupsMade() as groups:
            for _ in range(3):
                x, y = (run.randn(ROWS, DIM) for _ in range(2))
                losses = []
                if number == 0:
                    runs.step(x)
                else:
                    runs.step(target=y, losses=losses)
                for loss in losses:
                    run.record("loss", loss)
                optimizer.step()
                optimizer.zero_grad()
        run.record("process groups made in training", groups.n)
        run.finish(module, optimizer)
        dist.barrier()

    return train


case(pipeline("ScheduleGPipe"), name="pipeline_gpipe")
case(pipeline("Schedule1F1B"), name="pipeline_1f1b")
