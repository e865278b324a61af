"""Computes which ranks need which keys, and which rank sends what to whom. Integers only.

Every rank computes the same table of needs, so no rank waits for a message that is never sent.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from cp_dispatch.by_need.ownership import Ownership
from cp_dispatch.flex.cut import touched
from cp_dispatch.layouts import Span
from cp_dispatch.layouts.balancer import coalesce
from cp_dispatch.layouts.spans import append

# If ranks need at least this share of all keys, all keys are gathered.
_MOST = 0.75
# This many copies between GPUs cost the host more than a launch.
_WORTH_A_LAUNCH = 4

#: ``[rank][lane]`` -> runs of needed positions, ascending.
Needs = tuple[tuple[tuple[Span, ...], ...], ...]


def needs_of(
    tables: torch.Tensor, queries: Ownership, keys: Ownership, blocks: tuple[int, int]
) -> Needs:
    """What every rank needs, from the whole mask.

    ``tables`` ``(lanes, R, C)`` bool on CPU: which key blocks the query blocks compute.
    """
    return tuple(
        tuple(
            runs(tables[lane, _index(queries, rank, lane, blocks[0])].any(0), blocks[1], keys)
            for lane in range(queries.lanes)
        )
        for rank in range(queries.world_size)
    )


def _index(queries: Ownership, rank: int, lane: int, block: int) -> list[int]:
    covered = touched(queries, rank, block).blocks[lane]
    return sorted({block for blocks in covered for block in blocks})


def runs(needed: torch.Tensor, block: int, keys: Ownership) -> tuple[Span, ...]:
    """The runs of positions of the key blocks in ``needed`` (C,)."""
    spans = []
    for i in needed.nonzero().flatten().tolist():
        start = i * block
        spans.append(Span(start, min(start + block, keys.length) - start))
    return coalesce(spans)


def everything(queries: Ownership, keys: Ownership) -> Needs:
    """The needs if every rank needs all keys."""
    whole = (Span(0, keys.length),) if keys.length else ()
    return ((whole,) * queries.lanes,) * queries.world_size


@dataclass(frozen=True)
class Move:
    """The rows of an owner that another rank needs: their places in the owner's shard, and among
    all positions. Both go lane by lane (see :class:`Ownership`)."""

    owner: int
    taker: int
    shard: tuple[Span, ...]
    places: tuple[Span, ...]

    @property
    def rows(self) -> int:
        return sum(span.length for span in self.shard)

    @functools.cached_property
    def pieces(self) -> list[tuple[int, int, int]]:
        """The runs in both orders: where each starts in the shard and among all positions, and its
        length."""
        found = []
        places = [list(span) for span in reversed(self.places)]
        for start, length in self.shard:
            while length:
                place = places[-1]
                count = min(length, place[1])
                found.append((start, place[0], count))
                start, length = start + count, length - count
                place[0], place[1] = place[0] + count, place[1] - count
                if not place[1]:
                    places.pop()
        return found


#: ``[owner][taker]``.
Moves = tuple[tuple[Move, ...], ...]


@functools.lru_cache(maxsize=256)
def moves(needs: Needs, keys: Ownership) -> Moves:
    """The moves between all ranks. The move from a rank to itself is of the own rows that it
    uses."""
    ranks = range(keys.world_size)
    # Once for all that need the same, such as everything.
    rows = {own: [_needed_rows(owner, own, keys) for owner in ranks] for own in set(needs)}
    of_takers = [rows[own] for own in needs]
    return tuple(
        tuple(Move(owner, taker, *of_takers[taker][owner]) for taker in ranks) for owner in ranks
    )


def _needed_rows(
    owner: int, needed: tuple[tuple[Span, ...], ...], keys: Ownership
) -> tuple[tuple[Span, ...], tuple[Span, ...]]:
    """``shard`` and ``places`` of a :class:`Move`."""
    shard: list[Span] = []
    places: list[Span] = []
    for lane in range(keys.lanes):
        at = lane * keys.rows(owner)
        for position, length in keys.spans(owner, lane):
            for wanted, count in _overlaps(needed[lane], position, position + length):
                append(shard, at + wanted - position, count)
                append(places, lane * keys.length + wanted, count)
            at += length
    return tuple(shard), tuple(places)


def _overlaps(spans: Sequence[Span], start: int, stop: int):
    for position, length in spans:
        first, last = max(start, position), min(stop, position + length)
        if first < last:
            yield first, last - first


def pays_to_gather(needs: Needs, keys: Ownership) -> bool:
    """Whether ranks need so many keys that one gather of all keys is faster."""
    rows = {keys.rows(owner) for owner in range(keys.world_size)}
    needed = sum(move.rows for moved in moves(needs, keys) for move in moved)
    everyone = keys.world_size**2 * keys.lanes * max(rows)
    return keys.world_size > 1 and len(rows) == 1 and needed >= _MOST * everyone


def packs(table: Moves, taker: int) -> bool:
    """Whether rows of other ranks should arrive packed and then be put in place, which takes one
    more launch but many fewer copies."""
    moved = [table[owner][taker] for owner in range(len(table)) if owner != taker]
    return sum(len(move.pieces) - len(move.shard) for move in moved) >= _WORTH_A_LAUNCH


def most_runs(table: Moves, may_pack: bool) -> int:
    """The largest number of copies by which any rank gets the rows of others."""

    def runs(taker: int) -> int:
        moved = [table[owner][taker] for owner in range(len(table)) if owner != taker]
        packed = may_pack and packs(table, taker)
        return sum(len(move.shard if packed else move.pieces) for move in moved)

    return max(map(runs, range(len(table))))


def rows_sent(needs: Needs, keys: Ownership, rank: int, may_gather: bool = True) -> int:
    """The number of rows that ``rank`` sends to others in a forward."""
    if may_gather and pays_to_gather(needs, keys):
        return (keys.world_size - 1) * keys.lanes * keys.rows(rank)
    return sum(move.rows for move in moves(needs, keys)[rank] if move.taker != rank)
