"""Moves keys and gradients by copy engines: ranks read what they need from each other's rooms.

A rank's room has a place for each row of its shard, and those that some other rank needs are
written there. So its size depends on lengths alone, and new documents need no new room. Keys go
from it to their places among the keys of a kernel call, where these are few runs, so that nothing
is packed, unpacked or put in order. Gradients return through the same room, in as many rounds as
they need to fit.

The flags are those of :meth:`cp_dispatch.schedules.mailbox.Mailbox.pull`.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from cp_dispatch.by_need.copies import copy_all
from cp_dispatch.by_need.here import here_of, stand_in
from cp_dispatch.by_need.selector import Pairs
from cp_dispatch.by_need.to_the_end import finish
from cp_dispatch.layouts import Span
from cp_dispatch.schedules.comm import Ring
from cp_dispatch.schedules.mailbox import Mailbox
from cp_dispatch.varlen.documents import union
from cp_dispatch.varlen.keys import Arrived
from cp_dispatch.varlen.traffic import Table

# With more runs than this in the kernel's order, keys are put in order by a kernel of their own.
_MOST_ORDERED = 64
# Their numbers are on the host, and documents may change at every step.
_MOST_VIEWS = 32

#: Copies within a rank, and those from other ranks' rooms.
Moves = tuple[Pairs, Pairs]


class Run(NamedTuple):
    """Rows of an owner's shard, and their first place among a rank's keys."""

    owner: int
    row: int
    place: int
    count: int


class Pulls:
    """What one rank copies for given documents.

    Args:
        table: the rows that ranks need.
        rows: the number of keys of the rank with the most.
        rank: this rank.
        order: the ``sums`` of the only kernel call's :class:`~cp_dispatch.varlen.keys.CallKeys` if
            that takes each of the rank's keys once, else None.
    """

    def __init__(self, table: Table, rows: int, rank: int, order):
        ranks = range(len(table))
        self.table, self.rank, self._rows = table, rank, rows
        # Nearest rank first, so that no two ranks read from the same rank at a time.
        self.distances = ranks[1:]
        self.owners = [(rank + d) % len(ranks) for d in self.distances]
        self.counts = [[sum(x.length for x in spans) for spans in of] for of in table]
        self.compact = _compact(table[rank])
        ordered = None if order is None else _in_order(self.compact, order)
        #: The runs in the kernel's order, None if they are many or there is no such order.
        self.ordered = ordered if ordered is not None and len(ordered) <= _MOST_ORDERED else None
        self.offered = union([x for taker in self.owners for x in table[taker][rank]])

    def size(self, columns: int, dtypes: Iterable[torch.dtype]) -> int:
        """Bytes of a room; the same on every rank."""
        return self._rows * columns * max(dtype.itemsize for dtype in dtypes)

    def rounds(self, most: int) -> list[list[int]]:
        """The distances from owners to takers whose gradients travel together, so that no rank
        stages more than ``most`` rows; the same on every rank. Empty if none travel."""
        size = len(self.table)
        found: list[list[int]] = []
        staged: list[int] = []
        for d in self.distances:
            rows = [of[(taker - d) % size] for taker, of in enumerate(self.counts)]
            if not any(rows):
                continue
            if found and max(map(operator.add, rows, staged)) <= most:
                found[-1].append(d)
                staged = list(map(operator.add, rows, staged))
            else:
                found.append([d])
                staged = rows
        return found


class Pulled:
    """The transfers of one call, in a ``with`` block that completes the flags after an error.

    Args:
        add_up: sums the gradients of this rank's rows, see :meth:`bring_back`.
        dtype: of the gradients that a backward returns; None if there are none.
    """

    def __init__(
        self, pulls: Pulls, box: Mailbox, columns: Sequence[int], size: int,
        dtype: torch.dtype | None, add_up: Callable,
    ):  # fmt: skip
        self._pulls, self._box, self._columns, self._add_up = pulls, box, columns, add_up
        self._size = size
        self._rounds: list[list[int]] = []
        if dtype is not None:
            self._rounds = pulls.rounds(self._rows(dtype))

    def __enter__(self) -> Pulled:
        self._before = self._box.pulls
        return self

    def __exit__(self, kind, error, trace) -> None:
        if kind is not None:
            made = self._box.pulls - self._before
            rest = len(self._rounds) + 1 - max(1, made)
            finish(self._box, self._before, [self._box] * rest)

    def bring(self, key: Tensor, value: Tensor) -> Arrived:
        """As :meth:`cp_dispatch.varlen.exchange.Collectives.bring`."""
        pulls, rank = self._pulls, self._pulls.rank
        buffer = key.new_empty((sum(pulls.counts[rank]), sum(self._columns)))
        self._pull("keys", [key, value, buffer], self._bring)
        parts = [
            [x.view(len(x), *like.shape[1:])]
            for x, like in zip(buffer.split(self._columns, 1), (key, value), strict=True)
        ]
        return Arrived(parts, pulls.ordered is not None)

    def _bring(self, key: Tensor, value: Tensor, buffer: Tensor) -> Moves:
        pulls, rank = self._pulls, self._pulls.rank
        room = self._rows_of(rank, key.dtype)
        runs = pulls.compact if pulls.ordered is None else pulls.ordered
        copied: Pairs = []
        for x, into in zip((key, value), room.split(self._columns, 1), strict=True):
            copied += [(_placed(into, s, x), x[s.position : sum(s)]) for s in pulls.offered]
        for x, into in zip((key, value), buffer.split(self._columns, 1), strict=True):
            copied += [
                (_placed(into, Span(run.place, run.count), x), x[run.row : run.row + run.count])
                for run in runs
                if run.owner == rank
            ]
        return copied, [
            (buffer[run.place :][: run.count], room[run.row :][: run.count])
            for owner, room in self._rooms(key.dtype)
            for run in runs
            if run.owner == owner
        ]

    def bring_back(
        self, grads: Sequence[Tensor], like: Sequence[Tensor], are_ordered: bool
    ) -> list[Tensor]:
        """As :meth:`cp_dispatch.varlen.exchange.Collectives.bring_back`."""
        pulls, rank = self._pulls, self._pulls.rank
        runs = pulls.ordered if are_ordered else pulls.compact
        takers = [taker for taker in range(len(pulls.table)) if taker != rank]
        came = grads[0].new_empty((sum(pulls.counts[t][rank] for t in takers), sum(self._columns)))
        for number, distances in enumerate(self._rounds):
            moves = functools.partial(self._bring_back, runs, takers, distances)
            self._pull(("gradients", number, are_ordered), [*grads, came], moves)
        counts = [pulls.counts[taker][rank] for taker in takers]
        columns = [x.split(counts) for x in came.split(self._columns, 1)]
        parts = [
            {t: x.view(len(x), *g.shape[1:]) for t, x in zip(takers, of_one, strict=True)}
            for of_one, g in zip(columns, grads, strict=True)
        ]
        own = [(run.row, run.count, run.place) for run in runs if run.owner == rank]
        return self._add_up(grads, own, parts, like)

    def _bring_back(self, runs, takers, distances, grad_key, grad_value, came) -> Moves:
        pulls, rank, size = self._pulls, self._pulls.rank, len(self._pulls.table)
        copied: Pairs = []
        there: Pairs = []
        room, at = self._rows_of(rank, came.dtype), 0
        for d in distances:
            for run in runs:
                if run.owner != (rank - d) % size:
                    continue
                for x, into in zip(
                    (grad_key, grad_value), room.split(self._columns, 1), strict=True
                ):
                    target = _placed(into, Span(at, run.count), x)
                    copied.append((target, x[run.place : run.place + run.count]))
                at += run.count
        for d in distances:
            taker = (rank + d) % size
            counts = pulls.counts[taker]
            before = sum(counts[(taker - other) % size] for other in distances if other < d)
            place = sum(pulls.counts[t][rank] for t in takers if t < taker)
            rows = self._rows_of(taker, came.dtype)[before:]
            there.append((came[place:][: counts[rank]], rows[: counts[rank]]))
        return copied, there

    def _pull(self, name, given: list[Tensor], moves: Callable[..., Moves]) -> None:
        """Make the moves of ``given``, which are the same for tensors of the same kind."""
        box = self._box
        box.wait_for_readers()
        if not box.may_pull_here:
            copied, there = moves(*given)
            copy_all(copied)
            box.pull(*_apart(there), then_wait=True)
            return
        kind = self._pulls, name, *((x.shape, x.stride(), x.dtype) for x in given)
        here = box.views.get(kind)
        if here is None:
            box.forget_many(_MOST_VIEWS)
            fakes = [stand_in(x) for x in given]
            copied, there = moves(*fakes)
            here = box.views[kind] = here_of(box, copied, *_apart(there), fakes)
        box.pull_here([*given, *here.rooms], here.numbers)

    def _rooms(self, dtype: torch.dtype) -> list[tuple[int, Tensor]]:
        return [(owner, self._rows_of(owner, dtype)) for owner in self._pulls.owners]

    def _rows_of(self, rank: int, dtype: torch.dtype) -> Tensor:
        """All rows ``(rows, columns)`` of a rank's room."""
        rows, columns = self._rows(dtype), sum(self._columns)
        return self._box.at(rank, 0, rows * columns, dtype).view(rows, columns)

    def _rows(self, dtype: torch.dtype) -> int:
        return self._size // (sum(self._columns) * dtype.itemsize)


def pulled(
    pulls: Pulls, ring: Ring, key: Tensor, value: Tensor, dtype: torch.dtype | None, add_up
) -> Pulled | None:
    """The transfers by copy engines; None if they cannot carry them. The same on all ranks."""
    columns = [math.prod(x.shape[1:]) for x in (key, value)]
    size = pulls.size(sum(columns), [key.dtype] if dtype is None else [key.dtype, dtype])
    box = ring.mailbox("varlen", size)
    return None if box is None else Pulled(pulls, box, columns, size, dtype, add_up)


def _apart(pairs: Pairs) -> tuple[list[Tensor], list[Tensor]]:
    return [target for target, _ in pairs], [source for _, source in pairs]


def _placed(into: Tensor, span: Span, like: Tensor) -> Tensor:
    """Rows of ``into`` (rows, columns) with the dims of ``like`` (rows, H, D)."""
    return into[span.position : sum(span)].unflatten(1, like.shape[1:])


def _compact(of_owners: Sequence[Sequence[Span]]) -> list[Run]:
    """The runs of compact keys: owner after owner, each in the order of the owner's shard."""
    found, place = [], 0
    for owner, spans in enumerate(of_owners):
        for row, count in spans:
            found.append(Run(owner, row, place, count))
            place += count
    return found


def _in_order(runs: Sequence[Run], order: Iterable[tuple[int, int, int]]) -> list[Run]:
    """The same rows, each at the place that ``order`` gives its compact place."""
    found = []
    order = sorted(order)
    index = 0
    for owner, row, place, count in runs:
        while count:
            start, length, first = order[index]
            here = min(count, start + length - place)
            found.append(Run(owner, row, first + place - start, here))
            row, place, count = row + here, place + here, count - here
            index += place == start + length
    return found
