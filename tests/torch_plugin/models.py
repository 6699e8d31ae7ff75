"""Small models sharded by plain FSDP, awkward on purpose: dim-0 sizes that no rank count divides, a one-element
parameter (so that some ranks hold an empty shard), norms, biases, a tied head.  Nothing here knows of FCDP."""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

import compat
from place import DEVICE

IN, OUT, BATCH = 11, 5, 6


class Block(nn.Module):
    def __init__(self, dim, lora=0, dropout=0.0):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 3 * dim + 5)
        self.down = nn.Linear(3 * dim + 5, dim)
        self.gate = nn.Parameter(torch.ones(1))
        self.dropout = dropout
        if lora:
            self.lora_a = nn.Linear(dim, lora, bias=False)
            self.lora_b = nn.Linear(lora, dim, bias=False)

    def forward(self, x):
        h = self.down(F.gelu(self.up(self.norm(x))))
        if hasattr(self, "lora_a"):
            h = h + self.lora_b(self.lora_a(x))
        if self.dropout:
            h = F.dropout(h, self.dropout, self.training)
        return x + self.gate * h


class Net(nn.Module):
    """`order`, an attribute, is the sequence of blocks that a forward runs: repeats and omissions are allowed."""

    def __init__(self, dim=24, n_blocks=3, lora=0, dropout=0.0, checkpoint_around=None):
        super().__init__()
        self.embed = nn.Linear(IN, dim)
        self.blocks = nn.ModuleList(Block(dim, lora, dropout) for _ in range(n_blocks))
        self.head = nn.Linear(dim, OUT)
        self.order = list(range(n_blocks))
        self.checkpoint_around = checkpoint_around

    def forward(self, x):
        x = self.embed(x)
        for i in self.order:
            block = self.blocks[i]
            if self.checkpoint_around is not None and torch.is_grad_enabled():
                x = checkpoint(block, x, use_reentrant=self.checkpoint_around == "reentrant")
            else:
                x = block(x)
        return self.head(x)


class Encoder(nn.Module):
    def __init__(self, dim, n_blocks):
        super().__init__()
        self.embed = nn.Linear(IN, dim)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(n_blocks))

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return x


class EncoderDecoder(nn.Module):
    def __init__(self, dim=24, n_blocks=2, encoder_without_grad=False):
        super().__init__()
        self.encoder = Encoder(dim, n_blocks)
        self.decoder = nn.ModuleList(Block(dim) for _ in range(n_blocks))
        self.head = nn.Linear(dim, OUT)
        self.encoder_without_grad = encoder_without_grad

    def forward(self, x):
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.encoder_without_grad):
            x = self.encoder(x)
        for block in self.decoder:
            x = block(x)
        return self.head(x)


class TiedLM(nn.Module):
    """A byte-level model whose head is its embedding."""

    vocab = 37

    def __init__(self, dim=24, n_blocks=2):
        super().__init__()
        self.embed = nn.Embedding(self.vocab, dim)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(n_blocks))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, self.vocab, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


BF16_COMPUTE = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def world_mesh():
    return init_device_mesh(DEVICE.type, (torch.distributed.get_world_size(),))


def shard(model, blocks=None, mesh=None, root=None, **kwargs):
    """One FSDP2 group for each block, one for the rest.  `root` overrides arguments for the root alone."""
    mesh = mesh or world_mesh()
    for block in model.blocks if blocks is None else blocks:
        fully_shard(block, mesh=mesh, **kwargs)
    root_kwargs = {**kwargs, **(root or {})}
    if root is None and kwargs.get("reshard_after_forward") is not None:
        root_kwargs.pop("reshard_after_forward")
    fully_shard(model, mesh=mesh, **root_kwargs)
    compat.sum_only(model)
    return model


def wrap(model, blocks=True, **kwargs):
    """By FSDP1: one flat parameter for each block, one for the rest."""
    kwargs.setdefault("device_id", DEVICE)
    if blocks:
        for i, block in enumerate(model.blocks):
            model.blocks[i] = FullyShardedDataParallel(block, **kwargs)
    return FullyShardedDataParallel(model, **kwargs)


def train_only(model, *words):
    """Freezes every parameter whose name has none of the words."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(any(word in name for word in words))
    return model


def trainable(model):
    return [p for p in model.parameters() if p.requires_grad]
