"""Positions that a model of transformers counts from 0 on every rank, because it was given none.

Inside a block it sees a shard, which holds other positions, and rotary embeddings would be wrong in
silence. A mask function is not given the positions, so they are looked up in the
frame of the function of transformers that makes the mask, where they are a public argument.
"""

from __future__ import annotations

import sys

import torch

from cp_dispatch.layouts import Balancer, Span
from cp_dispatch.layouts.spans import chunk

_MODULE = "transformers.masking_utils"
_MOST_FRAMES = 6


def count_from_zero(rows: int) -> torch.Tensor | bool:
    """Whether the positions of the mask that is being made are 0 to ``rows - 1`` in every row of
    the batch; False where there is no telling."""
    positions = _of_the_caller()
    if not isinstance(positions, torch.Tensor) or positions.ndim != 2 or not rows:
        return False
    if positions.shape[1] != rows or positions.is_floating_point():
        return False
    return (positions == torch.arange(rows, device=positions.device)).all()


def _of_the_caller():
    frame = sys._getframe(1)
    for _ in range(_MOST_FRAMES):
        frame = frame.f_back
        if frame is None:
            return None
        if frame.f_globals.get("__name__") == _MODULE and "position_ids" in frame.f_locals:
            return frame.f_locals["position_ids"]
    return None


def begin_elsewhere(layout: Balancer | None, lengths: list[int]) -> list[int]:
    """The ranks whose true positions are not 0 to their length minus 1."""
    held = [length and Span(0, length) for length in lengths]
    if layout is None:
        true = [{(span,)} for span in chunk(Span(0, sum(lengths)), len(lengths))]
    else:
        true = [set(layout.spans(rank)) for rank in range(len(lengths))]
    return [rank for rank, span in enumerate(held) if span and true[rank] != {(span,)}]
