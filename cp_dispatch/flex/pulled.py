"""Moves keys and gradients by copy engines: ranks read what they need from each other's rooms.

Rows are in a room of their owner, and a rank that needs some copies them to their final place. Keys
go from the owner's shard to their positions in a graph's buffer, so nothing is packed or unpacked,
and keys that no row attends are not copied. (A graph may overwrite its buffers, so they cannot be
rooms themselves.) If that took many more copies than the owner's shard has runs, they are copied
run by run, and a kernel puts them in place. Shares of gradients are stored owner after owner; the
owner copies and sums them.

The flags are those of Note [Flags of a mailbox] with roles exchanged: "free" means that rows are
there, "full" that they have been read.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from cp_dispatch.by_need.copies import copy_all
from cp_dispatch.by_need.here import MOST_RUNS
from cp_dispatch.by_need.selector import Pairs
from cp_dispatch.flex.carriers import Collectives, finish_wide, kept_wide
from cp_dispatch.flex.exchange import Exchange
from cp_dispatch.flex.rows import split_rows
from cp_dispatch.native.parts import add_up
from cp_dispatch.native.rows import sum_rows
from cp_dispatch.schedules.comm import Ring

# Views of rooms keep the exchange of a mask alive, and its indices on the GPU.
MOST_VIEWS = 32


def keys_by(exchange: Exchange, ring: Ring, key: Tensor, value: Tensor, groups: int):
    """The carrier of the keys of all groups; the same on all ranks."""
    if 0 < exchange.most_runs[groups > 1] <= MOST_RUNS:
        rows = [x.rows for x in exchange.offered]
        if exchange.keys.lanes > 1:
            rows = [exchange.keys.lanes * exchange.keys.rows(rank) for rank in range(len(rows))]
        room = _Room(exchange, ring, "flex keys", key, value, groups, max(rows))
        if room.box is not None:
            return PulledKeys(exchange, ring, room, rows, groups)
    return Collectives(exchange, ring)


def gradients_by(exchange: Exchange, ring: Ring, key: Tensor, value: Tensor, groups: int):
    """The carrier of the gradients of all groups; the same on all ranks."""
    rows = exchange.shares
    # With one group, the keys have been read before there are gradients.
    name = "flex keys" if groups == 1 else "flex gradients"
    room = _Room(exchange, ring, name, key, value, groups, max(map(sum, rows)))
    if room.box is not None:
        return PulledGradients(exchange, ring, room, rows, groups)
    return Collectives(exchange, ring)


def sums_by(exchange: Exchange, ring: Ring, key: Tensor, value: Tensor) -> PulledGradients | None:
    """The carrier that sums the gradients of all heads in one pass; None if that is not possible.
    The same on all ranks."""
    if exchange.keys.lanes > 1:
        return None
    carrier = gradients_by(exchange, ring, key, value, 1)
    return carrier if isinstance(carrier, PulledGradients) else None


class _Room:
    """A mailbox with rows for one group of heads at a time; ``box`` is None if there is none."""

    def __init__(self, exchange, ring: Ring, name: str, key: Tensor, value: Tensor, groups, rows):
        batch, heads, _, dim = key.shape
        self.shape = exchange.keys.lanes, batch // exchange.keys.lanes, heads // groups
        self.dims = dim, value.size(3)
        self.columns = self.shape[1] * self.shape[2] * sum(self.dims)
        self.dtype = key.dtype
        size = rows * self.columns * self.dtype.itemsize
        self.box = ring.mailbox(name, size) if size else None

    def rows(self, rank: int, count: int) -> Tensor:
        """The first rows ``(count, columns)`` of a rank's room."""
        flat = self.box.at(rank, 0, count * self.columns, self.dtype)
        return flat.view(count, self.columns)


class _Pulled:
    """``rows`` is the number of rows in each rank's room: one number, or one for each owner."""

    def __init__(self, exchange: Exchange, ring: Ring, room: _Room, rows, groups: int):
        self._exchange, self._room, self._rows, self._groups = exchange, room, rows, groups
        self.box, self._rank = room.box, ring.rank
        size = ring.world_size
        # Nearest rank first, so that no two ranks read from the same rank at a time.
        self._peers = [(ring.rank + step) % size for step in range(1, size)]
        place = type(self), exchange, room.shape, room.dims, room.dtype, groups
        found = self.box.views.get(place)
        if found is None:
            self.box.forget_many(MOST_VIEWS)
            found = self.box.views[place] = self._views()
        #: This rank's rows, and the rows of others that it reads.
        self._own, self._there = found


class PulledKeys(_Pulled):
    """Like :class:`~cp_dispatch.flex.carriers.Collectives`, for keys."""

    def _views(self):
        lanes, per_lane, heads = self._room.shape
        rows = self._room.rows(self._rank, self._rows[self._rank])
        rows = rows.view(lanes, rows.size(0) // lanes, per_lane, heads, sum(self._room.dims))
        there = []
        for owner in self._peers:
            theirs = self._room.rows(owner, self._rows[owner])
            move = self._exchange.table[owner][self._rank]
            runs = move.shard if self._packs else [(at, count) for at, _, count in move.pieces]
            if lanes == 1:
                runs = [(self._exchange.offered[owner].place(at), count) for at, count in runs]
            there += [theirs[start : start + count] for start, count in runs]
        return split_rows(rows, self._room.dims), there

    @property
    def _packs(self) -> bool:
        return self._groups == 1 and self._exchange.packs

    def offer(self, key: Tensor, value: Tensor) -> Pairs:
        self.box.wait_for_readers()
        return self._exchange.offer(self._own, (key, value))

    def fetch(self, buffer: Tensor) -> None:
        self.box.pull(self._places(buffer), self._there, then_wait=True)

    def _places(self, buffer: Tensor) -> list[Tensor]:
        into = buffer.flatten(2).flatten(0, 1)
        return [
            into[place : place + count]
            for owner in self._peers
            for _, place, count in self._exchange.table[owner][self._rank].pieces
        ]

    def packed(self, like: Tensor) -> Tensor | None:
        """A buffer for packed rows of other ranks."""
        if not self._packs:
            return None
        return like.new_empty((sum(self._exchange.shares[self._rank]), self._room.columns))

    def _places_in(self, packed: Tensor) -> list[Tensor]:
        shares = self._exchange.shares[self._rank]
        found = []
        for owner in self._peers:
            at = sum(shares[:owner])
            for _, count in self._exchange.table[owner][self._rank].shard:
                found.append(packed[at : at + count])
                at += count
        return found

    def views_for(
        self, buffer: Tensor, packed: Tensor | None
    ) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """For all groups at once: this rank's room for keys and values, the parts of others' rooms
        that it reads, and their targets."""
        places = self._places(buffer) if packed is None else self._places_in(packed)
        return self._own, self._there, places

    def bring(self, key: Tensor, value: Tensor, buffer: Tensor) -> None:
        """Bring the keys of all groups at once to ``buffer``; the current stream waits for them."""
        packed = self.packed(buffer)
        copy_all(self.offer(key, value) + self._exchange.own_places(key, value, buffer))
        _, there, places = self.views_for(buffer, packed)
        self.box.pull(places, there, then_wait=True)
        if packed is not None:
            copy_all(self._exchange.unpacked(packed, buffer))


class PulledGradients(_Pulled):
    """Like :class:`~cp_dispatch.flex.carriers.Collectives`, for gradients."""

    def _views(self):
        there = []
        for taker in self._peers:
            shares = self._rows[taker]
            rows = self._room.rows(taker, sum(shares))
            there.append(rows[sum(shares[: self._rank]) :][: shares[self._rank]])
        return self._room.rows(self._rank, sum(self._rows[self._rank])), there

    def put_aside(self, parts: Sequence[Tensor], grads: Sequence[Tensor]) -> list[Tensor]:
        self.box.wait_for_readers()
        if self._exchange.keys.lanes > 1:
            rows, sums = kept_wide(self._exchange, parts, grads)
            copy_all(self._exchange.stage(rows, self._own))
            return sums
        sums, copied = self._exchange.sums, self.shares_of(*parts)
        if sums.by_row is None:
            copy_all(copied + sums.own_in_place(parts, grads))
            return []
        gathered = self._own.new_empty((sums.by_row.rows, self._own.size(1)))
        copy_all(copied + self.own_into(gathered, *parts))
        return [gathered]

    def give(self, aside: list[Tensor], grads: Sequence[Tensor]) -> None:
        sums = self._exchange.sums
        if self._exchange.keys.lanes > 1:
            shards = [total.flatten(2).flatten(0, 1) for total in aside]
            self._exchange.add(dict(sorted(zip(self._peers, self._pull(), strict=True))), shards)
            finish_wide(aside, grads)
        elif sums.by_row is None:
            # Gradients that are already in place are one of the parts of their own sum.
            add_up(grads, self.parts(*grads, grads, self._pull()), sums.places_in_place)
        else:
            (gathered,) = aside
            places = self.places(gathered)
            self.box.pull(places, self._there, then_wait=True)
            self._sum_by_row(grads, gathered)

    def _pull(self) -> list[Tensor]:
        """Pull each peer's gradients of this rank's rows; the current stream waits for them."""
        came = [self._own.new_empty(rows.shape) for rows in self._there]
        self.box.pull(came, self._there, then_wait=True)
        return came

    def _sum_by_row(self, grads: Sequence[Tensor], gathered: Tensor) -> None:
        by_row = self._exchange.sums.by_row
        sum_rows(*self.rows_of(grads, gathered), by_row.order, by_row.offsets, [0, 0])

    def bring_back(
        self, grad_key: Tensor, grad_value: Tensor, grads: tuple[Tensor, Tensor]
    ) -> None:
        """Sum what all ranks computed, ``(B, Hkv, positions, D)``, into ``grads`` of this rank's
        keys ``(B, Hkv, L, D)``; for a single lane, and all groups at once. Rounded once."""
        self.box.wait_for_readers()
        copy_all(self.shares_of(grad_key, grad_value))
        sums = self._exchange.sums
        if sums.by_row is None:
            add_up(grads, self.parts(grad_key, grad_value, grads, self._pull()), sums.places)
            return
        gathered = self._own.new_empty((sums.by_row.rows, self._own.size(1)))
        self.box.pull(self.places(gathered), self._there)
        copy_all(self.own_into(gathered, grad_key, grad_value))
        self.box.wait()
        self._sum_by_row(grads, gathered)

    @property
    def views(self) -> tuple[Tensor, list[Tensor]]:
        """For all groups at once: this rank's room, and the parts of others' rooms that it
        reads."""
        return self._own, self._there

    def shares_of(self, grad_key: Tensor, grad_value: Tensor) -> Pairs:
        """The shares of gradients of others' keys, with the places where they are staged."""
        parts = [x.permute(2, 0, 1, 3) for x in (grad_key, grad_value)]
        return self._exchange.stage(parts, self._own)

    def parts(self, grad_key, grad_value, grads, came: list[Tensor]) -> tuple[list, list]:
        """The parts whose sums are dK and dV; ``came`` holds those from the peers."""
        shares = self._exchange.sums.counts
        keys, values = [grad_key] * shares[self._rank], [grad_value] * shares[self._rank]
        for taker, rows in sorted(zip(self._peers, came, strict=True), key=lambda pair: pair[0]):
            key, value = (x.permute(1, 2, 0, 3) for x in self._columns(rows, grads))
            keys += [key] * shares[taker]
            values += [value] * shares[taker]
        return keys, values

    # -- The same row by row (:class:`~cp_dispatch.flex.sums.RowSums`) ------------------------

    def places(self, gathered: Tensor) -> list[Tensor]:
        """The places for the shares that the peers computed."""
        by_row, there = self._exchange.sums.by_row, self._there
        pairs = zip(self._peers, there, strict=True)
        return [by_row.of(taker, gathered, rows.size(0)) for taker, rows in pairs]

    def own_into(self, gathered: Tensor, grad_key: Tensor, grad_value: Tensor) -> Pairs:
        """This rank's shares for its own rows, with their places."""
        parts = [x.permute(2, 0, 1, 3) for x in (grad_key, grad_value)]
        columns = self._columns(gathered, (grad_key, grad_value))
        return self._exchange.sums.by_row.own_into(columns, parts)

    def rows_of(self, grads, gathered: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """dK and dV, row by row, and the parts that are summed."""
        return [x.permute(2, 0, 1, 3) for x in grads], self._columns(gathered, grads)

    def _columns(self, rows: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
        """Splits rows that hold dK and dV side by side into ``(rows, B, Hkv, D)`` for each."""
        shapes = [(x.size(0), x.size(1), x.size(3)) for x in like]
        parts = rows.split([math.prod(shape) for shape in shapes], 1)
        return [x.view(x.size(0), *shape) for x, shape in zip(parts, shapes, strict=True)]
