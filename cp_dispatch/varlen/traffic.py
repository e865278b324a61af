"""Computes which keys move between which ranks, and where the receiving rank puts them.

Every rank computes all of it from the same documents, without communication. Only keys that some
row of a rank attends are moved; documents within one rank move nothing. The receiving rank stores
its keys *compactly*: those of rank 0, of rank 1, and so on, including its own in turn, each in the
order of the owner's shard. In natural order this is their original order.
"""

from __future__ import annotations

import itertools
import math
import operator
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from cp_dispatch.by_need.ownership import Ownership
from cp_dispatch.errors import ContextParallelError
from cp_dispatch.layouts import Span
from cp_dispatch.layouts.spans import append
from cp_dispatch.varlen.documents import Documents, Piece, Window, pieces_of, union

#: The largest number of copies per key, on average, that a kernel may need.
_MOST_COPIES = 4


@dataclass(frozen=True)
class Traffic:
    """The moves of one rank.

    Attributes:
        pieces: what the rank attends, see Note [Pieces].
        home: rows of its own shard that are among its compact keys.
        gives: for each rank, the rows of this shard that are sent to it; none for itself.
        takes: the number of rows that come from each rank; for itself those of ``home``.
        places: runs of positions among its compact keys, ascending, each with its first row there.
        moves: whether any rank sends anything to another.
        shared: whether several pieces of some rank attend the same key.
        rows: the number of keys that it owns.
        needs: the positions of the keys that each rank needs.
    """

    pieces: tuple[Piece, ...]
    home: tuple[Span, ...]
    gives: tuple[tuple[Span, ...], ...]
    takes: tuple[int, ...]
    places: tuple[tuple[Span, int], ...]
    moves: bool
    shared: bool
    rows: int
    needs: tuple[tuple[Span, ...], ...]

    def compact(self, position: int, length: int) -> list[Span]:
        """The places of a run of positions among the compact keys, in its order."""
        found: list[Span] = []
        index = bisect_right(self.places, position, key=lambda place: place[0].position) - 1
        while length:
            (start, count), row = self.places[index]
            here = min(length, start + count - position)
            append(found, row + position - start, here)
            position, length, index = position + here, length - here, index + 1
        return found


class Needs(NamedTuple):
    """What all ranks attend: each rank's pieces, the positions of its keys, and whether several
    pieces of some rank attend the same key."""

    pieces: list[tuple[Piece, ...]]
    keys: list[tuple[Span, ...]]
    shared: bool


def needs_of(documents: Documents, window: Window, queries: Ownership) -> Needs:
    """The needs of all ranks.

    Raises:
        ContextParallelError: on every rank, if a layout cuts documents into so many runs that some
            rank would hold every key many times.
    """
    ranks = range(queries.world_size)
    pieces = [tuple(pieces_of(documents, window, queries.spans(r))) for r in ranks]
    needs = [union([Span(x.key, x.keys) for x in own]) for own in pieces]
    shared = [_are_shared(*both) for both in zip(pieces, needs, strict=True)]
    return Needs(pieces, needs, any(shared))


def rows_given(
    documents: Documents, window: Window, queries: Ownership, keys: Ownership
) -> tuple[int, ...]:
    """The number of rows that each rank sends in a forward. Raises as :func:`needs_of`."""
    needs = needs_of(documents, window, queries).keys
    # From each of these positions on, as many ranks more (or fewer) need the keys.
    more = Counter(span.position for own in needs for span in own)
    more.subtract(sum(span) for own in needs for span in own)
    edges = sorted(more)
    takers = list(itertools.accumulate(map(more.__getitem__, edges), initial=0))
    sizes = (b - a for a, b in itertools.pairwise([0, *edges]))
    sums = list(itertools.accumulate(map(operator.mul, takers, sizes)))

    def before(position: int) -> int:
        """The rows that ranks need, each as often as it is needed, before a position."""
        at = bisect_right(edges, position) - 1
        return sums[at] + takers[at + 1] * (position - edges[at]) if at >= 0 else 0

    return tuple(
        sum(before(sum(span)) - before(span.position) for span in owned)
        - _length(_rows(owned, needs[rank]))
        for rank, owned in enumerate(keys.spans(rank) for rank in range(keys.world_size))
    )


def traffic_of(
    documents: Documents, window: Window, queries: Ownership, keys: Ownership, rank: int
) -> Traffic:
    """The moves of ``rank``. Raises as :func:`needs_of`."""
    ranks = range(keys.world_size)
    pieces, needs, shared = needs_of(documents, window, queries)
    owned = [keys.spans(r) for r in ranks]
    gives = [_rows(owned[rank], needs[taker]) for taker in ranks]
    places, takes = [], []
    for owner in ranks:
        start = sum(takes)
        came = list(overlaps(owned[owner], needs[rank]))
        for _, span in came:
            places.append((span, start))
            start += span.length
        takes.append(sum(span.length for _, span in came))
    return Traffic(
        pieces[rank],
        gives[rank],
        tuple(() if taker == rank else gives[taker] for taker in ranks),
        tuple(takes),
        tuple(sorted(places)),
        any(_length(needs[r]) > _length(_rows(owned[r], needs[r])) for r in ranks),
        shared,
        keys.rows(rank),
        tuple(needs),
    )


#: ``[taker][owner]``: the rows of the owner's shard that the taker needs, ascending.
Table = list[list[tuple[Span, ...]]]


def table_of(
    needs: Sequence[Sequence[Span]], keys: Ownership, most: float = math.inf
) -> Table | None:
    """The moves of all ranks, from the positions of the keys that each one needs; None if some rank
    needs more than ``most`` runs of rows."""
    ranks = range(keys.world_size)
    owned, table = [], []
    for owner in ranks:
        row = 0
        for span in keys.spans(owner):
            owned.append((span, owner, row))
            row += span.length
    owned.sort()
    starts = [span.position for span, *_ in owned]
    for needed in needs:
        found: list[list[Span]] = [[] for _ in ranks]
        for position, length in needed:
            index = bisect_right(starts, position) - 1
            while length:
                span, owner, row = owned[index]
                here = min(length, sum(span) - position)
                append(found[owner], row + position - span.position, here)
                position, length, index = position + here, length - here, index + 1
                if sum(map(len, found)) > most:  # before thousands of them are made
                    return None
        table.append([tuple(spans) for spans in found])
    return table


def most_runs(table: Table) -> int:
    """The runs of rows that the rank needs which needs the most."""
    return max(sum(map(len, of_owners)) for of_owners in table)


def _are_shared(pieces: Sequence[Piece], needed: Sequence[Span]) -> bool:
    """Whether pieces have keys in common. Raises if they have too many."""
    held = sum(piece.keys for piece in pieces)
    if held > _MOST_COPIES * _length(needed):
        raise ContextParallelError(
            f"varlen_attn: in this layout a rank's rows are {len(pieces)} runs of documents that "
            f"attend {_length(needed)} keys, and the kernel needs a copy of the keys for each run, "
            f"{held} in total; use PerDocumentHeadTail with the lengths of these documents, "
            "HeadTail, or natural order, enabled(layout=None)"
        )
    return held > _length(needed)


def _length(spans: Sequence[Span]) -> int:
    return sum(span.length for span in spans)


def _rows(owned: Sequence[Span], needed: Sequence[Span]) -> tuple[Span, ...]:
    """The rows of a shard that are needed."""
    found: list[Span] = []
    for row, span in overlaps(owned, needed):
        append(found, row, span.length)
    return tuple(found)


def overlaps(owned: Sequence[Span], needed: Sequence[Span]) -> Iterator[tuple[int, Span]]:
    """The positions in both, ascending, each run with its first row in the owner's shard. Both hold
    runs in ascending order."""
    index = row = 0
    for position, length in owned:
        stop = position + length
        while index < len(needed) and sum(needed[index]) <= position:
            index += 1
        at = index
        while at < len(needed) and needed[at].position < stop:
            first, last = max(position, needed[at].position), min(stop, sum(needed[at]))
            yield row + first - position, Span(first, last - first)
            at += 1
        row += length
