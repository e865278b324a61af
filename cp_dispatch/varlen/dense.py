"""Attention of packed documents in plain torch: the kernel for CPU, and the specification.

Torch has no kernel of ``varlen_attn`` for CPU. Pieces are computed one by one, with all scores in
memory, in float32 (float64 for float64). As in the CUDA kernel, a row without keys gets zeros and
the logsumexp inf.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from cp_dispatch.backends import wide_dtype
from cp_dispatch.varlen.documents import Window


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sizes: Sequence[tuple[int, int]],
    window: Window,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Output ``(T, H, D)`` and logsumexp ``(H, T)``.

    Args:
        query, key, value: ``(T, H, D)``, ``(M, Hkv, D)``, ``(M, Hkv, D)``.
        sizes: ``(rows, keys)`` of each piece, together T and M.
        window: aligned to the bottom right of each piece.
    """
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    lse = query.new_empty((query.size(1), query.size(0)), dtype=wide_dtype(query.dtype))
    for rows, keys in _cuts(sizes):
        q, k, v = query[rows], key[keys], value[keys]
        scores = _scores(q, k, window, scale)
        total = scores.logsumexp(-1)
        total = total.masked_fill(total == -torch.inf, torch.inf)
        seen = (scores - total.unsqueeze(-1)).exp()
        out[rows] = _weighted(seen, v).to(out.dtype)
        lse[:, rows] = total
    return out, lse


def backward(
    grad_output: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    logsumexp: Tensor,
    sizes: Sequence[tuple[int, int]],
    window: Window,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """dQ, dK and dV of :func:`forward`, wide: float32, or float64."""
    grads = [x.new_empty(x.shape, dtype=wide_dtype(x.dtype)) for x in (query, key, value)]
    for rows, keys in _cuts(sizes):
        q, k, v = query[rows], key[keys], value[keys]
        seen = (_scores(q, k, window, scale) - logsumexp[:, rows].unsqueeze(-1)).exp()
        grad = _wide(grad_output[rows])
        delta = (grad * _wide(output[rows])).sum(-1).t().unsqueeze(-1)
        of_seen = torch.einsum("qhd,khd->hqk", grad, _heads(v, q))
        of_scores = seen * (of_seen - delta) * scale
        grads[0][rows] = _weighted(of_scores, k)
        grads[1][keys] = _gathered(of_scores, _wide(q), k)
        grads[2][keys] = _gathered(seen, grad, v)
    return tuple(grads)


def _cuts(sizes: Sequence[tuple[int, int]]) -> Iterator[tuple[slice, slice]]:
    row = start = 0
    for rows, keys in sizes:
        yield slice(row, row + rows), slice(start, start + keys)
        row, start = row + rows, start + keys


def _wide(x: Tensor) -> Tensor:
    return x.to(wide_dtype(x.dtype))


def _heads(x: Tensor, query: Tensor) -> Tensor:
    """Wide, each key head for its group of query heads."""
    return _wide(x).repeat_interleave(query.size(1) // x.size(1), dim=1)


def _scores(query: Tensor, key: Tensor, window: Window, scale: float) -> Tensor:
    """Scores ``(H, rows, keys)``, -inf where a row does not see a key."""
    scores = torch.einsum("qhd,khd->hqk", _wide(query), _heads(key, query)) * scale
    if window.is_full:
        return scores
    rows, keys = query.size(0), key.size(0)
    diagonal = torch.arange(rows, device=query.device).unsqueeze(1) + (keys - rows)
    after = torch.arange(keys, device=query.device) - diagonal
    hidden = torch.zeros_like(after, dtype=torch.bool)
    if window.left >= 0:
        hidden |= after < -window.left
    if window.right >= 0:
        hidden |= after > window.right
    return scores.masked_fill(hidden, -torch.inf)


def _weighted(weights: Tensor, keys: Tensor) -> Tensor:
    """``(rows, H, D)``: for each row the sum of ``keys`` (keys, Hkv, D) by its weights."""
    groups = weights.size(0) // keys.size(1)
    return torch.einsum("hqk,khd->qhd", weights, _wide(keys).repeat_interleave(groups, dim=1))


def _gathered(weights: Tensor, rows: Tensor, like: Tensor) -> Tensor:
    """``(keys, Hkv, D)``: for each key the sum of ``rows`` (rows, H, D) by its weights."""
    summed = torch.einsum("hqk,qhd->khd", weights, rows)
    return summed.unflatten(1, (like.size(1), -1)).sum(2)
