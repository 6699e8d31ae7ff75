"""Trains LoRA adapters (peft) of a small Llama with accelerate and FSDP2:

torchrun --nproc-per-node 2 examples/accelerate_lora.py
"""

import on_cpu  # for machines without a GPU  # isort: skip
import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.utils import set_seed
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

VOCABULARY, LENGTH, STEPS = 512, 32, 6


def build():
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=128, intermediate_size=384, num_hidden_layers=4, num_attention_heads=4
    )
    adapters = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    return get_peft_model(LlamaForCausalLM(config), adapters)


def main():
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["LlamaDecoderLayer"]
    )
    accelerator = Accelerator(fsdp_plugin=plugin, gradient_accumulation_steps=2)
    set_seed(0)
    model = build()
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-3)
    model, optimizer = accelerator.prepare(model, optimizer)
    data = torch.Generator().manual_seed(accelerator.process_index)
    for _ in range(STEPS * accelerator.gradient_accumulation_steps):
        with accelerator.accumulate(model):
            tokens = torch.randint(VOCABULARY, (2, LENGTH), generator=data).to(accelerator.device)
            loss = model(input_ids=tokens, labels=tokens).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        accelerator.print(f"loss {loss.item()!r}", flush=True)
    accelerator.end_training()


if __name__ == "__main__":
    main()
