"""Each of peft's methods on a small Llama of its own, sharded by FSDP2, one model after another."""

import on_cpu  # for machines without a GPU  # isort: skip
import sys

import peft
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

VOCABULARY, LENGTH, STEPS = 256, 16, 3
LINEAR = {"target_modules": ["q_proj", "v_proj", "down_proj"]}
METHODS = {  # without AdaLoRA and VB-LoRA, which do not train on FSDP2's parameters, with or without FCDP
    "LoRA": peft.LoraConfig(r=4, **LINEAR),
    "DoRA": peft.LoraConfig(r=4, use_dora=True, **LINEAR),
    "rsLoRA": peft.LoraConfig(r=4, use_rslora=True, **LINEAR),
    "LoHa": peft.LoHaConfig(r=4, **LINEAR),
    "LoKr": peft.LoKrConfig(r=4, **LINEAR),
    "OFT": peft.OFTConfig(oft_block_size=4, **LINEAR),
    "BOFT": peft.BOFTConfig(boft_block_size=4, **LINEAR),
    "IA3": peft.IA3Config(feedforward_modules=["down_proj"], **LINEAR),
    "VeRA": peft.VeraConfig(r=4, target_modules=["q_proj", "v_proj"]),
    "FourierFT": peft.FourierFTConfig(n_frequency=50, **LINEAR),
    "HRA": peft.HRAConfig(r=4, **LINEAR),
    "LN tuning": peft.LNTuningConfig(target_modules=["input_layernorm", "post_attention_layernorm"]),
    "prompt tuning": peft.PromptTuningConfig(num_virtual_tokens=4),
    "prefix tuning": peft.PrefixTuningConfig(num_virtual_tokens=4),
    "P-tuning": peft.PromptEncoderConfig(num_virtual_tokens=4, encoder_hidden_size=16),
    "LLaMA-Adapter": peft.AdaptionPromptConfig(adapter_len=4, adapter_layers=2),
}


def build(method):
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4
    )
    method.task_type = "CAUSAL_LM"
    model = peft.get_peft_model(LlamaForCausalLM(config), method)
    for layer in [m for m in model.modules() if type(m).__name__ == "LlamaDecoderLayer"]:
        fully_shard(layer)
    return fully_shard(model)


def train(model):
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)
    data = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(STEPS):
        tokens = torch.randint(VOCABULARY, (2, LENGTH), generator=data)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"loss {loss.item()!r}", flush=True)


def main():
    dist.init_process_group("gloo")
    models = []  # all of them live on, for what looks at them afterwards
    for name in sys.argv[1:] or METHODS:
        torch.manual_seed(0)
        print(f"{name}:", flush=True)
        models.append(build(METHODS[name]))
        train(models[-1])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
