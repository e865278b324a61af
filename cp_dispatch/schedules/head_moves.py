"""Where heads that copy engines move come from and go to, as numbers that a message of one kind
keeps (:mod:`pushed_heads`)."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from cp_dispatch.layouts import Geometry, RowGeometry
from cp_dispatch.schedules.copy_ops import aligned
from cp_dispatch.schedules.wire import Part


class Run(NamedTuple):
    """Rows of a shard from ``own`` on, which are the rows from ``at`` on of the whole."""

    own: int
    length: int
    at: int


Runs = tuple[tuple[tuple[Run, ...], ...], ...]


@functools.lru_cache(maxsize=256)
def runs_of(geometry: Geometry | RowGeometry, of_keys: bool, batch_start: int, batch: int) -> Runs:
    """``[batch row][rank]``: where each rank's rows (or keys) are in the order of kernels, true
    order under a causal mask, else one rank's after the other's."""
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
    """How tensors lie in a mailbox: where each starts, and their shapes ``(B, S, heads, dim)``, or
    ``(B, heads, S)`` for one number a row."""

    def __init__(self, batch: int, parts: Sequence[tuple[Part, int, int]]):
        """``parts`` are a part, its heads and its rows."""
        self.places, self.shapes, self.dtypes, end = [], [], [], 0
        for part, heads, rows in parts:
            shape = (batch, heads, rows) if part.dim == 1 else (batch, rows, heads, part.dim)
            self.places.append(end)
            self.shapes.append(shape)
            self.dtypes.append(part.dtype)
            end += aligned(math.prod(shape) * part.dtype.itemsize)
        self.size = end

    def offset(self, index: int, batch_row: int, row: int) -> int:
        """Bytes from the room's start to a row of a tensor, of its first head for one number a
        row."""
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
        """The same of each of ``parts`` parts that come from every rank, alike from all:
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
    """What a message has in common with others of its kind; kept with the box. ``outward`` says
    which way: all heads of own rows out, or own heads of all rows home."""

    def __init__(self, rank: int, outward: bool, batch: int, lengths, runs: Runs, parts):
        self._rank, self._outward, self.parts, self._runs = rank, outward, parts, runs
        self._length = lengths[rank]
        self._is_one_run = all(len(row[rank]) == 1 for row in runs)
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
        """Whether ranks have as many heads of each part, one rank's after the other's."""
        return all(
            span == (rank * part.heads[0].length, part.heads[0].length)
            for part in self.parts
            for rank, span in enumerate(part.heads)
        )

    def own(self, box) -> list[Tensor]:
        """Views of what comes: for each part; or, on the way home, for each part of each rank,
        where :attr:`is_even` those of all ranks in one."""
        room = self.rooms[self._rank]
        if self._outward or not self.is_even:
            return room.views(box, self._rank)
        return room.side_by_side(box, self._rank, len(self.parts))

    def sources(self, tensors: Sequence[Tensor], thin: Sequence[bool]) -> list[Tensor]:
        """What :meth:`numbers` tells to move, of tensors as copies take them: ``(B, S, H, dim)``,
        ``(B, H, S)`` for one number a row, or packed, ``(B, ranks, S, heads, dim)``."""
        found = []
        for tensor, part, is_packed in zip(tensors, self.parts, thin, strict=True):
            if is_packed:
                found.append(tensor.flatten(0, 2)[None])
            elif not self._outward and part.dim > 1:
                found += (tensor,) if len(self._runs) == 1 else tensor.split(1)
            elif not self._outward:
                found += tensor.unbind()
            elif part.dim == 1:
                found += (row.narrow(0, *heads) for row in tensor.unbind() for heads in part.heads)
            elif self._is_one_run:
                found += tensor.unbind()
            else:
                found += (
                    row.narrow(0, run.own, run.length)
                    for row, runs in zip(tensor.unbind(), self._runs, strict=True)
                    for run in runs[self._rank]
                )
        return found

    def numbers(self, box, thin: Sequence[bool]) -> list[int]:
        """The moves of :meth:`sources`, for :meth:`Mailbox.push_rows`; to the nearest rank first,
        so that no two push to one at a time, and to oneself last."""
        rank, ranks, found = self._rank, len(self.rooms), []
        for step in range(ranks):
            peer = (rank + 1 + step) % ranks
            at = 0
            for index, (part, is_packed) in enumerate(zip(self.parts, thin, strict=True)):
                for row, runs in enumerate(self._runs):
                    if self._outward:
                        found += self._outward_moves(box, peer, index, row, at, is_packed)
                    else:
                        for run in runs[peer]:
                            found += self._move_home(box, peer, index, row, run, at + row)
                at += self._count(part, is_packed)
        return found

    def _count(self, part: Part, is_packed: bool) -> int:
        """Sources of a part."""
        batch = len(self._runs)
        if is_packed:
            return 1
        if not self._outward:
            return batch
        if part.dim == 1:
            return batch * len(self.rooms)
        return sum(len(runs[self._rank]) for runs in self._runs)

    def _outward_moves(self, box, peer: int, index: int, row: int, at: int, is_packed: bool):
        """Of a batch row of a part, whose sources begin at ``at``."""
        part, room, ranks = self.parts[index], self.rooms[peer], len(self.rooms)
        start, count = part.heads[peer]
        own, item, moves = self._runs[row][self._rank], part.dtype.itemsize, []
        for number, run in enumerate(own):
            offset = room.offset(index, row, run.at)
            if is_packed:
                first = (row * ranks + peer) * self._length + run.own
                moves += box.move(at, first, run.length, peer, offset, 0)
            elif part.dim == 1:
                source, pitch = at + row * ranks + peer, room.shapes[index][2] * item
                moves += box.move(source, run.own, run.length, peer, offset, pitch)
            else:
                source = at + sum(len(runs[self._rank]) for runs in self._runs[:row]) + number
                moves += box.move(source, start, count, peer, offset, count * part.dim * item)
        return moves

    def _move_home(self, box, peer: int, index: int, row: int, run: Run, source: int) -> list[int]:
        """Of a run of the peer's rows."""
        room, slot = self.rooms[peer], self._rank * len(self.parts) + index
        pitch = room.shapes[slot][2] * room.dtypes[slot].itemsize  # of one number a row
        offset = room.offset(slot, row, run.own)
        return box.move(source, run.at, run.length, peer, offset, pitch)


@functools.lru_cache(maxsize=256)
def moves_of(rank: int, outward: bool, batch: int, lengths, runs: Runs, parts) -> Moves:
    """The same object for messages of one kind."""
    return Moves(rank, outward, batch, lengths, runs, parts)
