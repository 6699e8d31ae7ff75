"""DeepSpeed for job.py: ZeRO-3 over all ranks, and with ZeRO++'s hpZ, which keeps a second shard within each node."""

import os

os.environ["DS_ACCELERATOR"] = "cpu"
import deepspeed
import torch

from job import block_elements, loss_of, mesh_shape

# A kernel for jobs of one node, which takes a minute to compile.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def train_with(model, args, **zero):
    if args.measures_memory:
        zero |= dict.fromkeys(("stage3_prefetch_bucket_size", "reduce_bucket_size"), block_elements(model))
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=args.lr),
        dist_init_required=False,
        config={
            "train_micro_batch_size_per_gpu": args.batch,
            "gradient_clipping": 0.0,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {
                "stage": 3,
                # By default, all of a model as small as this one stays gathered.
                "stage3_max_live_parameters": 0,
                "stage3_max_reuse_distance": 0,
                "stage3_param_persistence_threshold": 0,
                **zero,
            },
        },
    )

    def train_step(batches):
        total = 0.0
        with engine.coalesce_grad_reduction():  # gradients cross once per optimizer step
            for x, y in batches:
                loss = loss_of(engine, x, y) / len(batches)
                engine.backward(loss)
                total += loss.detach()
        engine.step()
        return total

    return train_step


def zero3(model, args):
    return train_with(model, args)


def hpz(model, args):
    return train_with(model, args, zero_hpz_partition_size=mesh_shape()[1])
