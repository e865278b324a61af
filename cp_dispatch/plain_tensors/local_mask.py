"""Masks of calls on plain shards: what their shapes mean, and conversion to the op's form."""

from __future__ import annotations

from typing import NamedTuple

import torch

from cp_dispatch._compat import is_tracing
from cp_dispatch.layouts import Span
from cp_dispatch.layouts.buffers import gather
from cp_dispatch.layouts.spans import chunk
from cp_dispatch.plain_tensors.context import refuse

ROWS, KEYS = 2, 3


class Shares(NamedTuple):
    """What ranks hold of query and key, and of the mask's rows and keys: lists with one entry per
    rank, or a single entry if all ranks hold the same."""

    lengths: tuple[int, int]
    own: tuple[list[int], list[int]]
    mask: tuple[list[int], list[int]]


def sharded_dim_of(context, call, mask, shares: Shares) -> int | None:
    """The dim along which a 4-D mask holds only this rank's part: rows, keys, or None.

    Depends on what all ranks hold, so all ranks decide the same.
    """
    if mask is None:
        return None
    sharded = []
    lengths = shares.lengths
    local = [int(getattr(call, name).shape[-2]) for name in ("query", "key")]
    for dim, name, owns, sizes, whole in zip(
        (ROWS, KEYS), ("rows", "keys"), shares.own, shares.mask, lengths, strict=True
    ):
        if set(sizes) == {1}:
            if set(owns) == {1} and whole > 1:
                refuse(
                    context, call,
                    f"attn_mask has size 1 along its {name} and each rank holds 1 of {whole}, so "
                    "it is ambiguous whether it broadcasts or is this rank's part; expand it to "
                    f"all {whole}",
                )  # fmt: skip
        elif sizes == owns and set(owns) != {whole}:
            sharded.append(dim)
        elif set(sizes) != {whole}:
            refuse(
                context, call,
                f"attn_mask has {_of_ranks(sizes)} {name}; on every rank it must have 1, all "
                f"{whole}, or the rank's own {_of_ranks(owns)}",
            )  # fmt: skip
    if len(sharded) == 2:
        refuse(
            context, call,
            f"attn_mask {list(call.attn_mask.shape)} has only this rank's rows and this rank's "
            f"keys, and says nothing about the other {lengths[1] - local[1]} keys; pass a mask "
            f"with this rank's {local[0]} rows, or all {lengths[0]}, and all {lengths[1]} keys, or "
            "only is_causal=True",
        )  # fmt: skip
    if mask.requires_grad and torch.is_grad_enabled() and ROWS not in sharded:
        refuse(
            context, call,
            "attn_mask needs a gradient and is shared by the ranks, so it is ambiguous whether "
            "its gradient should be summed over them; pass this rank's rows of it, or use "
            "DTensors throughout",
        )  # fmt: skip
    return sharded[0] if sharded else None


def _of_ranks(counts: list[int]) -> str:
    return str(counts[0]) if len(counts) == 1 else f"{counts} (rank by rank)"


def mask_of_op(context, call, mask, sharded_dim, layout, lengths) -> torch.Tensor:
    """The mask in the op's form, with all keys: in natural order with this rank's rows, in a layout
    with all rows or this rank's."""
    if sharded_dim == KEYS:
        if is_tracing():
            refuse(
                context, call,
                "a mask with only this rank's keys has to be gathered, which torch.compile "
                "cannot trace here; pass one with all keys",
            )  # fmt: skip
        most = chunk(Span(0, lengths[1]), context.mesh.size())[0].length
        mask = gather(context.mesh, mask.detach(), KEYS, most, lengths[1])
    if layout is None and sharded_dim != ROWS and mask.shape[ROWS] > 1:
        own = chunk(Span(0, lengths[0]), context.mesh.size())[context.mesh.get_local_rank()]
        mask = mask.narrow(ROWS, own.position, own.length)
    return mask
