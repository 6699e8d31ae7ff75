"""examples/torchtitan_llama.py with other settings. torchtitan_variants.py VARIANT, which is a function of this file."""

import on_cpu  # for machines without a GPU  # isort: skip
import sys

from torchtitan import train
from torchtitan.distributed.activation_checkpoint import FullAC

from torchtitan_llama import small


def compiled():
    config = small()
    config.compile.enable, config.compile.backend = True, "aot_eager"
    return config


def checkpointed():
    """Activations, all of them; and gradients accumulated."""
    config = small()
    config.activation_checkpoint = FullAC.Config()
    config.training.global_batch_size = 2 * 4 * config.training.local_batch_size
    return config


def tensor_parallel():
    config = small()
    config.parallelism.tensor_parallel_degree = 2
    return config


def hybrid():
    """HSDP: torchtitan shards over ranks side by side, those of a node, and replicates between the nodes."""
    config = small()
    config.parallelism.data_parallel_replicate_degree = 2
    return config


def saved():
    """DCP saves after each third step. What is found there is gone on from."""
    config = small()
    config.checkpoint.enable, config.checkpoint.interval, config.checkpoint.folder = True, 3, "checkpoints"
    return config


if __name__ == "__main__":
    variant = sys.argv.pop(1)
    sys.modules["torchtitan_variants"] = sys.modules["__main__"]
    sys.argv[1:1] = ["--module", "torchtitan_variants", "--config", variant]
    train.main()
