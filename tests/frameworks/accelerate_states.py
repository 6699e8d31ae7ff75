"""A small Llama under accelerate: evaluations between steps, save_state, and load_state into the model that has gone on
training. accelerate_states.py FSDP_VERSION PRECISION"""

import on_cpu  # for machines without a GPU  # isort: skip
import sys

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.utils import set_seed
from transformers import LlamaConfig, LlamaForCausalLM

VOCABULARY, LENGTH = 512, 32


def evaluate(accelerator, model, tokens):
    model.eval()
    with torch.no_grad():
        loss = model(input_ids=tokens, labels=tokens).loss
    accelerator.print(f"eval {loss.item()!r}", flush=True)
    model.train()


def train(accelerator, model, optimizer, data, steps):
    for _ in range(steps * accelerator.gradient_accumulation_steps):
        with accelerator.accumulate(model):
            tokens = torch.randint(VOCABULARY, (2, LENGTH), generator=data)
            loss = model(input_ids=tokens, labels=tokens).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        accelerator.print(f"loss {loss.item()!r}", flush=True)


def main():
    version, precision = int(sys.argv[1]), sys.argv[2]
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=version,
        reshard_after_forward=True if version == 2 else "FULL_SHARD",
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        state_dict_type="SHARDED_STATE_DICT",
    )
    accelerator = Accelerator(fsdp_plugin=plugin, mixed_precision=precision, gradient_accumulation_steps=2)
    set_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=96, intermediate_size=256, num_hidden_layers=3, num_attention_heads=4
    )
    model = LlamaForCausalLM(config)
    if version == 1:  # whose parameters are other ones than the model's
        model = accelerator.prepare(model)
        optimizer = accelerator.prepare(torch.optim.AdamW(model.parameters(), lr=1e-3))
    else:
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    data = torch.Generator().manual_seed(accelerator.process_index)
    held_out = torch.randint(VOCABULARY, (2, LENGTH), generator=data)
    train(accelerator, model, optimizer, data, 2)
    evaluate(accelerator, model, held_out)
    accelerator.save_state("state")
    train(accelerator, model, optimizer, data, 2)
    evaluate(accelerator, model, held_out)
    accelerator.load_state("state")
    evaluate(accelerator, model, held_out)
    train(accelerator, model, optimizer, data, 2)
    evaluate(accelerator, model, held_out)
    accelerator.end_training()


if __name__ == "__main__":
    main()
