"""Refuses models of transformers that take DTensors in a layout for ones in natural order.

Inside ``implicit_replication()`` a model may combine its DTensors with whole plain tensors that it
makes itself. These do not know about layouts, so its positions would belong to other tokens, its
documents would begin at other places, and masks of uncompiled attention would be for other rows.
This is checked where transformers makes a mask, like blocks (masks.py), and by the same search in
its frames (positions.py). Prebuilt masks do not come here.
"""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor, Shard

from cp_dispatch._compat import implicit_replication_is_on
from cp_dispatch.errors import ContextParallelError
from cp_dispatch.hugging_face.configs import wrong_in_a_layout
from cp_dispatch.hugging_face.positions import (
    asking_model,
    finds_documents,
    inputs_of_mask,
    made_whole,
    taken_by_the_model,
)
from cp_dispatch.layouts import Balancer
from cp_dispatch.planning.layout_rules import named


def check(options, kind: str, is_causal: bool, config, attention_mask=None) -> None:
    """Refuse the model that asks for a mask if its results would be wrong in the layout of
    ``options``, which may be None. ``kind`` is its ``attn_implementation``, ``config`` its config
    or None, ``attention_mask`` what it was given, of two dims, or None.

    Raises:
        ContextParallelError: on all ranks, since the model does the same on all of them.
    """
    layout = None if options is None else options.order
    if layout is None or not implicit_replication_is_on():
        return
    inputs = inputs_of_mask()
    if not isinstance(inputs, DTensor) or Shard(1) not in inputs.placements:
        return
    if inputs.shape[1] != layout.seq_len or _is_natural(layout):
        return
    reason = (
        _wrong(kind, is_causal, layout.seq_len)
        or wrong_in_a_layout(config, layout.seq_len)
        or _wrong_padding(attention_mask)
    )
    if reason is not None:
        raise ContextParallelError(
            f"a model of transformers on DTensors in a layout is refused: {reason}.\n"
            f"Given: inputs {list(inputs.shape)}, {inputs.placements}, in {named(layout)}, "
            f"attn_implementation={kind!r}, inside implicit_replication()"
        )


def _wrong(kind: str, is_causal: bool, length: int) -> str | None:
    if made_whole(length):
        return (
            "its positions count from 0 in natural order, as the model makes them if none are "
            "passed, but its tokens are in the layout's; pass position_ids, permuted and sharded "
            "like the tokens (cp_dispatch.shard)"
        )
    if not taken_by_the_model() and isinstance(_embedding(), torch.nn.Module):
        return (
            "the model takes no position_ids, and embeds positions that it counts itself, in "
            "natural order, but its tokens are in the layout's; use layout=None"
        )
    if finds_documents():
        return (
            "position_ids that do not count up by 1, because of the layout or of packed documents, "
            "make transformers find documents, at places in the layout's order; pass a plain "
            "attention_mask of ones or, for documents, a 4-D boolean mask [B, 1, S, S], both by "
            "true positions"
        )
    if kind == "eager" and is_causal:
        return (
            "its causal mask is in natural order, but uncompiled attention goes by places in the "
            "layout's; use attn_implementation='sdpa'"
        )
    return None


def _wrong_padding(mask) -> str | None:
    if isinstance(mask, DTensor) and Shard(1) in mask.placements:
        return (
            "its attention_mask is sharded along the sequence, in the layout's order, but "
            "transformers looks it up by true positions; pass it whole, as a plain tensor (B, S) "
            "by true positions"
        )
    return None


def _embedding():
    """What BART and its relatives embed positions with."""
    return getattr(asking_model(), "embed_positions", None)


def _is_natural(layout: Balancer) -> bool:
    return bool((layout.indices == torch.arange(layout.seq_len)).all())
