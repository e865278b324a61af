"""Wraps ``score_mod`` and ``mask_mod``, so that kernels on local rows pass them global indices.

Note [Lists in dense kernels]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Compiled kernels skip blocks that the mask does not list, and do not call ``mask_mod`` in full ones.
Uncompiled, or in graphs that are not for inductor, torch computes all scores and uses only
``mask_mod``. For masks of ``create_block_mask`` both agree. Lists that were made or cut by hand may
cover less than the mod, and keys that no list names are not sent here. So in dense kernels the
user's lists become part of the mod, as a table of the user's blocks by global index. This is exact
even if a block of this rank's rows covers several of theirs. Compiled kernels get no table.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from cp_dispatch.flex.cut import FULL, PARTIAL
from cp_dispatch.layouts import Span

# With more pieces than this, a kernel reads positions from a table instead. That makes a backward
# 7% slower (7 pieces, documents, H200).
_MAX_PIECES = 16


@dataclass(frozen=True)
class Pieces:
    """Maps local rows or keys to original positions: it adds ``offsets[i]`` to those from
    ``starts[i]`` on."""

    starts: tuple[int, ...]
    offsets: tuple[int, ...]

    def __call__(self, row: Tensor) -> Tensor:
        place = row + self.offsets[0] if self.offsets[0] else row
        for start, offset in zip(self.starts[1:], self.offsets[1:], strict=True):
            place = torch.where(row < start, place, row + offset)
        return place


def pieces(spans: tuple[Span, ...]) -> Pieces | None:
    """The map of a shard's rows; None if a table is better."""
    if len(spans) > _MAX_PIECES:
        return None
    starts, offsets, at = [], [], 0
    for position, length in spans or (Span(0, 0),):
        starts.append(at)
        offsets.append(position - at)
        at += length
    return Pieces(tuple(starts), tuple(offsets))


@dataclass(frozen=True)
class Listed:
    """A block mask's lists as part of its ``mask_mod``; see Note [Lists in dense kernels]."""

    #: Rows and keys of a block.
    blocks: tuple[int, int]
    #: Whether the table has a batch dim, and a dim of heads.
    batch: bool = False
    heads: bool = False
    #: Whether its rows of blocks cover this rank's rows only, not all queries.
    local_rows: bool = False

    def table(self, listed: Tensor) -> Tensor:
        """The result of ``flex_listed``, without dims in which the mask broadcasts."""
        # Selected here, because torch's vmap over a mod does not support ints among indices.
        listed = listed if self.heads else listed.select(1, 0)
        return listed if self.batch else listed.select(0, 0)

    def __call__(self, seen, table: Tensor, b, h, row, q_idx, kv_idx):
        """``seen`` in the blocks where the lists leave the decision to the mod."""
        rows, keys = self.blocks
        index = (b,) * self.batch + (h,) * self.heads
        kind = table[(*index, (row if self.local_rows else q_idx) // rows, kv_idx // keys)]
        return (kind == FULL) | ((kind == PARTIAL) & seen)


@dataclass(frozen=True)
class Place:
    """Maps a rank's local indices to global ones: its first batch row, its first head, and the
    positions of its rows, by ``pieces`` or by a table ``(L,)`` or ``(lanes, L)`` int32.

    The wrapped mods take the table, if there is one, as the last captured buffer. A ``mask_mod``
    that respects the lists of blocks takes their table after it.
    """

    first_batch: int = 0
    first_head: int = 0
    pieces: Pieces | None = None
    table_lanes: int = 0
    #: In a window (see :mod:`cp_dispatch.flex.hops`): the map from its keys to positions, and, if
    #: it has keys of other owners, the positions that belong to its owner.
    keys: Pieces | None = None
    owned: tuple[Span, ...] | None = None
    listed: Listed | None = None

    @property
    def is_identity(self) -> bool:
        """Whether local indices equal global ones."""
        return (
            not self.first_batch
            and not self.first_head
            and not self.table_lanes
            and self.pieces in (None, Pieces((0,), (0,)))
            and self.keys in (None, Pieces((0,), (0,)))
            and self.owned is None
        )

    def buffers(self, buffers: tuple, table: Tensor | None) -> tuple:
        return (*buffers, table) if self.table_lanes else tuple(buffers)

    def mask_mod(self, mod: Callable) -> Callable:
        """``mod(b, h, q_idx, kv_idx, *buffers)`` on local indices."""
        if self.is_identity and self.listed is None:
            return mod

        def mask_mod(b, h, row, kv_idx, *buffers):
            if self.listed is not None:
                *buffers, listed = buffers
            b, h, q_idx, kv_idx, buffers = self._true(b, h, row, kv_idx, buffers)
            seen = mod(b, h, q_idx, kv_idx, *buffers)
            if self.listed is not None:
                seen = self.listed(seen, listed, b, h, row, q_idx, kv_idx)
            return seen if self.owned is None else seen & self._is_owned(kv_idx)

        return mask_mod

    def score_mod(self, mod: Callable) -> Callable:
        """``mod(score, b, h, q_idx, kv_idx, *buffers)`` on local indices."""
        if self.is_identity:
            return mod

        def score_mod(score, b, h, row, kv_idx, *buffers):
            b, h, q_idx, kv_idx, buffers = self._true(b, h, row, kv_idx, buffers)
            return mod(score, b, h, q_idx, kv_idx, *buffers)

        return score_mod

    def joint_graph(self, graph: Callable) -> Callable:
        """The backward of ``score_mod``: gradients of all its arguments, on local indices."""
        if self.is_identity:
            return graph

        def joint_graph(score, b, h, row, kv_idx, grad, *buffers):
            b, h, q_idx, kv_idx, buffers = self._true(b, h, row, kv_idx, buffers)
            grads = graph(score, b, h, q_idx, kv_idx, grad, *buffers)
            return [*grads, None] if self.table_lanes else list(grads)

        return joint_graph

    def _is_owned(self, kv_idx):
        inside = None
        for position, length in self.owned:
            here = (kv_idx >= position) & (kv_idx < position + length)
            inside = here if inside is None else inside | here
        return inside

    def _true(self, b, h, row, kv_idx, buffers):
        if self.table_lanes:
            *buffers, table = buffers
            # In int32, as all indices of a kernel are.
            q_idx = table[b, row] if self.table_lanes > 1 else table[row]
        else:
            q_idx = self.pieces(row) if self.pieces is not None else row
        b = b + self.first_batch if self.first_batch else b
        h = h + self.first_head if self.first_head else h
        kv_idx = kv_idx if self.keys is None else self.keys(kv_idx)
        return b, h, q_idx, kv_idx, buffers
