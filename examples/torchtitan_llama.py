"""Trains torchtitan's small Llama 3 by a config, with random tokens in place of a data set:

torchrun --nproc-per-node 2 examples/torchtitan_llama.py [OPTIONS OF torchtitan, as --training.steps 20]
"""

import on_cpu  # for machines without a GPU  # isort: skip
import sys
from dataclasses import dataclass

import torch
from torchtitan import train
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3.config_registry import llama3_debugmodel


class Tokens(BaseDataLoader):
    """Random ones, the same in every run; of its own for each data-parallel rank."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        vocabulary: int = 2048

    def __init__(self, config, *, dp_rank, seq_len, local_batch_size, **others):
        self.shape, self.vocabulary = (local_batch_size, seq_len + 1), config.vocabulary
        self.random = torch.Generator().manual_seed(dp_rank)

    def __iter__(self):
        while True:
            tokens = torch.randint(self.vocabulary, self.shape, generator=self.random)
            yield {"input": tokens[:, :-1]}, tokens[:, 1:]

    def state_dict(self):
        return {"random": self.random.get_state()}

    def load_state_dict(self, state):
        if state:
            self.random.set_state(state["random"])


class NoTokenizer(BaseTokenizer):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config, **others):
        super().__init__()

    def encode(self, *args, **kwargs):
        raise NotImplementedError("the data are tokens")

    decode = get_vocab_size = encode


def small():
    config = llama3_debugmodel()
    config.dataloader, config.tokenizer = Tokens.Config(), NoTokenizer.Config()
    config.training.local_batch_size, config.training.seq_len, config.training.steps = 2, 64, 4
    config.training.disable_cuda_graphs = True
    config.validator.enable = False
    config.debug.seed, config.debug.enable_structured_logging = 0, False
    config.comm.trace_buf_size = 0
    for layer in config.model_spec.model.layers:  # FlexAttention has no backward on CPUs
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    return config


if __name__ == "__main__":
    sys.modules["torchtitan_llama"] = sys.modules["__main__"]
    sys.argv[1:1] = ["--module", "torchtitan_llama", "--config", "small"]
    train.main()
