"""``Geometry``: which rank owns which queries and keys, and which tiles each rank computes."""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass, fields

from cp_dispatch.bounded import ByWeight
from cp_dispatch.layouts.spans import Span, chunk_spans
from cp_dispatch.layouts.tiles import Tile, tiles


class _Geometry:
    """What follows from ``world_size``, ``key_length`` and ``tiles``."""

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        # Once: a geometry is looked up at every hop and may hold thousands of spans.
        return hash(tuple(getattr(self, field.name) for field in fields(self)))

    def last_hop(self, owner: int) -> int:
        """The last hop (0 = at home) at which some rank still needs ``owner``'s keys."""
        return self._last_hops[owner]

    @functools.cached_property
    def _last_hops(self) -> tuple[int, ...]:
        size = self.world_size
        return tuple(
            next(
                (hop for hop in range(size - 1, 0, -1) if self.sees((owner + hop) % size, owner)), 0
            )
            for owner in range(size)
        )

    @functools.cached_property
    def key_transitions(self) -> int:
        """How many times keys move on until no rank needs them any more."""
        return max(map(self.last_hop, range(self.world_size)))

    def tiles_of(self, rank: int, owner: int, batch_start: int, batch: int) -> tuple[Tile, ...]:
        """:meth:`tiles` of the batch rows from ``batch_start`` on, counted from there."""
        return self.tiles(rank, owner)


@dataclass(frozen=True)
class Geometry(_Geometry):
    """Spans of queries and of keys for every rank of the ring, and the mask between them.

    The order of the spans of a rank is the order of the rows of its shard.
    """

    query_spans: tuple[tuple[Span, ...], ...]
    key_spans: tuple[tuple[Span, ...], ...]
    causal: bool

    __hash__ = _Geometry.__hash__

    @property
    def world_size(self) -> int:
        return len(self.query_spans)

    def query_length(self, rank: int) -> int:
        return self._query_lengths[rank]

    def key_length(self, rank: int) -> int:
        return self._key_lengths[rank]

    # Once, too: every call checks its shards.

    @functools.cached_property
    def _query_lengths(self) -> tuple[int, ...]:
        return _lengths(self.query_spans)

    @functools.cached_property
    def _key_lengths(self) -> tuple[int, ...]:
        return _lengths(self.key_spans)

    @functools.cached_property
    def _key_places(self) -> tuple[int, ...]:
        """Where the keys of each rank begin, after those of the ranks before it."""
        lengths = map(self.key_length, range(self.world_size))
        return tuple(itertools.accumulate(lengths, initial=0))

    @functools.cached_property
    def _query_stops(self) -> tuple[int, ...]:
        return tuple(max((sum(x) for x in own), default=0) for own in self.query_spans)

    @functools.cached_property
    def _key_starts(self) -> tuple[int, ...]:
        return tuple(min((x.position for x in own), default=0) for own in self.key_spans)

    def tiles(self, rank: int, owner: int) -> tuple[Tile, ...]:
        """What ``rank`` computes with the keys that ``owner`` owns. See Note [Tiles]."""
        return _tiles(self, rank, owner)

    def sees(self, rank: int, owner: int) -> bool:
        """Whether there are :meth:`tiles`, which take longer: documents make thousands."""
        if not self._query_lengths[rank] or not self._key_lengths[owner]:
            return False
        return not self.causal or self._query_stops[rank] > self._key_starts[owner]


def _lengths(spans: tuple[tuple[Span, ...], ...]) -> tuple[int, ...]:
    return tuple(sum(span.length for span in own) for own in spans)


@dataclass(frozen=True)
class RowGeometry(_Geometry):
    """A geometry for each batch row, all with shards of the same lengths."""

    rows: tuple[Geometry, ...]

    __hash__ = _Geometry.__hash__

    @property
    def world_size(self) -> int:
        return self.rows[0].world_size

    def query_length(self, rank: int) -> int:
        return self.rows[0].query_length(rank)

    def key_length(self, rank: int) -> int:
        return self.rows[0].key_length(rank)

    def tiles(self, rank: int, owner: int) -> tuple[Tile, ...]:
        """The tiles of all batch rows; :attr:`Tile.row` says which row."""
        return self.tiles_of(rank, owner, 0, len(self.rows))

    def sees(self, rank: int, owner: int) -> bool:
        """As :meth:`Geometry.sees`, in any batch row."""
        return any(row.sees(rank, owner) for row in self.rows)

    def tiles_of(self, rank: int, owner: int, batch_start: int, batch: int) -> tuple[Tile, ...]:
        return tuple(
            tile._replace(row=row)
            for row, own in enumerate(self.rows[batch_start : batch_start + batch])
            for tile in own.tiles(rank, owner)
        )


def natural(
    query_length: int, key_length: int, ring_shape: tuple[int, ...], causal: bool
) -> Geometry:
    """Geometry of natural order: every rank owns one chunk of queries and one of keys."""
    return _natural(int(query_length), int(key_length), tuple(ring_shape), causal)


def laid_out(
    query_length: int, key_length: int, ring_shape: tuple[int, ...], causal: bool, layout=None
) -> Geometry | RowGeometry:
    """Geometry of queries and keys that are both in ``layout``, a balancer or None for natural
    order."""
    if layout is None:
        return natural(query_length, key_length, ring_shape, causal)
    return of_spans(layout, None, None, causal)


def of_spans(layout, query, key, causal: bool) -> Geometry | RowGeometry:
    """Geometry of queries and keys in ``layout``, except for those whose spans are given."""
    return _of_spans(layout, query, key, causal)


def _make_of_spans(layout, query, key, causal: bool) -> Geometry | RowGeometry:
    ranks = range(layout.world_size)
    rows = []
    for row in range(layout.rows):
        own = tuple(layout.spans(rank)[row] for rank in ranks)
        rows.append(Geometry(query or own, key or own, causal))
    return rows[0] if len(rows) == 1 else RowGeometry(tuple(rows))


def _spans_in(geometry: Geometry | RowGeometry) -> int:
    rows = geometry.rows if isinstance(geometry, RowGeometry) else (geometry,)
    return sum(len(own) for row in rows for own in row.query_spans + row.key_spans)


_of_spans = ByWeight(_make_of_spans, lambda found: 1 + _spans_in(found), most=2**20)


@functools.lru_cache(maxsize=256)
def _natural(
    query_length: int, key_length: int, ring_shape: tuple[int, ...], causal: bool
) -> Geometry:
    return Geometry(
        chunk_spans(query_length, ring_shape), chunk_spans(key_length, ring_shape), causal
    )


def _make_tiles(geometry: Geometry, rank: int, owner: int) -> tuple[Tile, ...]:
    query, key = geometry.query_spans[rank], geometry.key_spans[owner]
    return tiles(query, key, geometry.causal, geometry._key_places[owner])


# A tile takes about 400 bytes. With 1,000 documents on 8 ranks each rank has 7,500, and data may
# come in another layout at every step.
_tiles = ByWeight(_make_tiles, lambda found: 1 + len(found), most=2**18)
