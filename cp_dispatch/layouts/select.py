"""Spans as an index into a dim of a tensor."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from cp_dispatch.layouts.spans import Span
from cp_dispatch.permute import span_indices


def selector(spans: tuple[Span, ...], device: torch.device) -> slice | Tensor:
    """The positions of ``spans``: a slice where they are one run, else an int64 index."""
    if len(spans) == 1:
        return slice(spans[0].position, spans[0].position + spans[0].length)
    return positions(spans, device)


@functools.lru_cache(maxsize=512)
def positions(spans: tuple[Span, ...], device: torch.device) -> Tensor:
    """The positions of ``spans``, int64. Kept for the next call; do not modify it."""
    return span_indices(spans).to(device)
