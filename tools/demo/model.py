"""A small Llama-style language model: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

Ordinary single-device PyTorch. Positions are an input, so that a caller may hand over any
part of a sequence.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class ModelConfig:
    vocab_size: int = 256
    dim: int = 128
    n_layers: int = 3
    n_heads: int = 4
    n_kv_heads: int = 2
    ffn_dim: int = 384
    rope_theta: float = 10_000.0


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of x, (B, H, S, D), by angles of shape (B, 1, S, D/2)."""
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__()
        self.head_dim = cfg.dim // cfg.n_heads
        self.wq = nn.Linear(cfg.dim, cfg.n_heads * self.head_dim, bias=False)
        self.wk = nn.Linear(cfg.dim, cfg.n_kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(cfg.dim, cfg.n_kv_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(cfg.n_heads * self.head_dim, cfg.dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        # (B, S, H * D) -> (B, H, S, D)
        q, k, v = (
            proj(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for proj in (self.wq, self.wk, self.wv)
        )
        out = F.scaled_dot_product_attention(
            rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True, enable_gqa=True
        )
        return self.wo(out.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__()
        self.w_gate = nn.Linear(cfg.dim, cfg.ffn_dim, bias=False)
        self.w_up = nn.Linear(cfg.dim, cfg.ffn_dim, bias=False)
        self.w_down = nn.Linear(cfg.ffn_dim, cfg.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w_down(F.silu(self.w_gate(x)) * self.w_up(x))


class Block(nn.Module):
    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__()
        self.attn_norm = nn.RMSNorm(cfg.dim, eps=1e-5)
        self.attn = Attention(cfg)
        self.ffn_norm = nn.RMSNorm(cfg.dim, eps=1e-5)
        self.ffn = FeedForward(cfg)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attn(self.attn_norm(x), cos, sin)
        return x + self.ffn(self.ffn_norm(x))


class Transformer(nn.Module):
    inv_freq: Tensor

    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__()
        self.embed = nn.Embedding(cfg.vocab_size, cfg.dim)
        self.blocks = nn.ModuleList(Block(cfg) for _ in range(cfg.n_layers))
        self.norm = nn.RMSNorm(cfg.dim, eps=1e-5)
        self.head = nn.Linear(cfg.dim, cfg.vocab_size, bias=False)
        half = cfg.dim // cfg.n_heads // 2
        inv_freq = cfg.rope_theta ** (-torch.arange(half, dtype=torch.float32) / half)
        self.register_buffer("inv_freq", inv_freq, persistent=False)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Logits (B, S, vocab) for tokens and positions of shape (B, S)."""
        angles = positions[:, None, :, None] * self.inv_freq
        cos, sin = angles.cos(), angles.sin()
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.head(self.norm(x))


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean next-token loss of logits (B, S, vocab) against targets (B, S)."""
    return F.cross_entropy(logits.float().transpose(1, 2), targets)


@torch.no_grad()
def generate(
    model: Transformer, prompt: Tensor, n_tokens: int, *, temperature: float = 0.7, seed: int = 0
) -> Tensor:
    """Sample n_tokens after a prompt of shape (S,). No KV cache: the model is small."""
    rng = torch.Generator(device=prompt.device).manual_seed(seed)
    tokens = prompt[None]
    for _ in range(n_tokens):
        positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
        logits = model(tokens, positions)[0, -1].float()
        choice = torch.multinomial((logits / temperature).softmax(-1), 1, generator=rng)
        tokens = torch.cat((tokens, choice[None]), dim=1)
    return tokens[0]
