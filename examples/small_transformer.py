"""What fsdp1.py, fsdp2.py and lightning_fabric.py train: a small transformer, by its loss on random tokens."""

import torch
import torch.nn.functional as F
from torch import nn

VOCABULARY, DIM, LAYERS, LENGTH = 512, 128, 4, 32


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, DIM)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(DIM, 4, 4 * DIM, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(LAYERS)
        )
        self.head = nn.Linear(DIM, VOCABULARY, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], device=x.device)
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        return self.head(x)


def next_loss(model, data, device):
    """On two sequences drawn from `data`, a generator."""
    tokens = torch.randint(VOCABULARY, (2, LENGTH + 1), generator=data).to(device)
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
