"""Cuts this rank's rows out of a block mask.

Note [Cutting]
~~~~~~~~~~~~~~
A rank attends with its query rows, in the order of its shard, to keys in natural order (see
Note [Rows in place]). So the columns of the mask stay as the user made them, and only its rows are
cut. Block t of the rank's rows covers one or several of the user's query blocks::

    user's blocks (size 4)   | a a a a | b b b b | c c c c | d ...
    rank 1 of 2, rows 6...             b b | c c c c | d d d d     natural order, 14 rows
    its blocks                         [b b c c] [c c d d] ...

A key block is computed if any of them computes it. It is *full* if all of them are full and the
rank's block has all its rows. Otherwise it is partial, and ``mask_mod``, which gets original
positions, decides. If shards begin at a block boundary, as they usually do, no full block becomes
partial.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from cp_dispatch.by_need.ownership import Ownership
from cp_dispatch.layouts.tiles import cut as cut_spans


class Blocks(NamedTuple):
    """The tensors of a block mask, all int32, of R query blocks and C key blocks.

    ``kv_num`` ``(B, H, R)``, ``kv_indices`` ``(B, H, R, C)``, ``q_num`` ``(B, H, C)``,
    ``q_indices`` ``(B, H, C, R)``; those of full blocks are None where the mask has none.
    """

    kv_num: Tensor
    kv_indices: Tensor
    full_kv_num: Tensor | None = None
    full_kv_indices: Tensor | None = None
    q_num: Tensor | None = None
    q_indices: Tensor | None = None
    full_q_num: Tensor | None = None
    full_q_indices: Tensor | None = None


class Touched(NamedTuple):
    """For each lane and block of a rank's rows: the user's query blocks that it covers (the first
    one is repeated, so that all have the same number), and whether the block has all its rows."""

    blocks: tuple[tuple[tuple[int, ...], ...], ...]
    complete: tuple[bool, ...]


@functools.lru_cache(maxsize=256)
def touched(owned: Ownership, rank: int, block: int) -> Touched:
    """Which query blocks the blocks of ``rank``'s rows cover; ``block``: rows of a block."""
    rows = owned.rows(rank)
    starts = range(0, rows, block)
    lanes = []
    for lane in range(owned.lanes):
        spans = owned.spans(rank, lane)
        lanes.append(
            [
                sorted(
                    {
                        i
                        for position, length in cut_spans(spans, start, block)
                        for i in range(position // block, (position + length - 1) // block + 1)
                    }
                )
                for start in starts
            ]
        )
    most = max((len(blocks) for lane in lanes for blocks in lane), default=1)
    padded = tuple(
        tuple((*blocks, *[blocks[0]] * (most - len(blocks))) for blocks in lane) for lane in lanes
    )
    return Touched(padded, tuple(start + block <= rows for start in starts))


def dense(num: Tensor, indices: Tensor, columns: int) -> Tensor:
    """Lists of blocks ``(..., R)``, ``(..., R, n)`` as a bool table ``(..., R, columns)``."""
    width = indices.size(-1)
    listed = torch.arange(width, device=num.device) < num.unsqueeze(-1)
    # Entries beyond the end of a list, or the last block, go to a column that is dropped.
    places = torch.where(listed, indices, columns).long().clamp_(max=columns)
    table = torch.zeros((*num.shape, columns + 1), dtype=torch.bool, device=num.device)
    return table.scatter_(-1, places, True)[..., :columns]


# Values of :func:`listed` for computed blocks: with ``mask_mod``, or full, without it.
PARTIAL, FULL = 1, 2


def listed(mask: Blocks, columns: int) -> Tensor:
    """``(B, H, R, columns)`` int8: how blocks are listed, 0 for those that are not."""
    partial = dense(mask.kv_num, mask.kv_indices, columns)
    table = partial.to(torch.int8) * PARTIAL
    if mask.full_kv_num is None:
        return table
    return table.masked_fill_(dense(mask.full_kv_num, mask.full_kv_indices, columns), FULL)


def lists(table: Tensor) -> tuple[Tensor, Tensor]:
    """The inverse of :func:`dense`: blocks of a row in ascending order, then all others."""
    # Contiguous, because Triton's kernels assume a stride of 1 and a sort keeps strides.
    table = table.contiguous()
    order = torch.sort(table.to(torch.uint8), dim=-1, descending=True, stable=True).indices
    return table.sum(-1, dtype=torch.int32), order.to(torch.int32)


def cut(
    mask: Blocks, owned: Ownership, rank: int, block: int, columns: int, window=None, is_cut=False
) -> Blocks:
    """The blocks of ``rank``'s rows; ``block`` is the number of rows of a query block.

    Only the lists of key blocks of ``mask`` are read. With several lanes its batch dim has one row
    for each, or a single one. ``window`` selects columns (see Note [Windows]). ``is_cut``: the mask
    already has only this rank's rows.
    """
    covered = touched(owned, rank, block)
    partial = dense(mask.kv_num, mask.kv_indices, columns)
    full = None
    if mask.full_kv_num is not None:
        full = dense(mask.full_kv_num, mask.full_kv_indices, columns)
    blocks = len(covered.complete)
    if is_cut or not blocks:
        every = None if full is None else _of_lanes(full, owned.lanes)[:, :, :blocks]
        some = _of_lanes(partial, owned.lanes)[:, :, :blocks]
        some = some if every is None else some | every
    else:
        index = torch.tensor(covered.blocks, device=partial.device)
        some, every = _rows(partial if full is None else partial | full, index).any(3), None
        if full is not None:
            complete = torch.tensor(covered.complete, device=partial.device).view(-1, 1)
            every = _rows(full, index).all(3) & complete
    if window is not None:
        chosen = torch.tensor(window.blocks, dtype=torch.int64, device=some.device)
        some = some.index_select(3, chosen)
        if every is not None:
            own = torch.tensor(window.own, dtype=torch.bool, device=some.device)
            every = every.index_select(3, chosen) & own
    return of_tables(some if every is None else some & ~every, every)


def _rows(table: Tensor, index: Tensor) -> Tensor:
    """``(B, H, R, C)`` by ``index`` (lanes, T, n): ``(B, H, T, n, C)``."""
    lanes, blocks, most = index.shape
    if lanes == 1:
        return table[:, :, index[0].flatten()].unflatten(2, (blocks, most))
    batch = torch.arange(lanes, device=table.device).view(-1, 1, 1)
    taken = _of_lanes(table, lanes)[batch, :, index]  # (B, T, n, H, C)
    return taken.permute(0, 3, 1, 2, 4)


def _of_lanes(table: Tensor, lanes: int) -> Tensor:
    """The tensor with one batch row for each lane, if there are several."""
    return table.expand(lanes, *table.shape[1:]) if lanes > 1 else table


def of_tables(partial: Tensor, full: Tensor | None) -> Blocks:
    """The lists of both directions of a mask, from its tables ``(B, H, R, C)``."""
    kv, q = lists(partial), lists(partial.transpose(2, 3))
    if full is None:
        return Blocks(*kv, None, None, *q, None, None)
    return Blocks(*kv, *lists(full), *q, *lists(full.transpose(2, 3)))


# -- All tensors in one, which an op can return -------------------------------------------------

_ALIGNED = 4  # elements: 16 bytes, which kernels load efficiently


def packed_shapes(batch, heads, rows, columns, has_full: bool) -> list[tuple | None]:
    """Shapes of the fields of :class:`Blocks`."""
    kv = [(batch, heads, rows), (batch, heads, rows, columns)]
    q = [(batch, heads, columns), (batch, heads, columns, rows)]
    none = [None, None]
    return [*kv, *(kv if has_full else none), *q, *(q if has_full else none)]


def packed_size(shapes) -> int:
    """The number of elements that :func:`pack` returns for fields of these shapes."""
    return sum(_padded(shape) for shape in shapes if shape is not None)


def pack(blocks: Blocks) -> Tensor:
    """All fields, one after the other, int32."""
    shapes = [None if x is None else tuple(x.shape) for x in blocks]
    packed = blocks.kv_num.new_zeros(packed_size(shapes), dtype=torch.int32)
    start = 0
    for x, shape in zip(blocks, shapes, strict=True):
        if x is not None:
            packed[start : start + x.numel()].copy_(x.flatten())
            start += _padded(shape)
    return packed


def unpack(packed: Tensor, shapes) -> list[Tensor | None]:
    """Views of the fields that :func:`pack` packed, and of what was appended to them."""
    fields, start = [], 0
    for shape in shapes:
        if shape is None:
            fields.append(None)
            continue
        fields.append(packed[start : start + math.prod(shape)].view(shape))
        start = start + _padded(shape)
    return fields


def _padded(shape) -> int:
    return (math.prod(shape) + _ALIGNED - 1) // _ALIGNED * _ALIGNED


def own_part(lists: Sequence[Tensor | None], part: Sequence[int]) -> Blocks:
    """Views of the lists of a rank's part: its first batch row, number of batch rows, first head
    and number of heads. Lists for all of them stay as they are."""
    first, batch, first_head, heads = part
    tensors = []
    for x in lists:
        if x is not None and x.size(0) > 1 and batch < x.size(0):
            x = x[first : first + batch]
        if x is not None and x.size(1) > 1 and heads < x.size(1):
            x = x[:, first_head : first_head + heads]
        tensors.append(x)
    return Blocks(*tensors)
