"""Positions that a model of transformers counts from 0 on every rank, because it was given none.

Inside a block it sees a shard, which holds other positions, and embeddings of positions would be
wrong in silence. A mask function is not given the positions, so they are looked up in the frames of
transformers' own functions, where ``position_ids`` is a public argument: of the function that makes
the mask, of the model's forward that called it, and of forwards around that.
"""

from __future__ import annotations

import sys

import torch

from cp_dispatch.layouts import Balancer, Span
from cp_dispatch.layouts.spans import chunk

_MASKS = "transformers.masking_utils"
_MODELS = "transformers.models.", "transformers_modules."
_MOST_FRAMES = 60
_NOT_GIVEN, _NOT_TAKEN = "not given", "not taken"


def count_from_zero(rows: int) -> torch.Tensor | bool:
    """Whether the positions of the mask that is being made are 0 to ``rows - 1`` in every row of
    the batch, and along every axis where they have several (3, B, S), as they are where the model
    was given none; False where there is no telling."""
    positions = _positions()
    if positions is _NOT_GIVEN or positions is _NOT_TAKEN:
        return rows > 0
    if not isinstance(positions, torch.Tensor) or positions.ndim not in (2, 3) or not rows:
        return False
    if positions.shape[-1] != rows or positions.is_floating_point():
        return False
    return (positions == torch.arange(rows, device=positions.device)).all()


def longest() -> torch.Tensor | int:
    """One more than the largest position that the model is given; 0 where there is no telling."""
    positions = _positions()
    known = isinstance(positions, torch.Tensor) and positions.numel()
    return positions.max() + 1 if known else 0


def taken_by_the_model() -> bool:
    """Whether the forward that has its mask made takes ``position_ids``, as far as one can tell."""
    return _positions() is not _NOT_TAKEN


def _positions():
    """A tensor, ``_NOT_GIVEN``, ``_NOT_TAKEN`` or, where there is no telling, None.

    A forward in the middle may have made its own of what the outermost one was not given.
    """
    frame, found = sys._getframe(1), None
    for _ in range(_MOST_FRAMES):
        frame = frame.f_back
        if frame is None:
            break
        name = frame.f_globals.get("__name__", "")
        of_model = name.startswith(_MODELS)
        if not of_model and name != _MASKS:
            continue
        if "position_ids" in _arguments(frame.f_code):
            positions = frame.f_locals["position_ids"]
            if of_model and positions is None:
                return _NOT_GIVEN
            found = positions if found is None else found
        elif of_model and found is None and frame.f_code.co_name == "forward":
            found = _NOT_TAKEN
    return found


def _arguments(code) -> tuple[str, ...]:
    """Others of a frame's names are its own, as positions that BART's decoder counts."""
    return code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]


def begin_elsewhere(layout: Balancer | None, lengths: list[int]) -> list[int]:
    """The ranks whose true positions are not 0 to their length minus 1."""
    held = [length and Span(0, length) for length in lengths]
    if layout is None:
        true = [{(span,)} for span in chunk(Span(0, sum(lengths)), len(lengths))]
    else:
        true = [set(layout.spans(rank)) for rank in range(len(lengths))]
    return [rank for rank, span in enumerate(held) if span and true[rank] != {(span,)}]
