#!/usr/bin/env python3
"""Records what a training run allocates, for fcdp-replay: python tools/replay/record.py [NAME ...] --out
tools/replay/traces

Allocations and frees are PyTorch's own, of every tensor and temporary, from its profiler, which sees those of
the CPU too; sizes and order are real, addresses are not kept. A trace is gzipped text: `# ` lines say what it
is, then one event per line: `SIZE STREAM` is an allocation (its number is how many came before it), `-NUMBER`
the free of one. Work under record_function(SECOND_STREAM) is on a stream of its own.
"""

import argparse
import gzip
import pathlib

import torch
from torch import nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile, record_function

SECOND_STREAM = "second stream"


class Block(nn.Module):
    def __init__(self, dim, heads, rank=0):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)
        self.lora = (
            nn.ModuleList([nn.Linear(dim, rank, bias=False), nn.Linear(rank, 3 * dim, bias=False)]) if rank else None
        )

    def forward(self, x):
        batch, length, dim = x.shape
        h = self.norm1(x)
        qkv = self.qkv(h)
        if self.lora is not None:
            qkv = qkv + self.lora[1](self.lora[0](h))
        q, k, v = qkv.view(batch, length, 3, self.heads, dim // self.heads).permute(2, 0, 3, 1, 4)
        x = x + self.out(
            F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(batch, length, dim)
        )
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, layers, dim, heads, vocabulary=4096, length=512, rank=0):
        super().__init__()
        self.words, self.places = nn.Embedding(vocabulary, dim), nn.Embedding(length, dim)
        self.blocks = nn.ModuleList(Block(dim, heads, rank) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, vocabulary, bias=False)
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(not rank or "lora" in name)

    def forward(self, tokens):
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def loss_of(model, batch, length):
    tokens = torch.randint(4096, (batch, length + 1))
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def train(model, shapes, clip=False):
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
    for batch, length in shapes:
        loss_of(model, batch, length).backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def demo():
    """of the demo job's dimensions, but for a vocabulary of 4096: 8 layers of 504, sequences of 64"""
    train(GPT(8, 504, 7, vocabulary=4096), [(1, 64)] * 4)


def gpt12():
    """12 layers of 512, 4 sequences of 256, gradient clipping"""
    train(GPT(12, 512, 8), [(4, 256)] * 4, clip=True)


def lora():
    """12 layers of 512, frozen, LoRA of rank 16"""
    train(GPT(12, 512, 8, rank=16), [(4, 256)] * 4)


def lengths():
    """8 layers of 384, another sequence length at every step"""
    train(GPT(8, 384, 6), [(4, length) for length in (256, 96, 320, 160, 512, 64, 288, 448, 128, 384)])


def evaluation():
    """8 layers of 384, evaluations with larger batches between the steps"""
    model = GPT(8, 384, 6)
    for _ in range(2):
        train(model, [(4, 256)] * 2)
        with torch.no_grad():
            for _ in range(2):
                loss_of(model, 12, 256)


def streams():
    """8 layers of 384, on features that a second stream makes two batches ahead"""
    model, projection, ahead = GPT(8, 384, 6), nn.Linear(512, 384), []

    def produce():
        with torch.no_grad(), record_function(SECOND_STREAM):
            ahead.append(projection(torch.randn(4, 256, 512)).relu())

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    produce(), produce()
    for _ in range(4):
        hidden = ahead.pop(0)
        produce()
        for block in model.blocks:
            hidden = block(hidden)
        model.head(model.norm(hidden)).logsumexp(-1).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def gpt6():
    """6 layers of 640, another sequence length at every step"""
    train(GPT(6, 640, 10), [(3, length) for length in (200, 150, 333, 77, 256, 410, 128)])


def gpt10():
    """10 layers of 448, a vocabulary of 8000, 2 sequences of 192, gradient clipping"""
    train(GPT(10, 448, 7, vocabulary=8000), [(2, 192)] * 3, clip=True)


def gpt5():
    """5 layers of 768, another sequence length at every step, gradient clipping"""
    train(GPT(5, 768, 12), [(2, length) for length in (512, 100, 384, 256, 480, 60)], clip=True)


def lora8():
    """8 layers of 576, frozen, LoRA of rank 8, another sequence length at every step"""
    train(GPT(8, 576, 9, rank=8), [(3, length) for length in (128, 300, 200, 400)])


CHOSEN_ON = (demo, gpt12, lora, lengths, evaluation, streams)  # the allocator's placement was
OTHERS = (gpt6, gpt10, gpt5, lora8)  # it was checked with these; in a folder of their own
RUNS = {run.__name__: run for run in CHOSEN_ON + OTHERS}


def allocations(events):
    """(time, pointer, signed bytes, stream) of every allocation and free below the profiler's events."""
    found, stack = [], [(event, 0) for event in events]
    while stack:
        event, stream = stack.pop()
        stream = 1 if event.name == SECOND_STREAM else stream
        stack.extend((child, stream) for child in event.children)
        if event.tag == torch._C._profiler._EventType.Allocation:
            fields = event.extra_fields
            found.append((event.start_time_ns, fields.ptr, fields.alloc_size, stream))
    return sorted(found)


def record(run, path):
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    lines, live, count = [], {}, 0
    for _, pointer, size, stream in allocations(profiler.profiler.kineto_results.experimental_event_tree()):
        if size > 0:
            lines.append(f"{size} {stream}")
            live[pointer] = count
            count += 1
        elif pointer in live:
            lines.append(f"-{live.pop(pointer)}")
    header = [
        f"# {run.__name__}: {run.__doc__}; torch {torch.__version__.split('+')[0]}",
        f"# {len(lines)} events, {count} allocations",
    ]
    path.write_bytes(gzip.compress("\n".join(header + lines).encode() + b"\n", 9, mtime=0))
    print(f"{path}: {len(lines)} events, {count} allocations, {path.stat().st_size} bytes")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(RUNS)} (all)")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("tools/replay/traces"))
    arguments = parser.parse_args()
    unknown = [name for name in arguments.names if name not in RUNS]
    if unknown:
        parser.error(f"no such run: {', '.join(unknown)}; there are {', '.join(RUNS)}")
    torch.manual_seed(1)
    for name in arguments.names or RUNS:
        folder = arguments.out / "others" if RUNS[name] in OTHERS else arguments.out
        record(RUNS[name], folder / f"{name}.txt.gz")


if __name__ == "__main__":
    main()
