"""Attention with a mask and dropout by the textbook formula, in float64: the exact results of
blocks."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.nn.attention import sdpa_kernel

from tests.distributed.reference import KERNELS

# A mask's dims next to scores (B, H, Sq, Sk): True if it has the whole dim, otherwise 1.
BROADCASTS = {
    "whole": (1, 1, 1, 1),
    "batch": (1, 0, 1, 1),
    "heads": (0, 1, 1, 1),
    "rows and keys": (0, 0, 1, 1),
    "padding": (1, 0, 0, 1),
    "keys": (0, 0, 0, 1),
    "keys per head": (0, 1, 0, 1),
    "rows": (0, 0, 1, 0),
    "batch and heads": (1, 1, 0, 0),
    "one": (0, 0, 0, 0),
}


@dataclass(frozen=True)
class Case:
    """One call with a mask; its tensors come from torch's generator."""

    scores: tuple[int, int, int, int] = (2, 4, 13, 21)
    key_heads: int = 4
    dim: int = 16
    value_dim: int = 16
    dtype: torch.dtype = torch.float32
    scale: float = 0.3

    def tensors(self) -> list[torch.Tensor]:
        """query, key, value and the output's gradient."""
        batch, heads, rows, keys = self.scores
        shapes = (
            (batch, heads, rows, self.dim),
            (batch, self.key_heads, keys, self.dim),
            (batch, self.key_heads, keys, self.value_dim),
            (batch, heads, rows, self.value_dim),
        )
        return [torch.randn(shape).to(self.dtype) for shape in shapes]

    def mask(self, broadcast: str, kind: str) -> torch.Tensor:
        """A mask of one of ``BROADCASTS``, "bool", or a "bias" with some -inf."""
        dims = zip(self.scores, BROADCASTS[broadcast], strict=True)
        mask = torch.randn([n if there else 1 for n, there in dims])
        if kind == "bool":
            return mask > -0.4
        return mask.masked_fill(mask < -0.8, -torch.inf).to(self.dtype)


def attention(query, key, value, mask=None, scale=1.0, factors=None, causal=False):
    """Output and logsumexp, in the dtype of the inputs; rows that see nothing are 0 and -inf."""
    groups = query.size(1) // key.size(1)
    key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
    scores = scale * query @ key.mT
    if mask is not None and mask.dtype is torch.bool:
        scores = scores.masked_fill(~mask, -torch.inf)
    elif mask is not None:
        scores = scores + mask
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
    blind = (scores == -torch.inf).all(-1, keepdim=True)
    weights = scores.masked_fill(blind, 0.0).softmax(-1).masked_fill(blind, 0.0)
    lse = scores.masked_fill(blind, 0.0).logsumexp(-1).masked_fill(blind[..., 0], -math.inf)
    return (weights if factors is None else weights * factors.to(weights.dtype)) @ value, lse


def with_gradients(attend, tensors, mask=None) -> list[torch.Tensor]:
    """Output and the gradients of query, key, value and, if it is a bias, of the mask."""
    *inputs, grad_output = tensors
    leaves = [x.detach().requires_grad_() for x in inputs]
    if mask is not None and mask.dtype is not torch.bool:
        mask = mask.detach().requires_grad_()
        output = attend(*leaves, mask)
        leaves = [*leaves, mask]
    else:
        output = attend(*leaves, mask)
    return [output.detach(), *torch.autograd.grad(output, leaves, grad_output)]


def exact(tensors, mask, scale, factors=None) -> list[torch.Tensor]:
    wide = [x.double() for x in tensors]
    if mask is not None and mask.dtype is not torch.bool:
        mask = mask.double()
    return with_gradients(lambda q, k, v, m: attention(q, k, v, m, scale, factors)[0], wide, mask)


def one_device(tensors, mask, scale, kernel, mask_grad=False) -> list[torch.Tensor]:
    """Output, dQ, dK, dV and, if requested, the bias's gradient by torch's own kernel. RuntimeError
    if it does not support the call."""
    grouped = tensors[0].size(1) != tensors[1].size(1)

    def attend(query, key, value, bias):
        return F.scaled_dot_product_attention(
            query, key, value, mask if bias is None else bias, scale=scale, enable_gqa=grouped
        )

    with sdpa_kernel(KERNELS[kernel]):
        return with_gradients(attend, tensors, mask if mask_grad else None)
