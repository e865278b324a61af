"""Masks beside plain shards: what they say by their shapes, and the form that the op takes."""

from __future__ import annotations

import torch

from cp_dispatch._compat import all_gather_single, is_tracing
from cp_dispatch.layouts import Span
from cp_dispatch.layouts.spans import chunk
from cp_dispatch.plain_context import refuse

ROWS, KEYS = 2, 3


def sharded_dim_of(context, call, mask, local, lengths) -> int | None:
    """Which dim of a 4-D mask holds this rank's part alone: rows, keys or, None, neither."""
    if mask is None:
        return None
    sharded = []
    for dim, name, own, whole in zip((ROWS, KEYS), ("rows", "keys"), local, lengths, strict=True):
        size = int(mask.shape[dim])
        if size == 1 and own == 1 and whole > 1:
            refuse(
                context, call,
                f"attn_mask has 1 of {name} where each rank holds 1 of {whole}, so there is no "
                "telling whether it is for all of them; expand it to all",
            )  # fmt: skip
        if size == own and own != whole and size != 1:
            sharded.append(dim)
        elif size not in (1, whole):
            refuse(
                context, call,
                f"attn_mask has {size} {name}; it must have 1, all {whole}, or this rank's {own}",
            )  # fmt: skip
    if len(sharded) == 2:
        refuse(
            context, call,
            f"attn_mask {list(call.attn_mask.shape)} has this rank's rows and this rank's keys "
            f"alone, and says nothing about the other {lengths[1] - local[1]} keys; pass this "
            f"rank's {local[0]} rows, or all {lengths[0]}, of all {lengths[1]} keys, or only "
            "is_causal=True",
        )  # fmt: skip
    if mask.requires_grad and torch.is_grad_enabled() and ROWS not in sharded:
        refuse(
            context, call,
            "attn_mask needs a gradient and is shared by the ranks, so there is no telling "
            "whether its gradient is to be summed over them; pass this rank's rows of it, or "
            "DTensors throughout",
        )  # fmt: skip
    return sharded[0] if sharded else None


def mask_of_op(context, call, mask, sharded_dim, layout, lengths) -> torch.Tensor:
    """The mask as the op takes it: in natural order this rank's rows, in a layout all or its own,
    and all keys."""
    if sharded_dim == KEYS:
        if is_tracing():
            refuse(
                context, call,
                "a mask with this rank's keys alone has to be gathered, which torch.compile "
                "cannot trace here; pass one with all keys",
            )  # fmt: skip
        mask = _gather_keys(context.mesh, mask, lengths[1])
    if layout is None and sharded_dim != ROWS and mask.shape[ROWS] > 1:
        own = chunk(Span(0, lengths[0]), context.mesh.size())[context.mesh.get_local_rank()]
        mask = mask.narrow(ROWS, own.position, own.length)
    return mask


def _gather_keys(mesh, mask: torch.Tensor, key_length: int) -> torch.Tensor:
    """All keys of a mask, as the shards lie, one rank's after the other's."""
    shares = [span.length for span in chunk(Span(0, key_length), mesh.size())]
    own = mask.detach().movedim(KEYS, 0)
    padded = own.new_zeros(shares[0], *own.shape[1:])
    padded[: own.shape[0]] = own
    # As bytes: not every collective library knows every dtype.
    sent = padded.view(-1).view(torch.uint8)
    received = sent.new_empty(mesh.size() * sent.numel())
    all_gather_single(received, sent, group=mesh.get_group())
    parts = received.view(own.dtype).view(mesh.size() * shares[0], *own.shape[1:])
    return parts[:key_length].movedim(0, KEYS)
