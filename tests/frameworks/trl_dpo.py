"""TRL's DPOTrainer on a small Llama. trl_dpo.py adapters|whole: LoRA adapters, where the reference is the model without
them, or all weights, where it is a model of its own."""

import on_cpu  # for machines without a GPU  # isort: skip
import random
import sys

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import LlamaConfig, LlamaForCausalLM
from trl import DPOConfig, DPOTrainer

from trl_sft import WORDS, tokenizer


def preferences(n):
    draw = random.Random(1)

    def words():
        return " ".join(draw.choices(WORDS, k=draw.randint(4, 12)))

    return Dataset.from_dict({key: [words() for _ in range(n)] for key in ("prompt", "chosen", "rejected")})


def model():
    config = LlamaConfig(
        vocab_size=512, hidden_size=96, intermediate_size=256, num_hidden_layers=3, num_attention_heads=4
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config)


def main():
    adapters = sys.argv[1] == "adapters"
    settings = DPOConfig(
        output_dir="out",
        fsdp=True,
        fsdp_config={"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]},
        max_steps=4,
        per_device_train_batch_size=2,
        max_length=32,
        learning_rate=1e-3,
        bf16=False,
        gradient_checkpointing=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=0,
    )
    trainer = DPOTrainer(
        model(),
        None if adapters else model(),
        settings,
        train_dataset=preferences(64),
        processing_class=tokenizer(),
        peft_config=LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM") if adapters else None,
    )
    trainer.train()
    for entry in trainer.state.log_history:
        if "loss" in entry:
            print(f"loss {entry['loss']!r} {entry['rewards/margins']!r}", flush=True)


if __name__ == "__main__":
    main()
