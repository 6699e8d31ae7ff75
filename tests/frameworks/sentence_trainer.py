"""Trains a small BERT with sentence-transformers' trainer over FSDP2, on pairs of random words."""

import on_cpu  # for machines without a GPU  # isort: skip
import random

import torch
from datasets import Dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.losses import MultipleNegativesRankingLoss
from sentence_transformers.models import Pooling, Transformer
from transformers import BertConfig, BertModel, BertTokenizer

WORDS = [f"word{i}" for i in range(250)]


def write_files():
    """Of a model and its tokenizer, so that nothing is fetched."""
    with open("vocab.txt", "w") as stream:
        stream.write("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]))
    config = BertConfig(
        vocab_size=5 + len(WORDS),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    BertModel(config).save_pretrained("bert")
    BertTokenizer("vocab.txt").save_pretrained("bert")


def main():
    torch.manual_seed(0)
    draw = random.Random(0)
    sentences = [[" ".join(draw.choices(WORDS, k=8)) for _ in range(64)] for _ in range(2)]
    settings = SentenceTransformerTrainingArguments(
        output_dir="out",
        fsdp=True,
        fsdp_config={"transformer_layer_cls_to_wrap": ["BertLayer"]},
        max_steps=4,
        per_device_train_batch_size=4,
        learning_rate=1e-3,
        save_strategy="no",
        logging_steps=1,
        report_to="none",
        disable_tqdm=True,
        seed=0,
    )
    with settings.main_process_first(local=False):
        if settings.process_index == 0:
            write_files()
        model = SentenceTransformer(modules=[Transformer("bert"), Pooling(64)], device="cpu")
    trainer = SentenceTransformerTrainer(
        model,
        settings,
        train_dataset=Dataset.from_dict({"anchor": sentences[0], "positive": sentences[1]}),
        loss=MultipleNegativesRankingLoss(model),
    )
    trainer.train()
    if trainer.is_world_process_zero():
        for entry in trainer.state.log_history:
            if "loss" in entry:
                print(f"loss {entry['loss']!r}", flush=True)


if __name__ == "__main__":
    main()
