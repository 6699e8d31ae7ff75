"""A model's shape: from options, or from Hugging Face's config.json; and what a parameter costs."""

from __future__ import annotations

import argparse
import json

from fcdp_memtrace.arguments import at_least
from fcdp_plan import _plan
from fcdp_plan.failure import Error

# Of mixed precision with AdamW, 16 bytes a parameter; docs/plan.md. other_bytes is set by the shape and the batch.
COSTS = {
    "float16": {"parameter_bytes": 2, "gradient_bytes": 2, "shard_bytes": 2, "state_bytes": 12},
    "float32": {"parameter_bytes": 4, "gradient_bytes": 4, "shard_bytes": 4, "state_bytes": 8},
}
# Fitted on three cells of the FCDP paper's Tables V and VI: docs/plan.md says which, and how.
CONSTANTS = {"usable": 0.97, "activation_bytes": 24.0, "cache": 2.0}
# Names that families of models give to the same number in config.json.
CONFIG = {
    "layers": ("num_hidden_layers", "n_layer", "num_layers"),
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "heads": ("num_attention_heads", "n_head"),
    "kv_heads": ("num_key_value_heads",),
    "head_size": ("head_dim",),
    "intermediate": ("intermediate_size", "n_inner", "ffn_dim"),
    "vocab": ("vocab_size",),
    "positions": ("n_positions",),
}
LEARNED = {"gpt2", "opt", "gpt_neo"}  # model_type of those with learned positions, biases and an MLP of two matrices


def costs(dtype: str, live_parameters: float = 0) -> dict[str, float]:
    return COSTS[dtype] | {"other_bytes": 0, "live_parameters": live_parameters}


def gpt(layers: int, hidden: int, heads: int, vocab: int, **more: float) -> dict[str, float]:
    """GPT-2's shape, unless `more` says otherwise."""
    shape = {
        "layers": layers,
        "hidden": hidden,
        "heads": heads,
        "kv_heads": heads,
        "head_size": hidden / heads,
        "intermediate": 4 * hidden,
        "vocab": vocab,
        "positions": 1024,
        "gated": 0,
        "biases": 1,
        "tied": 1,
        "lora_rank": 0,
        "sequence": 384,
        "recompute": 0,
        "scores": 0,
    }
    return shape | more


def from_config(path: str) -> dict[str, float]:
    """Of a decoder that config.json describes."""
    try:
        with open(path) as file:
            config = json.load(file)
    except (OSError, ValueError) as error:
        raise Error(f"{path}: {getattr(error, 'strerror', None) or error}") from None
    if not isinstance(config, dict):
        raise Error(f"{path} is no config.json of Hugging Face")
    found = {key: next((config[name] for name in names if config.get(name)), None) for key, names in CONFIG.items()}
    missing = [key for key in ("layers", "hidden", "heads", "vocab") if not isinstance(found[key], int)]
    if missing:
        raise Error(f"{path} does not say {', '.join(missing)}: give --{' --'.join(missing)} instead of --config")
    kind = config.get("model_type", "")
    if any(key in config for key in ("num_experts", "num_local_experts", "n_routed_experts")):
        raise Error(f"{path}: {kind or 'this model'} has experts, which fcdp-plan does not describe")
    learned = kind in LEARNED or "n_embd" in config
    shape = gpt(found["layers"], found["hidden"], found["heads"], found["vocab"])
    shape |= {key: found[key] for key in ("kv_heads", "head_size", "intermediate") if found[key]}
    return shape | {
        "positions": (found["positions"] or config.get("max_position_embeddings", 0)) if learned else 0,
        "gated": 0 if learned else 1,
        "biases": 1 if learned else 0,
        "tied": int(config.get("tie_word_embeddings", learned)),
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", metavar="config.json", help="Hugging Face's, in place of the shape")
    parser.add_argument("--layers", type=at_least(1), metavar="N", help="of a decoder of GPT-2's shape")
    parser.add_argument("--hidden", type=at_least(1), metavar="H", help="its hidden size")
    parser.add_argument("--heads", type=at_least(1), metavar="N", help="of its attention")
    parser.add_argument("--vocab", type=at_least(1), default=50257, metavar="N", help="default 50257")
    parser.add_argument("--untied", action="store_true", help="the head has weights of its own, not the embedding's")
    parser.add_argument("--sequence", type=at_least(1), default=384, metavar="TOKENS", help="default 384")
    parser.add_argument("--lora-rank", type=at_least(0), default=0, metavar="R", help="adapters on q, k, v and o")
    parser.add_argument("--recompute", action="store_true", help="activation checkpointing of each layer")
    parser.add_argument("--scores", action="store_true", help="attention is not fused: its scores are kept")
    parser.add_argument("--dtype", choices=COSTS, default="float16", help="of gathers: float16 (default), float32")


def of(args: argparse.Namespace) -> dict[str, float]:
    """The shape that the options name."""
    if args.config:
        shape = from_config(args.config)
    else:
        missing = [f"--{key}" for key in ("layers", "hidden", "heads") if getattr(args, key) is None]
        if missing:
            raise Error(f"give {', '.join(missing)}, or --config")
        if args.hidden % args.heads:
            raise Error(f"--hidden {args.hidden} is no multiple of --heads {args.heads}")
        shape = gpt(args.layers, args.hidden, args.heads, args.vocab)
    more = {"sequence": args.sequence, "lora_rank": args.lora_rank}
    more |= {"tied": 0} if args.untied else {}
    return shape | more | {"recompute": int(args.recompute), "scores": int(args.scores)}


def describe(shape: dict, batch: float, dtype: str) -> tuple[dict, list[dict]]:
    """What a parameter costs, and the regions."""
    return _plan.describe(shape, batch, CONSTANTS, costs(dtype))
