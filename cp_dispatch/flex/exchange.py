"""Moving the keys that a rank needs to it, and their gradients back.

Note [Rows in place]
~~~~~~~~~~~~~~~~~~~~
Keys arrive in one buffer with a place for every position, in true order::

    (lanes, all positions, batch rows of a lane, Hkv, D + Dv)

Only the rows that some query block of this rank computes are moved, unless ranks need most rows of
all, and places without a row are memory that no kernel looks at. So one kernel call attends to all
keys, its mask has the user's columns, and ``score_mod`` and ``mask_mod`` see true key positions,
whatever the layout. In the backward the rows of dK and dV that were needed go back the same way, in
the inputs' dtype as the kernel gives them, and their owner adds them up in float32.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from cp_dispatch._compat import all_gather_single
from cp_dispatch.flex.needs import Move, Needs, everything, moves, pays_to_gather
from cp_dispatch.flex.ownership import Ownership
from cp_dispatch.layouts import Span
from cp_dispatch.permute import span_indices

# Beyond this many bytes ranks at one distance after the other exchange, so that no rank holds
# everybody's rows a second time.
_AT_ONCE = 2**28
# With more runs than this rows are copied by an index.
_MAX_RUNS = 4


class Exchange:
    """The moves of one rank, for a given mask; used by forward and backward alike."""

    def __init__(self, needs: Needs, keys: Ownership, rank: int, device: torch.device):
        self.keys, self.rank = keys, rank
        table, whole = moves(needs, keys), moves(everything(keys, keys), keys)
        ranks = range(keys.world_size)
        self._own = _Place(whole[rank][rank], device)
        self._home = _Place(table[rank][rank], device)
        self._to = [_Place(table[rank][taker], device) for taker in ranks]
        self._of = [_Place(table[owner][rank], device) for owner in ranks]
        # By the distance from owner to taker: the most rows of a pair of ranks.
        self._most = [
            max(table[owner][(owner + distance) % len(ranks)].rows for owner in ranks)
            for distance in ranks
        ]
        self.gathers = pays_to_gather(needs, keys)
        self._in_place = keys.lanes == 1 and not keys.layout
        self._all = []
        if self.gathers and not self._in_place:
            self._all = [_Place(whole[owner][rank], device) for owner in ranks]

    @property
    def adds_up(self) -> bool:
        """Whether gradients of this rank's rows come from other ranks too."""
        takers = (place for rank, place in enumerate(self._to) if rank != self.rank)
        return any(place.rows for place in takers)

    def bring(self, group, key: Tensor, value: Tensor, buffer: Tensor) -> None:
        """This rank's rows to ``buffer`` (see Note [Rows in place]) and to all who need them, and
        what this rank needs from all."""
        into = buffer.flatten(2).flatten(0, 1)
        if self.keys.lanes > 1:
            self._own.put(into, pack_rows([key, value], self.keys.lanes))
        else:
            views = split_rows(buffer, [key.size(3), value.size(3)])
            for view, x in zip(views, (key, value), strict=True):
                self._own.put(view.permute(2, 0, 1, 3), x.permute(2, 0, 1, 3))
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
        """Sums of the ``parts`` (places, n) that ranks computed, into ``shards`` (rows, n) of the
        owners; both lists hold dK and dV."""
        for part, shard in zip(parts, shards, strict=True):
            if self._home.rows < shard.size(0):
                shard.zero_()
            self._home.put_in_shard(shard, self._home.taken(part))
        size = parts[0].element_size()
        # Few rows go together, many one tensor after the other.
        together = [list(range(len(parts)))]
        if self._bytes(sum(part.size(1) for part in parts) * size) > _AT_ONCE:
            together = [[i] for i in range(len(parts))]
        for indices in together:
            columns = [parts[i].size(1) for i in indices]
            for owners, takers in self._steps(sum(columns) * size):
                rows = {
                    owner: _side_by_side([self._of[owner].taken(parts[i]) for i in indices])
                    for owner in owners
                }
                came = self._swap(group, rows, {taker: self._to[taker].rows for taker in takers})
                # One rank after the other, so that sums come out the same every time.
                for taker, found in came.items():
                    for i, column in zip(indices, found.split(columns, 1), strict=True):
                        self._to[taker].add_to_shard(shards[i], column)

    def _swap(self, group, outgoing: dict[int, Tensor], incoming: dict[int, int]):
        """Send rows to ranks and receive this many rows from ranks, in ascending order."""
        size, like = self.keys.world_size, next(iter(outgoing.values()))
        outgoing = {rank: outgoing[rank] for rank in sorted(outgoing)}
        incoming = {rank: incoming[rank] for rank in sorted(incoming)}
        rows = [part for part in outgoing.values() if part.size(0)]
        send = torch.cat(rows) if len(rows) > 1 else (rows[0] if rows else like).contiguous()
        receive = like.new_empty((sum(incoming.values()), like.size(1)))
        row = like.size(1) * like.element_size()
        # As bytes: not every collective library knows every dtype.
        dist.all_to_all_single(
            receive.view(-1).view(torch.uint8),
            send.view(-1).view(torch.uint8),
            [incoming.get(rank, 0) * row for rank in range(size)],
            [outgoing[rank].size(0) * row if rank in outgoing else 0 for rank in range(size)],
            group=group,
        )
        return dict(zip(incoming, receive.split(list(incoming.values())), strict=True))

    def _bytes(self, row: int) -> int:
        """At most so many bytes does a rank send to all others."""
        return sum(self._most[1:]) * row

    def _steps(self, row: int) -> list[tuple[list[int], list[int]]]:
        """Of each exchange, the owners whose rows this rank takes and the takers of its own.
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
    """A move's rows: in the owner's shard, and in the buffer of all positions. Rows are dim 0."""

    def __init__(self, move: Move, device: torch.device):
        self.rows = move.rows
        self._shard = _Selector(move.shard, device)
        self._places = _Selector(move.places, device)

    def taken(self, places: Tensor) -> Tensor:
        """The rows as they lie among all."""
        return self._places.take(places)

    def put(self, into: Tensor, rows: Tensor) -> None:
        for part, values in self._places.parts(into, rows):
            part.copy_(values)

    def put_in_shard(self, shard: Tensor, rows: Tensor) -> None:
        for part, values in self._shard.parts(shard, rows):
            part.copy_(values)

    def add_to_shard(self, shard: Tensor, rows: Tensor) -> None:
        for part, values in self._shard.parts(shard, rows):
            part.add_(values)


class _Selector:
    """Some rows of a tensor: as slices, where they are few runs, else by an index."""

    def __init__(self, spans: tuple[Span, ...], device: torch.device):
        self._spans = spans
        self._index = span_indices(spans).to(device) if len(spans) > _MAX_RUNS else None

    def take(self, rows: Tensor) -> Tensor:
        if self._index is not None:
            return rows.index_select(0, self._index)
        parts = [rows[start : start + length] for start, length in self._spans]
        if len(parts) == 1:
            return parts[0]
        return torch.cat(parts) if parts else rows[:0]

    def parts(self, rows: Tensor, values: Tensor):
        """``(some of the rows, their values)``, which are to be written or added."""
        if self._index is not None:
            yield _Indexed(rows, self._index), values
            return
        at = 0
        for start, length in self._spans:
            yield rows[start : start + length], values[at : at + length]
            at += length


class _Indexed:
    """Rows by an index in which none occurs twice."""

    def __init__(self, rows: Tensor, index: Tensor):
        self._rows, self._index = rows, index

    def copy_(self, values: Tensor) -> None:
        self._rows.index_copy_(0, self._index, values.to(self._rows.dtype))

    def add_(self, values: Tensor) -> None:
        self._rows.index_add_(0, self._index, values.to(self._rows.dtype))


# -- Between the attention's tensors and rows ---------------------------------------------------


def pack_rows(tensors: Sequence[Tensor], lanes: int) -> Tensor:
    """``(B, H, L, D)`` tensors side by side: ``(lanes * L, B / lanes * H * sum of D)``."""
    batch, heads, length, _ = tensors[0].shape
    dims = [x.size(3) for x in tensors]
    rows = tensors[0].new_empty((lanes, length, batch // lanes, heads, sum(dims)))
    views = split_rows(rows, dims)
    for view, x in zip(views, tensors, strict=True):
        view.copy_(x)
    return rows.view(lanes * length, batch // lanes * heads * sum(dims))


def split_rows(rows: Tensor, dims: Sequence[int]) -> list[Tensor]:
    """``(lanes, L, B / lanes, H, sum of D)`` as views ``(B, H, L, D)``."""
    lanes, length, per_lane, heads, dim = rows.shape
    # One of the two is 1, so that the batch is a view.
    batch = rows.permute(0, 2, 3, 1, 4).view(lanes * per_lane, heads, length, dim)
    return list(batch.split(list(dims), dim=-1))


def rows_of(x: Tensor, lanes: int) -> Tensor:
    """``(B, H, S, D)`` as ``(lanes * S, B / lanes * H * D)``, a view where memory allows it."""
    batch, heads, length, dim = x.shape
    rows = x.view(lanes, batch // lanes, heads, length, dim).permute(0, 3, 1, 2, 4)
    return rows.reshape(lanes * length, batch // lanes * heads * dim)
