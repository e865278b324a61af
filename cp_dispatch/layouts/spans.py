"""Integer geometry of sharded attention: spans of positions, and the tiles between them.

Note [Tiles]
~~~~~~~~~~~~
A rank's rows are a few runs of consecutive positions, its *spans*, and so are its keys. What a
query span computes with a key span is a rectangle of the score matrix. A causal mask (query
position i sees key positions j <= i, torch's top-left convention) cuts any such rectangle into at
most two *tiles* that every kernel can do, whatever its own convention for causal with different
lengths: one without a mask, and one that is square and causal on its diagonal.

::

         keys a ... b      a = first query position inside the key span
       +---------+\\
       |  full   | \\       square tile: rows and keys start at one position
 rows  |         |  \\
       |         |causal\\
       +---------+------+   rows past the last key of the span see all of it and need no mask

So kernels never see an offset, and head-tail or other layouts are only more spans.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple


class Span(NamedTuple):
    """Consecutive global positions ``[position, position + length)``."""

    position: int
    length: int


class Tile(NamedTuple):
    """One kernel call between local rows of a query shard and local rows of a key shard.

    ``causal`` tiles are square, and row i sees keys 0..i.
    """

    query_start: int
    query_length: int
    key_start: int
    key_length: int
    causal: bool
    #: Global position of the first row and of the first key.
    query_position: int
    key_position: int


def chunk_spans(length: int, ring_shape: tuple[int, ...]) -> tuple[tuple[Span, ...], ...]:
    """Spans of every rank in the natural order that ``Shard`` gives.

    ``torch.chunk``'s rule, so the last ranks may own less or nothing. ``ring_shape`` holds the
    sizes of the mesh dims over which the sequence is sharded; with several, each chunk of the
    first is chunked again over the next.
    """
    chunks = [Span(0, int(length))]
    for size in ring_shape:
        chunks = [part for whole in chunks for part in chunk(whole, size)]
    return tuple((part,) if part.length else () for part in chunks)


def chunk(span: Span, count: int) -> list[Span]:
    """The spans of ``torch.chunk``, the last ones possibly short or empty."""
    size = -(-span.length // count)
    starts = [min(i * size, span.length) for i in range(count + 1)]
    return [
        Span(span.position + start, stop - start)
        for start, stop in zip(starts, starts[1:], strict=False)
    ]


@dataclass(frozen=True)
class Geometry:
    """Spans of queries and of keys for every rank of the ring, and the mask between them.

    The order of the spans of a rank is the order of the rows of its shard.
    """

    query_spans: tuple[tuple[Span, ...], ...]
    key_spans: tuple[tuple[Span, ...], ...]
    causal: bool

    @property
    def world_size(self) -> int:
        return len(self.query_spans)

    def query_length(self, rank: int) -> int:
        return sum(span.length for span in self.query_spans[rank])

    def key_length(self, rank: int) -> int:
        return sum(span.length for span in self.key_spans[rank])

    def tiles(self, rank: int, owner: int) -> tuple[Tile, ...]:
        """What ``rank`` computes with the keys that ``owner`` owns. See Note [Tiles]."""
        return _tiles(self, rank, owner)

    def last_hop(self, owner: int) -> int:
        """The last hop (0 = at home) at which some rank still needs ``owner``'s keys."""
        return _last_hop(self, owner)

    @property
    def key_transitions(self) -> int:
        """How many times keys move on before nobody needs them any more."""
        return max(self.last_hop(owner) for owner in range(self.world_size))


def natural(
    query_length: int, key_length: int, ring_shape: tuple[int, ...], causal: bool
) -> Geometry:
    """Geometry of natural order: every rank owns one chunk of queries and one of keys."""
    return _natural(int(query_length), int(key_length), tuple(ring_shape), causal)


@functools.lru_cache(maxsize=256)
def _natural(
    query_length: int, key_length: int, ring_shape: tuple[int, ...], causal: bool
) -> Geometry:
    return Geometry(
        chunk_spans(query_length, ring_shape), chunk_spans(key_length, ring_shape), causal
    )


@functools.lru_cache(maxsize=4096)
def _tiles(geometry: Geometry, rank: int, owner: int) -> tuple[Tile, ...]:
    tiles = []
    query_start = 0
    for query in geometry.query_spans[rank]:
        key_start = 0
        for key in geometry.key_spans[owner]:
            tiles += _span_tiles(query, query_start, key, key_start, geometry.causal)
            key_start += key.length
        query_start += query.length
    return tuple(tiles)


def _span_tiles(query: Span, query_start: int, key: Span, key_start: int, causal: bool):
    def tile(row: int, rows: int, column: int, columns: int, is_causal: bool) -> Tile:
        return Tile(
            query_start + row, rows, key_start + column, columns, is_causal,
            query.position + row, key.position + column,
        )  # fmt: skip

    if not causal:
        yield tile(0, query.length, 0, key.length, False)
        return
    # Keys before the first query are seen by every row.
    before = min(max(query.position - key.position, 0), key.length)
    if before:
        yield tile(0, query.length, 0, before, False)
    # Rows before the first remaining key see none of the rest.
    skipped = max(key.position + before - query.position, 0)
    rows, columns = query.length - skipped, key.length - before
    if rows <= 0 or columns <= 0:
        return
    side = min(rows, columns)
    yield tile(skipped, side, before, side, True)
    if rows > side:
        yield tile(skipped + side, rows - side, before, side, False)


@functools.lru_cache(maxsize=4096)
def _last_hop(geometry: Geometry, owner: int) -> int:
    for hop in range(geometry.world_size - 1, 0, -1):
        if geometry.tiles((owner + hop) % geometry.world_size, owner):
            return hop
    return 0
