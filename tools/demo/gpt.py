"""Trains a small byte-level GPT with plain FSDP2. Start it with torchrun; --help lists what can be varied.

Text: --text FILE, else the licences that Debian and Ubuntu ship (/usr/share/common-licenses), else the sources of
Python's own library. Files are read in sorted order, so every rank sees the same bytes.
"""

import argparse
import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

TEXT_BYTES = 1 << 20
VOCABULARY = 256


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--steps", type=int, default=20, help="optimizer steps")
    add("--batch", type=int, default=1, help="sequences per rank and micro-batch")
    add("--seq", type=int, default=64, help="bytes per sequence")
    add("--layers", type=int, default=8)
    add(
        "--dim",
        type=int,
        default=504,
        help="a multiple of --heads (default %(default)s: a block's float32 fill 2 MiB pages well)",
    )
    add("--heads", type=int, default=7)
    add("--lr", type=float, default=3e-4)
    add("--micro-batches", type=int, default=1, help="forward and backward passes per optimizer step")
    add("--reshard-after-forward", type=reshard, default=True, metavar="true|false|RANKS")
    add("--hsdp", action="store_true", help="shard within a node, replicate between nodes")
    add("--frozen", type=int, default=0, metavar="LAYERS", help="do not train the embeddings and the first LAYERS")
    add("--lora", type=int, default=0, metavar="RANK", help="freeze everything, train adapters of this rank")
    add("--replicate-frozen", action="store_true", help="do not shard what is frozen: each rank holds all of it")
    add("--bf16", action="store_true", help="compute and gather in bfloat16")
    add("--text", metavar="FILE", help="train on this file")
    add("--seed", type=int, default=0)
    add(
        "--device", choices=("auto", "cpu"), default="auto", help="auto: the accelerator that torch finds, else the CPU"
    )
    return parser.parse_args()


def reshard(text):
    """What fully_shard takes: a flag, or the number of ranks that keep the parameters between them."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    return int(text)


class Linear(nn.Module):
    """A linear layer, with a low-rank adapter if rank > 0."""

    def __init__(self, n_in, n_out, rank):
        super().__init__()
        self.base = nn.Linear(n_in, n_out)
        self.down = nn.Linear(n_in, rank, bias=False) if rank else None
        self.up = nn.Linear(rank, n_out, bias=False) if rank else None
        if rank:
            nn.init.zeros_(self.up.weight)

    def forward(self, x):
        y = self.base(x)
        return y if self.down is None else y + self.up(self.down(x))


class Block(nn.Module):
    def __init__(self, dim, heads, rank):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = Linear(dim, 3 * dim, rank), Linear(dim, dim, rank)
        self.widen, self.narrow = Linear(dim, 4 * dim, rank), Linear(4 * dim, dim, rank)

    def forward(self, x):
        batch, length, dim = x.shape
        heads = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, dim // self.heads)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, dim))
        return x + self.narrow(F.gelu(self.widen(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, args.dim)
        self.positions = nn.Embedding(args.seq, args.dim)
        self.blocks = nn.ModuleList(Block(args.dim, args.heads, args.lora) for _ in range(args.layers))
        self.norm = nn.LayerNorm(args.dim)
        self.head = nn.Linear(args.dim, VOCABULARY, bias=False)

    def forward(self, x):
        x = self.tokens(x) + self.positions.weight[: x.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def freeze(model, args):
    if args.lora:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(".down." in name or ".up." in name)
    elif args.frozen:
        for part in (model.tokens, model.positions, *model.blocks[: args.frozen]):
            part.requires_grad_(False)


def shard(model, args, device):
    local = int(os.environ["LOCAL_WORLD_SIZE"])
    shape = (dist.get_world_size() // local, local) if args.hsdp else (dist.get_world_size(),)
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=("nodes", "ranks")[-len(shape) :])
    how = {
        "mesh": mesh,
        "reshard_after_forward": args.reshard_after_forward,
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16 if args.bf16 else None),
    }
    if args.replicate_frozen:
        how["ignored_params"] = {p for p in model.parameters() if not p.requires_grad}
    for block in model.blocks:
        fully_shard(block, **how)
    fully_shard(model, **how)
    if device.type == "cpu":
        if not hasattr(model, "set_force_sum_reduction_for_comms"):
            sys.exit(
                f"FSDP2 on CPUs needs torch 2.8 or later, this is {torch.__version__}: gloo cannot average gradients"
            )
        model.set_force_sum_reduction_for_comms(True)


def text_files():
    """Candidates in a fixed order: regular files only, as links repeat their targets."""
    for folder, ending in (("/usr/share/common-licenses", ""), (os.path.dirname(os.__file__), ".py")):
        paths = sorted(os.path.join(folder, n) for n in (os.listdir(folder) if os.path.isdir(folder) else ()))
        yield from (p for p in paths if p.endswith(ending) and os.path.isfile(p) and not os.path.islink(p))


def load_text(path):
    data = b""
    for name in [path] if path else text_files():
        with open(name, "rb") as f:
            data += f.read()
        if len(data) >= TEXT_BYTES and not path:
            break
    return torch.frombuffer(bytearray(data if path else data[:TEXT_BYTES]), dtype=torch.uint8).long()


def batches(text, args, device):
    """Random windows of the text; each rank draws its own, the same in every run."""
    if len(text) < args.seq + 2:
        sys.exit(f"the text has {len(text)} bytes, --seq {args.seq} needs {args.seq + 2}")
    generator = torch.Generator().manual_seed(args.seed * 1009 + dist.get_rank())
    while True:
        starts = torch.randint(len(text) - args.seq - 1, (args.batch,), generator=generator)
        windows = torch.stack([text[s : s + args.seq + 1] for s in starts.tolist()]).to(device)
        yield windows[:, :-1], windows[:, 1:]


def train_step(model, optimizer, data, args):
    """Returns the mean loss of this rank's micro-batches; gradients are reduced with the last one only."""
    total = 0.0
    for i in range(args.micro_batches):
        model.set_requires_gradient_sync(i == args.micro_batches - 1)
        x, y = next(data)
        loss = F.cross_entropy(model(x).flatten(0, 1).float(), y.flatten()) / args.micro_batches
        loss.backward()
        total += loss.detach()
    optimizer.step()
    optimizer.zero_grad()
    return total


def device_of(args):
    if args.device == "cpu" or not torch.accelerator.is_available():
        return torch.device("cpu")
    index = int(os.environ["LOCAL_RANK"]) % torch.accelerator.device_count()
    device = torch.device(torch.accelerator.current_accelerator().type, index)
    torch.get_device_module(device).set_device(device)
    return device


def main():
    args = arguments()
    device = device_of(args)
    dist.init_process_group("gloo" if device.type == "cpu" else None)
    torch.manual_seed(args.seed)
    model = GPT(args)
    freeze(model, args)
    n_parameters = sum(p.numel() for p in model.parameters())
    model.to(device)
    shard(model, args, device)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=args.lr)
    text = load_text(args.text)
    is_first = dist.get_rank() == 0
    if is_first:
        print(
            f"{n_parameters / 1e6:.1f} M parameters, {len(text)} bytes of text, {dist.get_world_size()} ranks on {device.type}"
        )
    data = batches(text, args, device)
    for step in range(1, args.steps + 1):
        loss = train_step(model, optimizer, data, args)
        if is_first:
            print(f"step {step} loss {loss.item()!r}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
