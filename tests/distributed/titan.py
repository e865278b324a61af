"""A Llama as in torchtitan: plain activations, and attention in its own module, to which parallel
styles are applied. Nothing in it depends on ranks."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

VOCABULARY, LENGTH, DIM, HEADS, KEY_HEADS = 31, 32, 32, 4, 2


class InnerAttention(nn.Module):
    """The only module that calls attention."""

    def forward(self, query, key, value, *, scale=None):
        return F.scaled_dot_product_attention(
            query, key, value, scale=scale, is_causal=True, enable_gqa=True
        )


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.head_dim = DIM // HEADS
        self.wq = nn.Linear(DIM, DIM, bias=False)
        self.wk, self.wv = (nn.Linear(DIM, KEY_HEADS * self.head_dim, bias=False) for _ in "kv")
        self.wo = nn.Linear(DIM, DIM, bias=False)
        self.inner_attention = InnerAttention()

    def forward(self, x, turns):
        batch, length = x.shape[:2]
        query, key, value = (
            project(x).view(batch, length, -1, self.head_dim)
            for project in (self.wq, self.wk, self.wv)
        )
        query, key = turn(query, turns), turn(key, turns)
        out = self.inner_attention(*(x.transpose(1, 2) for x in (query, key, value)))
        return self.wo(out.transpose(1, 2).reshape(batch, length, -1))


class FeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.w1, self.w3 = (nn.Linear(DIM, 2 * DIM, bias=False) for _ in "13")
        self.w2 = nn.Linear(2 * DIM, DIM, bias=False)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.feed_forward = Attention(), FeedForward()
        self.attention_norm, self.ffn_norm = (nn.RMSNorm(DIM, eps=1e-5) for _ in range(2))

    def forward(self, x, turns):
        x = x + self.attention(self.attention_norm(x), turns)
        return x + self.feed_forward(self.ffn_norm(x))


class Llama(nn.Module):
    """``turns`` is a buffer of all positions, which a block of context_parallel cuts."""

    def __init__(self, layers: int = 2):
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCABULARY, DIM)
        self.layers = nn.ModuleDict({str(i): Block() for i in range(layers)})
        self.norm, self.output = nn.RMSNorm(DIM, eps=1e-5), nn.Linear(DIM, VOCABULARY, bias=False)
        self.register_buffer("turns", angles(DIM // HEADS), persistent=False)

    def forward(self, tokens):
        # A pipeline stage has only some of these modules.
        x = self.tok_embeddings(tokens) if self.tok_embeddings is not None else tokens
        for layer in self.layers.values():
            x = layer(x, self.turns)
        return self.output(self.norm(x)) if self.output is not None else x


def angles(head_dim: int) -> torch.Tensor:
    """``(LENGTH, head_dim / 2, 2)``: cosine and sine of every position."""
    rates = 10.0 ** -torch.arange(0, head_dim, 2).div(head_dim)
    angle = torch.arange(LENGTH)[:, None] * rates
    return torch.stack([angle.cos(), angle.sin()], -1)


def turn(x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of ``(B, L, H, D)``."""
    cosine, sine = turns[:, None].unbind(-1)
    first, second = x.unflatten(-1, (-1, 2)).unbind(-1)
    turned = first * cosine - second * sine, first * sine + second * cosine
    return torch.stack(turned, -1).flatten(-2)
