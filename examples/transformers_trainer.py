"""Trains a small Llama with transformers' Trainer over FSDP2: gradients accumulated, evaluations, sharded checkpoints.

torchrun --nproc-per-node 2 examples/transformers_trainer.py [--resume CHECKPOINT]
"""

import on_cpu  # for machines without a GPU  # isort: skip
import argparse
import tempfile

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

VOCABULARY, LENGTH = 512, 32


class Tokens(Dataset):
    """Random ones, the same in every run."""

    def __init__(self, n, seed):
        self.data = torch.randint(VOCABULARY, (n, LENGTH), generator=torch.Generator().manual_seed(seed))

    def __len__(self):
        return len(self.data)

    def __getitem__(self, i):
        return {"input_ids": self.data[i], "labels": self.data[i]}


def train(out, options):
    settings = TrainingArguments(
        output_dir=out,
        fsdp=True,
        fsdp_config={"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"], "state_dict_type": "SHARDED_STATE_DICT"},
        max_steps=options.steps,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        eval_strategy="steps",
        eval_steps=3,
        save_strategy="steps" if options.out else "no",
        save_steps=3,
        learning_rate=1e-3,
        logging_steps=1,
        report_to="none",
        disable_tqdm=True,
        seed=0,
    )
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=128, intermediate_size=384, num_hidden_layers=4, num_attention_heads=4
    )
    torch.manual_seed(0)
    trainer = Trainer(
        LlamaForCausalLM(config), settings, train_dataset=Tokens(256, seed=1), eval_dataset=Tokens(16, seed=2)
    )
    trainer.train(resume_from_checkpoint=options.resume)
    if trainer.is_world_process_zero():
        for entry in trainer.state.log_history:
            for key in ("loss", "grad_norm", "eval_loss"):
                if key in entry:
                    print(f"{key} {entry[key]!r}", flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default=None, help="where checkpoints go (default: a folder that goes with the job)")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--resume", metavar="CHECKPOINT")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        train(options.out or folder, options)


if __name__ == "__main__":
    main()
