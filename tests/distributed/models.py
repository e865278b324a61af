"""A small language model for whole training steps; nothing in it depends on ranks."""

from __future__ import annotations

import functools

import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.distributed.modules import Attention

VOCABULARY = 17


class Model(nn.Module):
    """Embedding, two blocks of attention and MLP, and the loss."""

    def __init__(self, context_fn=None, checkpointed=False, dropout=0.0, reentrant=False):
        super().__init__()
        linear = functools.partial(nn.Linear, bias=False)
        self.embedding, self.head = nn.Embedding(VOCABULARY, 32), linear(32, VOCABULARY)
        self.attention = nn.ModuleList(Attention(linear) for _ in range(2))
        self.mlp = nn.ModuleList(nn.Sequential(linear(32, 64), nn.GELU()) for _ in range(2))
        self.down = nn.ModuleList(linear(64, 32) for _ in range(2))
        self.checkpointed, self.dropout = checkpointed, dropout
        self.options = {"use_reentrant": reentrant}
        if context_fn is not None:
            self.options["context_fn"] = context_fn

    def block(self, x, i: int):
        if self.dropout:
            query = x.unflatten(-1, (4, 8)).transpose(1, 2)
            mixed = F.scaled_dot_product_attention(query, query, query, dropout_p=self.dropout)
            x = x + mixed.transpose(1, 2).flatten(2)
        x = x + self.attention[i](x)
        return x + self.down[i](self.mlp[i](x))

    def forward(self, tokens, labels):
        x = self.embedding(tokens)
        for i in range(2):
            if self.checkpointed:
                x = checkpoint(self.block, x, i, **self.options)
            else:
                x = self.block(x, i)
        logits = self.head(x).flatten(0, 1)
        if logits.dtype.itemsize == 2:
            logits = logits.float()  # a 16-bit loss has steps of half a percent
        return F.cross_entropy(logits, labels.flatten(), reduction="mean")
