"""Heads moved by copy engines, where ranks reach each other's memory (see :mod:`mailbox`).

As :mod:`cp_dispatch.schedules.wire`, but what moves is put where kernels read it: in true order,
each tensor by itself, ``(B, S, heads, dim)``. So nothing is packed (but thin rows, which copy
engines are slow at), nothing is put in order, and no kernel of NCCL takes SMs from attention. What
comes home is put side by side by the copy that takes it out of the room.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from cp_dispatch.layouts import Geometry, RowGeometry
from cp_dispatch.rows import copy_rows
from cp_dispatch.schedules.comm import Ring
from cp_dispatch.schedules.copy_ops import aligned, rows_for
from cp_dispatch.schedules.wire import Part, collect

# Bytes of a row's heads for one rank below which rows are packed before they are copied.
_LEAST_WIDTH = 1024
#: The most copies for one tensor to one rank: each costs the host some microseconds.
MOST_COPIES = 16


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

    def views(self, box, rank: int) -> list[Tensor]:
        return [
            box.at(rank, place, math.prod(shape), dtype).view(shape)
            for place, shape, dtype in zip(self.places, self.shapes, self.dtypes, strict=True)
        ]


class _Moves:
    """What a message has in common with others of its kind; kept with the box. ``outward`` says
    which way: all heads of own rows out, or own heads of all rows home."""

    def __init__(self, rank: int, outward: bool, batch: int, lengths, runs: Runs, parts):
        self._rank, self._outward, self._parts, self._runs = rank, outward, parts, runs
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

    def steps(self):
        """``(peer, part's index, batch row, run)`` of every copy of this rank; the nearest rank
        first, so that no two push to one at a time, and oneself last."""
        rank, ranks = self._rank, len(self.rooms)
        for step in range(ranks):
            peer = (rank + 1 + step) % ranks
            for index in range(len(self._parts)):
                for row, runs in enumerate(self._runs):
                    for run in runs[rank if self._outward else peer]:
                        yield peer, index, row, run

    def targets(self, box) -> list[Tensor]:
        rank, found = self._rank, []
        views = [room.views(box, r) for r, room in enumerate(self.rooms)]
        for peer, index, row, run in self.steps():
            if self._outward:
                room, start = views[peer][index], run.at
            else:
                room, start = views[peer][rank * len(self._parts) + index], run.own
            flat = self._parts[index].dim == 1
            found.append(room[row].narrow(1 if flat else 0, start, run.length))
        return found


@functools.lru_cache(maxsize=256)
def moves_of(rank: int, outward: bool, batch: int, lengths, runs: Runs, parts) -> _Moves:
    """The same object for messages of one kind."""
    return _Moves(rank, outward, batch, lengths, runs, parts)


class _Pushed:
    """A message under way in a mailbox."""

    def __init__(self, ring: Ring, box, moves: _Moves):
        self._ring, self._box, self._moves = ring, box, moves
        known = box.views.get(moves)
        if known is None:
            box.forget_many()
            own = moves.rooms[ring.rank].views(box, ring.rank)
            known = box.views[moves] = moves.targets(box), own
        self._targets, self._own = known

    def _push(self, sources: list[Tensor], ready_at_open: bool) -> None:
        self._box.push(self._targets, sources, ready_at_open=ready_at_open)
        # Not all that the box's stream does, for the next stage's messages come behind.
        self._there = None if self._ring.stream is None else self._ring.stream.record_event()

    def _wait(self) -> None:
        if self._there is not None:
            self._ring.wait(self._there)
        self._box.let_go()


class PushedOutward(_Pushed):
    """As :class:`~cp_dispatch.schedules.wire.Outward`."""

    def __init__(self, ring: Ring, box, moves: _Moves, parts: tuple[Part, ...], tensors):
        super().__init__(ring, box, moves)
        rows = [
            _packed(x, part) if _is_thin(part, x) else
            x[..., 0].contiguous() if part.dim == 1 else rows_for([x])[0]
            for part, x in zip(parts, tensors, strict=True)
        ]  # fmt: skip
        box.open()
        sources = []
        for peer, index, row, run in moves.steps():
            part, x = parts[index], rows[index][row]
            if x.dim() == 4:  # one rank's after the other's
                sources.append(x[peer].narrow(0, run.own, run.length))
                continue
            head, own = (0, 1) if part.dim == 1 else (1, 0)
            x = x.narrow(own, run.own, run.length)
            sources.append(x.narrow(head, *part.heads[peer]))
        self._push(sources, ready_at_open=True)

    def wait(self) -> list[Tensor]:
        """All rows of own heads, ``(B, heads, S, dim)``, in the order of kernels."""
        self._wait()
        return [x.unsqueeze(-1) if x.dim() == 3 else x.transpose(1, 2) for x in self._own]

    def release(self) -> None:
        """Nothing reads them any more."""
        self._box.release()


class PushedHomeward(_Pushed):
    """As :class:`~cp_dispatch.schedules.wire.Homeward`."""

    def __init__(self, ring: Ring, box, moves: _Moves, parts: tuple[Part, ...], pieces):
        super().__init__(ring, box, moves)
        self._parts = parts
        wholes = []
        for part, tensors in zip(parts, pieces, strict=True):
            tensors = [x.to(part.dtype) for x in tensors]
            whole = tensors[0] if len(tensors) == 1 else torch.cat(tensors, 1)
            wholes.append(whole[..., 0].contiguous() if part.dim == 1 else rows_for([whole])[0])
        box.open()
        sources = [
            wholes[index][row].narrow(1 if parts[index].dim == 1 else 0, run.at, run.length)
            for _, index, row, run in moves.steps()
        ]
        self._push(sources, ready_at_open=False)

    def wait(self, *results: Tensor) -> None:
        """As :meth:`~cp_dispatch.schedules.wire.Homeward.wait`."""
        self._wait()
        views = [x.unsqueeze(-1) if x.dim() == 3 else x.transpose(1, 2) for x in self._own]
        pairs = []
        for rank in range(self._ring.world_size):
            for index, (part, result) in enumerate(zip(self._parts, results, strict=True)):
                view = views[rank * len(self._parts) + index]
                pairs.append((view, result.narrow(1, *part.heads[rank])))
        collect(self._parts, pairs, results)
        self._box.release()


def _is_thin(part: Part, tensor: Tensor) -> bool:
    width = part.heads[0].length * part.dim * part.dtype.itemsize
    return part.dim > 1 and width < _LEAST_WIDTH and part.step(tensor.size(1)) > 0


def _packed(tensor: Tensor, part: Part) -> Tensor:
    """``(B, ranks, S, heads, dim)``, each rank's heads in one piece."""
    ranks, (start, count) = len(part.heads), part.heads[0]
    batch, _, length, dim = tensor.shape
    packed = tensor.new_empty((batch, ranks, length, count, dim))
    step = part.step(tensor.size(1))
    dealt = tensor.unflatten(1, (ranks, step))[:, :, start : start + count]
    copy_rows([packed.transpose(2, 3)], [dealt], None, [2], False)
    return packed
