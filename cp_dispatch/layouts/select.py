"""Turns spans into an index along a dim of a tensor."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from cp_dispatch.layouts.spans import Span
from cp_dispatch.native.permute import span_indices


def selector(spans: tuple[Span, ...], device: torch.device) -> slice | Tensor:
    """The positions of ``spans``: a slice if they are a single run, else an int64 index."""
    if len(spans) == 1:
        return slice(spans[0].position, spans[0].position + spans[0].length)
    return positions(spans, device)


def positions(spans: tuple[Span, ...], device: torch.device) -> Tensor:
    """The positions of ``spans``, int64; do not modify it.

    Cached only on the host: device memory that is allocated while a CUDA graph is prepared belongs
    to the graph, which would overwrite it in the next call.
    """
    if device.type != "cuda":
        return _on_host(spans, False).to(device)
    if torch.cuda.is_current_stream_capturing():
        # A graph must not remember host memory, which may be gone when it is replayed.
        runs = [torch.arange(s.position, s.position + s.length, device=device) for s in spans]
        return torch.cat(runs) if runs else torch.empty(0, dtype=torch.int64, device=device)
    return _on_host(spans, True).to(device, non_blocking=True)


@functools.lru_cache(maxsize=64)
def _on_host(spans: tuple[Span, ...], pinned: bool) -> Tensor:
    index = span_indices(spans)
    return index.pin_memory() if pinned else index
