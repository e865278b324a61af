"""Halves of a rank's rows for halves of its mirror rank's.

In natural order rank r holds pieces 2r and 2r + 1 of 2W. It keeps the first where it is and swaps
the second with rank W - 1 - r: its rows are then pieces 2r and 2W - 1 - 2r, in that order, in two
tensors. Results go back the same way, and come into the rows that they replace. So nothing is put
together, but by :mod:`cp_dispatch.schedules.mirror`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from cp_dispatch.layouts import Geometry, Span, Tile, chunk_spans
from cp_dispatch.schedules.comm import Ring
from cp_dispatch.schedules.copy_ops import can_be_copied

#: The mailbox where halves come.
ROOM = "halves"
_ALIGNMENT = 16  # bytes, of each tensor in a message


@functools.lru_cache(maxsize=256)
def swapped(
    query_length: int, key_length: int, ring_shape: tuple[int, ...], causal: bool
) -> Geometry:
    """Who computes which rows: first one's own half, then the mirror's; keys in natural order."""
    world_size = math.prod(ring_shape)
    half = query_length // (2 * world_size)
    queries = tuple(
        (Span(2 * r * half, half), Span((2 * (world_size - r) - 1) * half, half))
        if 2 * r != world_size - 1  # whose pieces follow each other
        else (Span(2 * r * half, 2 * half),)
        for r in range(world_size)
    )
    return Geometry(queries, chunk_spans(key_length, ring_shape), causal)


class Halves:
    """Rows of a tensor ``(B, H, S, ...)``, the second half of which comes from the mirror rank."""

    def __init__(self, own: Tensor, swap: HalfSwap, index: int):
        self._own, self._swap, self._index = own, swap, index

    def rows_of(self, tile: Tile) -> Tensor:
        """The rows of a tile; waits for the mirror's where it takes some."""
        start, length, half = tile.query_start, tile.query_length, self._swap.half
        if start + length <= half or self._swap.is_alone:
            return self._own.narrow(2, start, length)
        second = self._swap.wait()[self._index]
        if start >= half:
            return second if length == half else second.narrow(2, start - half, length)
        first = self._own.narrow(2, start, half - start)
        return torch.cat([first, second.narrow(2, 0, start + length - half)], 2)


class HalfSwap:
    """Halves of tensors ``(B, H, S, ...)`` on their way, alike in all but H and the last dim on all
    ranks. ``at_once``: nothing is computed before :meth:`wait`. ``gives``: which half goes."""

    def __init__(
        self, ring: Ring, tensors: Sequence[Tensor], at_once: bool = False, gives: int = 1
    ):
        self._ring, self._tensors = ring, tensors
        self.half, self._peer = tensors[0].size(2) // 2, mirror_of(ring)
        self._start = gives * self.half
        #: The middle one of an odd number of ranks keeps both halves.
        self.is_alone = self._peer == ring.rank
        # The mirror's halves, and what to wait for before they are here.
        self._received: list[Tensor] = []
        self._coming = None
        self._bytes = [x.nbytes // 2 for x in tensors]
        # Made by all ranks together, so by the middle one too.
        self._box = ring.mailbox(ROOM, sum(map(_aligned, self._bytes)))
        if self._box is not None:
            if not self.is_alone:
                self._push(at_once)
        elif self.is_alone:
            nothing = tensors[0].new_empty(0)
            ring.exchange(ring.rank, nothing, nothing).wait()
        else:
            self._exchange()

    def _exchange(self) -> None:
        """By a collective, in one message."""
        size = sum(map(_aligned, self._bytes))
        message = [self._tensors[0].new_empty(size, dtype=torch.uint8) for _ in range(2)]
        send, self._received = (_views(x, self._tensors) for x in message)
        for view, x in zip(send, self._tensors, strict=True):
            view.copy_(self.given(x))
        self._coming = self._ring.exchange(self._peer, *message)

    def _push(self, at_once: bool) -> None:
        """By copy engines, to the mirror's room."""
        sources, firsts = zip(*map(self._source, self._tensors), strict=True)
        place = "swap", firsts, *((x.shape, x.dtype) for x in self._tensors)
        found = self._box.views.get(place)
        if found is None:
            self._box.forget_many()
            found = self._box.views[place] = self._places(firsts)
        moves, self._received = found
        self._box.push_rows(sources, moves, opens=True, peers=(self._peer,), then_wait=at_once)
        self._coming = None if at_once else self._box

    def given(self, x: Tensor) -> Tensor:
        """The half of a tensor that goes to the mirror."""
        return x.narrow(2, self._start, self.half)

    def _source(self, x: Tensor) -> tuple[Tensor, int]:
        """What is copied from, ``(B, S, H, D)`` or ``(B, H, S)`` with batch rows in one piece, and
        where in it begins what goes."""
        if x.dim() == 4:
            rows = x.transpose(1, 2)
            if can_be_copied(rows):
                return rows, self._start
            return rows.narrow(1, self._start, self.half).contiguous(), 0
        return self.given(x).contiguous(), 0

    def _places(self, firsts: Sequence[int]) -> tuple[list[int], list[Tensor]]:
        """Moves to the mirror's room, and views of what comes to this one."""
        box, moves, offset = self._box, [], 0
        for index, (x, size) in enumerate(zip(self._tensors, self._bytes, strict=True)):
            rows, stride = self.half if x.dim() == 4 else x.size(1), size // max(1, x.size(0))
            moves += box.move(index, firsts[index], rows, self._peer, offset, stride)
            offset += _aligned(size)
        whole = box.at(self._ring.rank, 0, offset, torch.uint8)
        return moves, _views(whole, self._tensors)

    @property
    def rows(self) -> list[Halves]:
        """The tensors' rows."""
        return [Halves(x, self, index) for index, x in enumerate(self._tensors)]

    def wait(self) -> list[Tensor]:
        """The mirror's halves; where that is this rank, its own."""
        if self.is_alone:
            return [self.given(x) for x in self._tensors]
        if self._coming is not None:
            self._coming.wait()
            self._coming = None
        return self._received

    def release(self) -> None:
        """Nothing reads the mirror's halves any more."""
        self.wait()  # also where no row wanted them: the flags must go
        if self._box is not None and not self.is_alone:
            self._box.release()

    def replace(self) -> None:
        """Put the mirror's halves in the place of those that went there."""
        second = self.wait()
        if not self.is_alone:
            for x, received in zip(self._tensors, second, strict=True):
                self.given(x).copy_(received)
        self.release()


def mirror_of(ring: Ring) -> int:
    """Rank W - 1 - r."""
    return ring.world_size - 1 - ring.rank


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _views(message: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Halves of tensors of several dtypes in one buffer, those with a last dim
    token-major."""
    views, offset = [], 0
    for x in like:
        size, half = x.nbytes // 2, x.size(2) // 2
        part = message[offset : offset + size].view(x.dtype)
        if x.dim() == 3:
            views.append(part.view(x.size(0), x.size(1), half))
        else:
            views.append(part.view(x.size(0), half, x.size(1), x.size(3)).transpose(1, 2))
        offset += _aligned(size)
    return views
