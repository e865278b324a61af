"""Moves the keys that a rank needs to it, and their gradients back.

Note [Rows in place]
~~~~~~~~~~~~~~~~~~~~
Keys arrive in one buffer with a place for every position, in natural order::

    (lanes, all positions, batch rows of a lane, Hkv, D + Dv)

Only the rows that some query block of this rank computes are moved, unless ranks need most of all
rows. No kernel reads places without a row. So one kernel call attends to all keys, its mask has the
user's columns, and ``score_mod`` and ``mask_mod`` get original key positions, whatever the layout.
In the backward, the needed rows of dK and dV go back the same way, in the inputs' dtype as the
kernel returns them, and their owner sums them in float32.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from cp_dispatch._compat import all_gather_single
from cp_dispatch.by_need.copies import copy_all
from cp_dispatch.by_need.ownership import Ownership
from cp_dispatch.by_need.selector import Pairs, Selector
from cp_dispatch.flex.needs import Move, Needs, everything, most_runs, moves, packs, pays_to_gather
from cp_dispatch.flex.offered import Offered
from cp_dispatch.flex.rows import pack_rows, split_rows
from cp_dispatch.flex.sums import Sums

# Above this many bytes ranks exchange one distance at a time, so that no rank holds a second copy
# of all ranks' rows.
_AT_ONCE = 2**28


class Exchange:
    """The moves of one rank, for a given mask; used by forward and backward alike."""

    def __init__(self, needs: Needs, keys: Ownership, rank: int, device: torch.device):
        self.keys, self.rank = keys, rank
        self.table = table = moves(needs, keys)
        whole = moves(everything(keys, keys), keys)
        ranks = range(keys.world_size)
        self._own = _Place(whole[rank][rank], device)
        self._home = _Place(table[rank][rank], device)
        self._to = [_Place(table[rank][taker], device) for taker in ranks]
        self._of = [_Place(table[owner][rank], device) for owner in ranks]
        # For each distance from owner to taker, the most rows of any such pair of ranks.
        self._most = [
            max(table[owner][(owner + distance) % len(ranks)].rows for owner in ranks)
            for distance in ranks
        ]
        #: The rows that each owner offers to other ranks; for a single lane.
        self.offered = [Offered(move for move in table[o] if move.taker != o) for o in ranks]
        self._offer = Selector(self.offered[rank].spans, device)
        self.gathers = pays_to_gather(needs, keys)
        self._in_place = keys.lanes == 1 and not keys.layout
        # The rows that this rank needs from others, owner after owner, and the sources of the sums
        # for its own rows.
        shares = [span for owner in self._others for span in table[owner][rank].places]
        self._shares = Selector(tuple(shares), device)
        self.sums = None if keys.lanes > 1 else Sums(table[rank], rank, keys.rows(rank), device)
        self._all = []
        if self.gathers and not self._in_place:
            self._all = [_Place(whole[owner][rank], device) for owner in ranks]
        #: Weak references of :mod:`cp_dispatch.flex.prepared`.
        self.ways: dict = {}

    @property
    def adds_up(self) -> bool:
        """Whether gradients for this rank's rows also come from other ranks."""
        takers = (place for rank, place in enumerate(self._to) if rank != self.rank)
        return any(place.rows for place in takers)

    @functools.cached_property
    def packs(self) -> bool:
        """As :func:`~cp_dispatch.flex.needs.packs`, for all heads at once."""
        return self.keys.lanes == 1 and packs(self.table, self.rank)

    @functools.cached_property
    def most_runs(self) -> tuple[int, int]:
        """As :func:`~cp_dispatch.flex.needs.most_runs`: for all heads at once, and for groups of
        heads."""
        return most_runs(self.table, self.keys.lanes == 1), most_runs(self.table, False)

    @functools.cached_property
    def shares(self) -> list[list[int]]:
        """``[taker][owner]``: the number of the owner's rows for which the taker, another rank, has
        shares of gradients."""
        ranks = range(self.keys.world_size)
        return [[0 if o == t else self.table[o][t].rows for o in ranks] for t in ranks]

    def bring(self, group, key: Tensor, value: Tensor, buffer: Tensor) -> None:
        """Move this rank's rows to ``buffer`` (see Note [Rows in place]) and to all ranks that need
        them, and fetch what this rank needs."""
        copy_all(self.own_places(key, value, buffer))
        self.fetch(group, buffer)

    def own_places(self, key: Tensor, value: Tensor, buffer: Tensor) -> Pairs:
        """``(a place in the buffer, the rows of this rank that belong there)``."""
        if self.keys.lanes > 1:
            into = buffer.flatten(2).flatten(0, 1)
            return list(self._own.pairs(into, pack_rows([key, value], self.keys.lanes)))
        views = split_rows(buffer, [key.size(3), value.size(3)])
        return [
            pair
            for view, x in zip(views, (key, value), strict=True)
            for pair in self._own.pairs(view.permute(2, 0, 1, 3), x.permute(2, 0, 1, 3))
        ]

    def offer(self, rooms: Sequence[Tensor], shards: Sequence[Tensor]) -> Pairs:
        """The rows of this rank's ``shards`` (B, H, L, D) that it offers, with their places in
        ``rooms`` (B, H, rows, D)."""
        if self.keys.lanes > 1:
            return list(zip(rooms, shards, strict=True))
        return [
            pair
            for room, x in zip(rooms, shards, strict=True)
            for pair in self._offer.taken_into(room.permute(2, 0, 1, 3), x.permute(2, 0, 1, 3))
        ]

    def unpacked(self, packed: Tensor, buffer: Tensor) -> Pairs:
        """The places in ``buffer`` for packed rows of other ranks, owner after owner, with these
        rows."""
        return list(self._shares.parts(buffer.flatten(2).flatten(0, 1), packed))

    def fetch(self, group, buffer: Tensor) -> None:
        """Fetch what this rank needs from other ranks into ``buffer``, and send them its rows."""
        into = buffer.flatten(2).flatten(0, 1)
        if self.gathers:
            self._gather(group, into)
            return
        for owners, takers in self._steps(into.size(1) * into.element_size()):
            rows = {taker: self._to[taker].taken(into) for taker in takers}
            came = self._swap(group, rows, {owner: self._of[owner].rows for owner in owners})
            for owner, part in came.items():
                self._of[owner].put(into, part)

    def _gather(self, group, into: Tensor) -> None:
        own = self._own.taken(into)
        if self._in_place:
            all_gather_single(into, own, group=group)
            return
        gathered = into.new_empty((len(self._all) * own.size(0), into.size(1)))
        all_gather_single(gathered, own, group=group)
        for owner, rows in enumerate(gathered.split(own.size(0))):
            if owner != self.rank:
                self._all[owner].put(into, rows)

    def bring_back(self, group, parts: Sequence[Tensor], shards: Sequence[Tensor]) -> None:
        """Sum the ``parts`` (places, n) that the ranks computed into ``shards`` (rows, n) of the
        owners. Both lists hold dK and dV."""
        self.keep(parts, shards)
        size = parts[0].element_size()
        # Few rows are sent together, many one tensor after the other.
        together = [list(range(len(parts)))]
        if self._bytes(sum(part.size(1) for part in parts) * size) > _AT_ONCE:
            together = [[i] for i in range(len(parts))]
        for indices in together:
            width = sum(parts[i].size(1) for i in indices) * size
            for owners, takers in self._steps(width):
                rows = {
                    owner: _side_by_side([self._of[owner].taken(parts[i]) for i in indices])
                    for owner in owners
                }
                came = self._swap(group, rows, {taker: self._to[taker].rows for taker in takers})
                self.add(came, [shards[i] for i in indices])

    def keep(self, parts: Sequence[Tensor], shards: Sequence[Tensor]) -> None:
        """Write this rank's gradients of its own rows to its shards."""
        for part, shard in zip(parts, shards, strict=True):
            if self._home.rows < shard.size(0):
                shard.zero_()
            self._home.put_in_shard(shard, self._home.taken(part))

    def add(self, came: dict[int, Tensor], shards: Sequence[Tensor]) -> None:
        """Add the takers' gradients to the shards, one rank after the other, so that sums are
        deterministic."""
        columns = [shard.size(1) for shard in shards]
        for taker, found in came.items():
            for shard, column in zip(shards, found.split(columns, 1), strict=True):
                self._to[taker].add_to_shard(shard, column)

    # -- Shares of gradients, staged owner after owner ------------------------------------------

    def stage(self, parts: Sequence[Tensor], staged: Tensor) -> Pairs:
        """This rank's shares of ``parts`` (positions, ...), with their places in ``staged`` (rows,
        n), one part next to the other, for :func:`copy_all`."""
        widths = [math.prod(part.shape[1:]) for part in parts]
        pairs: Pairs = []
        for part, into in zip(parts, staged.split(widths, 1), strict=True):
            pairs += self._shares.taken_into(into.unflatten(1, part.shape[1:]), part)
        return pairs

    def give(self, group, staged: Tensor, shards: Sequence[Tensor]) -> None:
        """Send staged shares to their owners, and add the received shares to this rank's shards."""
        if not any(self._most[1:]):
            return
        incoming = [shares[self.rank] for shares in self.shares]
        received = self._all_to_all(group, staged, self.shares[self.rank], incoming)
        came = received.split(incoming)
        self.add({rank: came[rank] for rank in self._others}, shards)

    @property
    def _others(self) -> list[int]:
        return [rank for rank in range(self.keys.world_size) if rank != self.rank]

    def _swap(self, group, outgoing: dict[int, Tensor], incoming: dict[int, int]):
        """Send rows to ranks, and receive this many rows from ranks, both in ascending order."""
        size, like = self.keys.world_size, next(iter(outgoing.values()))
        outgoing = {rank: outgoing[rank] for rank in sorted(outgoing)}
        incoming = {rank: incoming[rank] for rank in sorted(incoming)}
        rows = [part for part in outgoing.values() if part.size(0)]
        send = torch.cat(rows) if len(rows) > 1 else (rows[0] if rows else like).contiguous()
        sizes = [outgoing[rank].size(0) if rank in outgoing else 0 for rank in range(size)]
        coming = [incoming.get(rank, 0) for rank in range(size)]
        receive = self._all_to_all(group, send, sizes, coming)
        return dict(zip(incoming, receive.split(list(incoming.values())), strict=True))

    def _all_to_all(self, group, send: Tensor, outgoing: list[int], incoming: list[int]) -> Tensor:
        """Send the rows ``send``; return the received rows, in the order of the ranks."""
        receive = send.new_empty((sum(incoming), send.size(1)))
        row = send.size(1) * send.element_size()
        # As bytes: not every collective library knows every dtype.
        dist.all_to_all_single(
            receive.view(-1).view(torch.uint8),
            send.view(-1).view(torch.uint8),
            [rows * row for rows in incoming],
            [rows * row for rows in outgoing],
            group=group,
        )
        return receive

    def _bytes(self, row: int) -> int:
        """The largest number of bytes that a rank sends to all others."""
        return sum(self._most[1:]) * row

    def _steps(self, row: int) -> list[tuple[list[int], list[int]]]:
        """For each exchange, the owners whose rows this rank takes and the takers of its own rows.
        Distances at which no rank has anything to move are left out."""
        size = self.keys.world_size
        busy = [d for d in range(1, size) if self._most[d]]
        groups = [busy] if busy and self._bytes(row) <= _AT_ONCE else [[d] for d in busy]
        return [
            ([(self.rank - d) % size for d in group], [(self.rank + d) % size for d in group])
            for group in groups
        ]


def _side_by_side(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


class _Place:
    """The rows of a move: their places in the owner's shard, and in the buffer of all positions.
    Rows are dim 0."""

    def __init__(self, move: Move, device: torch.device):
        self.rows = move.rows
        self._shard = Selector(move.shard, device)
        self._places = Selector(move.places, device)

    def taken(self, places: Tensor) -> Tensor:
        """The rows, taken from the buffer of all positions."""
        return self._places.take(places)

    def put(self, into: Tensor, rows: Tensor) -> None:
        for part, values in self._places.parts(into, rows):
            part.copy_(values)

    def pairs(self, into: Tensor, rows: Tensor):
        """As :meth:`put`, for :func:`copy_all`."""
        return self._places.parts(into, rows)

    def put_in_shard(self, shard: Tensor, rows: Tensor) -> None:
        for part, values in self._shard.parts(shard, rows):
            part.copy_(values)

    def add_to_shard(self, shard: Tensor, rows: Tensor) -> None:
        for part, values in self._shard.parts(shard, rows):
            part.add_(values)
