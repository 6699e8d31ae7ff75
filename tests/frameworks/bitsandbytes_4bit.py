"""QLoRA: a small Llama in bitsandbytes' four bits with peft's adapters, by accelerate: bitsandbytes_4bit.py 1|2, the
version of FSDP."""

import on_cpu  # for machines without a GPU  # isort: skip
import sys

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.utils import set_seed
from peft import LoraConfig, get_peft_model
from transformers import BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

VOCABULARY, LENGTH, STEPS = 256, 16, 4


def build():
    """Saved and loaded, as transformers quantizes what it loads."""
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4
    )
    LlamaForCausalLM(config).save_pretrained("llama")
    four_bits = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=torch.float32,
        bnb_4bit_quant_storage=torch.float32,
    )
    model = LlamaForCausalLM.from_pretrained("llama", quantization_config=four_bits, dtype=torch.float32)
    return get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))


def main():
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=int(sys.argv[1]),
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        use_orig_params=True if sys.argv[1] == "1" else None,
    )
    accelerator = Accelerator(fsdp_plugin=plugin)
    set_seed(0)
    with accelerator.main_process_first():
        model = build()
    if sys.argv[1] == "1":  # FSDP1's optimizer is made of the prepared model
        model = accelerator.prepare(model)
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-3)
    model, optimizer = accelerator.prepare(model, optimizer)
    data = torch.Generator().manual_seed(accelerator.process_index)
    for _ in range(STEPS):
        tokens = torch.randint(VOCABULARY, (2, LENGTH), generator=data).to(accelerator.device)
        loss = model(input_ids=tokens, labels=tokens).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        accelerator.print(f"loss {loss.item()!r}", flush=True)
    accelerator.end_training()


if __name__ == "__main__":
    main()
