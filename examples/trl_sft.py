"""Fine-tunes LoRA adapters of a small Llama with TRL's SFTTrainer over FSDP2:

torchrun --nproc-per-node 2 examples/trl_sft.py
"""

import on_cpu  # for machines without a GPU  # isort: skip
import random
import tempfile

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

WORDS = [f"word{i}" for i in range(500)]


def tokenizer():
    vocabulary = {word: i for i, word in enumerate(["<pad>", "<s>", "</s>", "<unk>", *WORDS])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def texts(n):
    draw = random.Random(1)
    return Dataset.from_dict({"text": [" ".join(draw.choices(WORDS, k=draw.randint(10, 30))) for _ in range(n)]})


def train(out):
    settings = SFTConfig(
        output_dir=out,
        fsdp=True,
        fsdp_config={"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]},
        max_steps=6,
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
    config = LlamaConfig(
        vocab_size=512, hidden_size=128, intermediate_size=384, num_hidden_layers=4, num_attention_heads=4
    )
    torch.manual_seed(0)
    trainer = SFTTrainer(
        LlamaForCausalLM(config),
        settings,
        train_dataset=texts(128),
        processing_class=tokenizer(),
        peft_config=LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM"),
    )
    trainer.train()
    if trainer.is_world_process_zero():
        for entry in trainer.state.log_history:
            if "loss" in entry:
                print(f"loss {entry['loss']!r}", flush=True)


def main():
    with tempfile.TemporaryDirectory() as out:
        train(out)


if __name__ == "__main__":
    main()
