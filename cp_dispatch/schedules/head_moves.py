"""Precomputed sources and targets of heads that copy engines move (:mod:`pushed_heads`)."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from cp_dispatch.layouts import Geometry, RowGeometry
from cp_dispatch.schedules.copy_ops import aligned
from cp_dispatch.schedules.wire import Part


class Run(NamedTuple):
    """Rows of a shard from ``own`` on, which are rows of the whole sequence from ``at`` on."""

    own: int
    length: int
    at: int


Runs = tuple[tuple[tuple[Run, ...], ...], ...]


@functools.lru_cache(maxsize=256)
def runs_of(geometry: Geometry | RowGeometry, of_keys: bool, batch_start: int, batch: int) -> Runs:
    """``[batch row][rank]``: where each rank's rows (or keys) are in the order of kernels. That is
    natural order under a causal mask, else one rank's rows after the other's."""
    rows = (geometry,) * batch
    if isinstance(geometry, RowGeometry):
        rows = geometry.rows[batch_start : batch_start + batch]
    return tuple(_runs(row, of_keys) for row in rows)


@functools.lru_cache(maxsize=256)
def _runs(geometry: Geometry, of_keys: bool) -> tuple[tuple[Run, ...], ...]:
    held = []
    for rank, spans in enumerate(geometry.key_spans if of_keys else geometry.query_spans):
        own = 0
        for span in spans:
            held.append((span, rank, own))
            own += span.length
    if geometry.causal:
        held.sort()
    found: list[list[Run]] = [[] for _ in range(geometry.world_size)]
    at = 0
    for span, rank, own in held:
        last = found[rank][-1] if found[rank] else None
        if last and last.own + last.length == own and last.at + last.length == at:
            found[rank][-1] = last._replace(length=last.length + span.length)
        else:
            found[rank].append(Run(own, span.length, at))
        at += span.length
    return tuple(map(tuple, found))


class Room:
    """The layout of tensors in a mailbox: where each starts, and their shapes ``(B, S, heads,
    dim)``, or ``(B, heads, S)`` for one number per row."""

    def __init__(self, batch: int, parts: Sequence[tuple[Part, int, int]]):
        """``parts``: each part with its numbers of heads and rows."""
        self.places, self.shapes, self.dtypes, end = [], [], [], 0
        for part, heads, rows in parts:
            shape = (batch, heads, rows) if part.dim == 1 else (batch, rows, heads, part.dim)
            self.places.append(end)
            self.shapes.append(shape)
            self.dtypes.append(part.dtype)
            end += aligned(math.prod(shape) * part.dtype.itemsize)
        self.size = end

    def offset(self, index: int, batch_row: int, row: int) -> int:
        """Bytes from the room's start to a row of a tensor (of its first head, for one number per
        row)."""
        batch, *sizes = self.shapes[index]
        flat = len(sizes) == 2
        width = 1 if flat else math.prod(sizes[1:])
        at = batch_row * math.prod(sizes) + row * width
        return self.places[index] + at * self.dtypes[index].itemsize

    def views(self, box, rank: int) -> list[Tensor]:
        """``(B, heads, S, dim)``"""
        views = (
            box.at(rank, place, math.prod(shape), dtype).view(shape)
            for place, shape, dtype in zip(self.places, self.shapes, self.dtypes, strict=True)
        )
        return [x.unsqueeze(-1) if x.dim() == 3 else x.transpose(1, 2) for x in views]

    def side_by_side(self, box, rank: int, parts: int) -> list[Tensor]:
        """The same for each of ``parts`` parts that come from every rank with the same shape:
        ``(ranks, B, heads, S, dim)``."""
        found, step = [], self.places[parts] if parts < len(self.places) else 0
        for index, view in enumerate(self.views(box, rank)[:parts]):
            pitch = step // view.itemsize
            ranks = len(self.places) // parts
            numel = (ranks - 1) * pitch + view.numel()
            flat = box.at(rank, self.places[index], numel, view.dtype)
            found.append(flat.as_strided((ranks, *view.shape), (pitch, *view.stride())))
        return found


class Moves:
    """What all messages of one kind have in common; cached with the box. ``outward`` gives the
    direction: all heads of own rows out, or own heads of all rows back."""

    def __init__(self, rank: int, outward: bool, batch: int, lengths, runs: Runs, parts):
        self._rank, self._outward, self.parts, self._runs = rank, outward, parts, runs
        ranks = range(len(lengths))
        if outward:
            total = sum(lengths)
            self.rooms = [
                Room(batch, [(p, p.heads[r].length, total) for p in parts]) for r in ranks
            ]
        else:
            self.rooms = [
                Room(batch, [(p, p.heads[u].length, lengths[r]) for u in ranks for p in parts])
                for r in ranks
            ]
        self.size = max(room.size for room in self.rooms)

    @functools.cached_property
    def is_even(self) -> bool:
        """Whether all ranks have the same number of heads of each part, one rank's after the
        other's."""
        return all(
            span == (rank * part.heads[0].length, part.heads[0].length)
            for part in self.parts
            for rank, span in enumerate(part.heads)
        )

    def own(self, box) -> list[Tensor]:
        """Views of the data that arrives: one for each part. On the way back, one for each part of
        each rank, or if :attr:`is_even` one for each part of all ranks."""
        room = self.rooms[self._rank]
        if self._outward or not self.is_even:
            return room.views(box, self._rank)
        return room.side_by_side(box, self._rank, len(self.parts))

    def numbers(self, box, packed: Sequence[bool]) -> Tensor:
        """The numbers for :meth:`~cp_dispatch.schedules.mailbox.Mailbox.push_heads` of one tensor
        per part: ``(B, H, S, dim)``, ``(B, H, S)`` for one number per row, or packed,
        ``(B * ranks, heads, S, dim)``. The nearest rank comes first, so that no two ranks write to
        the same rank at a time, and this rank last."""
        ranks = len(self.rooms)
        peers = [(self._rank + 1 + step) % ranks for step in range(ranks)]
        moves = (
            self._moves(box, peer, index, is_packed)
            for peer in peers
            for index, is_packed in enumerate(packed)
        )
        return box.numbers([*itertools.chain(*moves)], (box,))

    def _moves(self, box, peer: int, index: int, is_packed: bool) -> list[int]:
        """The copies of a part to a peer. For each: the tensor's index, its batch row, first row,
        number of rows, first head, number of heads, the target address, and the bytes between rows
        there (between heads for one number per row)."""
        rank, part, room, found = self._rank, self.parts[index], self.rooms[peer], []
        if self._outward:
            slot, (first, count) = index, part.heads[peer]
        else:
            slot, first, count = rank * len(self.parts) + index, 0, part.heads[rank].length
        pitch = room.shapes[slot][2] if part.dim == 1 else count * part.dim
        for row, runs in enumerate(self._runs):
            batch_row, head = (row * len(self.rooms) + peer, 0) if is_packed else (row, first)
            for run in runs[rank if self._outward else peer]:
                start, at = (run.own, run.at) if self._outward else (run.at, run.own)
                found += [index, batch_row, start, run.length, head, count]
                found += [
                    box.address(peer, room.offset(slot, row, at)),
                    pitch * part.dtype.itemsize,
                ]
        return found


@functools.lru_cache(maxsize=256)
def moves_of(rank: int, outward: bool, batch: int, lengths, runs: Runs, parts) -> Moves:
    """The same object for messages of one kind."""
    return Moves(rank, outward, batch, lengths, runs, parts)
