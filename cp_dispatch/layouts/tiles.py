"""Turns the spans of a rank's rows and of an owner's keys into kernel calls (tiles).

Note [Tiles]
~~~~~~~~~~~~
What a query span computes with a key span is a rectangle of the score matrix. A causal mask (query
position i sees key positions j <= i, torch's top-left convention) cuts any such rectangle into at
most three *tiles* that every kernel supports, whatever its own causal convention for different
lengths: two without a mask, and one that is square and causal on its diagonal.

::

         keys a ... b      a = first query position inside the key span
       +---------+\\
       |  full   | \\       square tile: rows and keys start at one position
 rows  |         |  \\
       |         |causal\\
       +---------+------+   rows past the last key of the span see all of it and need no mask

So kernels never see an offset, and head-tail or other layouts only mean more spans. Tiles that are
adjacent in memory become one kernel call:

- a shard with itself, whose spans ascend: one causal tile over the whole shard;
- consecutive key spans that are wholly before a span of rows: one tile over their keys;
- row spans that see the same keys: one tile over their rows.

For head-tail that is one causal tile at home, and afterwards all rows with the head half of the
keys (owners before the rank) or the tail half of the rows with all keys (owners after it).
"""

from __future__ import annotations

import functools
import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from cp_dispatch.layouts.spans import Span


class Part(NamedTuple):
    """Consecutive rows of a shard. Their spans are worked out only where they are read, for masks
    and dropout: documents make thousands of tiles, with thousands of spans of keys each."""

    shard: ShardSpans
    start: int
    length: int

    @property
    def spans(self) -> tuple[Span, ...]:
        return self.shard.cut(self.start, self.length)


@dataclass(frozen=True)
class ShardSpans:
    """The spans of the rows of a shard, which its parts share."""

    spans: tuple[Span, ...]

    @functools.cached_property
    def _starts(self) -> list[int]:
        return _starts(self.spans)

    def cut(self, start: int, length: int) -> tuple[Span, ...]:
        """The spans of local rows ``[start, start + length)``."""
        # Documents make thousands of spans and tiles, so no tile may look at all spans.
        spans, starts = self.spans, self._starts
        stop = min(start + length, starts[-1])
        parts = []
        for i in range(bisect_right(starts, start) - 1, bisect_left(starts, stop)):
            span = spans[i]
            first, last = max(start - starts[i], 0), min(stop - starts[i], span.length)
            if first == 0 and last == span.length > 0:
                parts.append(span)
            elif first < last:
                parts.append(Span(span.position + first, last - first))
        return tuple(parts)


class Tile(NamedTuple):
    """One kernel call between local rows of a query shard and local rows of a key shard.

    ``causal`` tiles are square, and row i sees keys 0..i.
    """

    query_start: int
    query_length: int
    key_start: int
    key_length: int
    causal: bool
    #: Where the shards have the rows and the keys; None if nobody asks for their global positions.
    query: Part | None = None
    key: Part | None = None
    #: The place of the first key among all keys, shard after shard.
    key_place: int = 0
    #: The one batch row that this is for, None for all.
    row: int | None = None

    @property
    def query_spans(self) -> tuple[Span, ...]:
        """Global positions of the rows."""
        return self.query.spans

    @property
    def key_spans(self) -> tuple[Span, ...]:
        """Global positions of the keys."""
        return self.key.spans


def cut(spans: tuple[Span, ...], start: int, length: int) -> tuple[Span, ...]:
    """The spans of local rows ``[start, start + length)`` of a shard."""
    return ShardSpans(spans).cut(start, length)


def _starts(spans: tuple[Span, ...]) -> list[int]:
    """The local row at which each span begins, and the number of all rows."""
    return list(itertools.accumulate((span.length for span in spans), initial=0))


def tiles(
    query: tuple[Span, ...], key: tuple[Span, ...], causal: bool, key_place: int
) -> tuple[Tile, ...]:
    """The tiles of the rows of ``query`` with the keys of ``key``, those with the most rows first:
    a tile that covers all rows starts a result without a merge. See Note [Tiles]."""
    rectangles = sorted(_rectangles(query, key, causal), key=lambda r: (-r[1], r[0], r[2]))
    rows, keys = ShardSpans(query), ShardSpans(key)
    return tuple(
        Tile(
            *rectangle, Part(rows, *rectangle[:2]), Part(keys, *rectangle[2:4]),
            key_place + rectangle[2],
        )
        for rectangle in rectangles
    )  # fmt: skip


def _rectangles(query, key, causal: bool) -> Iterator[tuple[int, int, int, int, bool]]:
    rows, columns = (sum(span.length for span in spans) for spans in (query, key))
    if not rows or not columns:
        return
    if not causal:
        yield 0, rows, 0, columns, False
        return
    if query == key and _ascends(key):
        yield 0, rows, 0, rows, True
        return
    above: list[tuple[int, int]] = []  # keys that the rows before see whole, as ranges
    first, start = 0, 0  # those rows are [first, start)
    ends = [k.position + k.length for k in key] if _ascends(key) else []
    columns_before = _starts(key)
    for span in query:
        # If key spans ascend, they are wholly before the rows, then beside them, then after them.
        at = bisect_right(ends, span.position)
        column = columns_before[at]
        whole: list[tuple[int, int]] = [(0, column)] if column else []
        for index in range(at, len(key)):
            k = key[index]
            if ends and k.position >= span.position + span.length:
                break
            if k.position + k.length <= span.position:
                if whole and sum(whole[-1]) == column:
                    whole[-1] = whole[-1][0], whole[-1][1] + k.length
                else:
                    whole.append((column, k.length))
            else:
                yield from _span_rectangles(span, start, k, column)
            column += k.length
        if whole != above:
            yield from ((first, start - first, *keys, False) for keys in above)
            above, first = whole, start
        start += span.length
    yield from ((first, start - first, *keys, False) for keys in above)


def _span_rectangles(query: Span, row: int, key: Span, column: int):
    # Keys before the first query are seen by every row.
    before = min(max(query.position - key.position, 0), key.length)
    if before:
        yield row, query.length, column, before, False
    # Rows before the first remaining key see none of the rest.
    skipped = max(key.position + before - query.position, 0)
    rows, columns = query.length - skipped, key.length - before
    if rows <= 0 or columns <= 0:
        return
    side = min(rows, columns)
    yield row + skipped, side, column + before, side, True
    if rows > side:
        yield row + skipped + side, rows - side, column + before, side, False


def _ascends(spans: tuple[Span, ...]) -> bool:
    return all(a.position + a.length <= b.position for a, b in zip(spans, spans[1:], strict=False))
