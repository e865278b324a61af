"""Detects positions that a model of transformers, given none, counts from 0 on every rank.

Inside a block the model sees a shard, whose positions are different, and position embeddings would
be silently wrong. A mask function is not given the positions, so they are looked up in the frames
of transformers' own functions, where ``position_ids`` is a public argument: in the function that
makes the mask, in the model's forward that called it, and in forwards around that. The model itself
and ``generate()`` are found there too.
"""

from __future__ import annotations

import sys

import torch
from torch.distributed.tensor import DTensor

from cp_dispatch.layouts import Balancer, Span
from cp_dispatch.layouts.spans import chunk

_MASKS = "transformers.masking_utils"
_MODELS = "transformers.models.", "transformers_modules."
_GENERATION = "transformers.generation."
_MOST_FRAMES = 60
_NOT_GIVEN, _NOT_TAKEN = "not given", "not taken"


def count_from_zero(rows: int) -> torch.Tensor | bool:
    """Whether the positions of the mask that is being made are 0 to ``rows - 1`` in every batch
    row (if they are (S,), in all alike) and, if they are (3, B, S), along every axis. This is so if
    the model was given none. False if unknown."""
    positions = _positions()
    if positions is _NOT_GIVEN or positions is _NOT_TAKEN:
        return rows > 0
    if not isinstance(positions, torch.Tensor) or positions.ndim not in (1, 2, 3) or not rows:
        return False
    if positions.shape[-1] != rows or positions.is_floating_point():
        return False
    return (positions == torch.arange(rows, device=positions.device)).all()


def longest() -> torch.Tensor | int:
    """One more than the largest position that the model is given; 0 if unknown."""
    positions = _positions()
    known = isinstance(positions, torch.Tensor) and positions.numel()
    return positions.max() + 1 if known else 0


def taken_by_the_model() -> bool:
    """Whether the forward that asked for the mask takes ``position_ids``, as far as is known."""
    return _positions() is not _NOT_TAKEN


def made_whole(rows: int) -> bool:
    """Whether the positions are a whole plain tensor that counts from 0 to ``rows - 1``, as those
    that a model makes if it is given none."""
    positions = _positions()
    if positions is _NOT_TAKEN or isinstance(positions, DTensor):
        return False
    return bool(count_from_zero(rows))


def inputs_of_mask():
    """The ``inputs_embeds`` for which transformers makes the mask, None if unknown."""
    return _of_mask("inputs_embeds")


def finds_documents() -> bool:
    """Whether transformers has found packed documents for the mask in ``position_ids``; False if
    unknown."""
    return _of_mask("packed_sequence_mask") is not None


def _of_mask(name: str):
    """An argument or a local variable of the function that makes the mask, None if it has none."""
    for frame in _frames():
        if frame.f_globals.get("__name__", "") == _MASKS and name in frame.f_code.co_varnames:
            return frame.f_locals.get(name)
    return None


def generates() -> bool:
    """Whether the mask is for ``generate()``."""
    return any(frame.f_globals.get("__name__", "").startswith(_GENERATION) for frame in _frames())


def asking_model():
    """The model whose forward asked for the mask, None if unknown."""
    for frame in _frames():
        of_model = frame.f_globals.get("__name__", "").startswith(_MODELS)
        if of_model and frame.f_code.co_name == "forward":
            return frame.f_locals.get("self")
    return None


def _frames():
    """The frames that have led here, the innermost first."""
    frame = sys._getframe(1)
    for _ in range(_MOST_FRAMES):
        frame = frame.f_back
        if frame is None:
            return
        yield frame


def _positions():
    """A tensor, ``_NOT_GIVEN``, ``_NOT_TAKEN`` or, if unknown, None.

    If the outermost forward was given none, a forward in between may have made its own.
    """
    found = None
    for frame in _frames():
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
    """Names of a frame's arguments. Its other names are local variables, such as the positions
    that BART's decoder counts."""
    return code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]


def begin_elsewhere(layout: Balancer | None, lengths: list[int]) -> list[int]:
    """The ranks whose original positions are not 0 to their length minus 1."""
    held = [length and Span(0, length) for length in lengths]
    if layout is None:
        true = [{(span,)} for span in chunk(Span(0, sum(lengths)), len(lengths))]
    else:
        true = [set(layout.spans(rank)) for rank in range(len(lengths))]
    return [rank for rank, span in enumerate(held) if span and true[rank] != {(span,)}]
