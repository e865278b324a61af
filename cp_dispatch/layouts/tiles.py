"""From the spans of a rank and of an owner of keys to kernel calls: tiles.

Note [Tiles]
~~~~~~~~~~~~
What a query span computes with a key span is a rectangle of the score matrix. A causal mask (query
position i sees key positions j <= i, torch's top-left convention) cuts any such rectangle into at
most three *tiles* that every kernel can do, whatever its own convention for causal with different
lengths: two without a mask, and one that is square and causal on its diagonal.

::

         keys a ... b      a = first query position inside the key span
       +---------+\\
       |  full   | \\       square tile: rows and keys start at one position
 rows  |         |  \\
       |         |causal\\
       +---------+------+   rows past the last key of the span see all of it and need no mask

So kernels never see an offset, and head-tail or other layouts are only more spans. Where spans
ascend, tiles that touch in memory become one kernel call:

- a shard with itself: the rows see each other as they lie, one causal tile;
- the spans that lie wholly before a row span: one tile over their keys;
- row spans that see the same keys: one tile over their rows.

For head-tail that is one causal tile at home, and afterwards all rows with the head half of the
keys (owners before the rank) or the tail half of the rows with all keys (owners after it).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from cp_dispatch.layouts.spans import Span


class Tile(NamedTuple):
    """One kernel call between local rows of a query shard and local rows of a key shard.

    ``causal`` tiles are square, and row i sees keys 0..i.
    """

    query_start: int
    query_length: int
    key_start: int
    key_length: int
    causal: bool
    #: Global positions of the rows and of the keys.
    query_spans: tuple[Span, ...]
    key_spans: tuple[Span, ...]
    #: Where the first key stands among all keys, shard after shard.
    key_place: int = 0
    #: The one batch row that this is for, None for all.
    row: int | None = None


def cut(spans: tuple[Span, ...], start: int, length: int) -> tuple[Span, ...]:
    """The spans of local rows ``[start, start + length)`` of a shard."""
    parts = []
    for span in spans:
        first, last = max(start, 0), min(start + length, span.length)
        if first < last:
            parts.append(Span(span.position + first, last - first))
        start -= span.length
    return tuple(parts)


def tiles(
    query: tuple[Span, ...], key: tuple[Span, ...], causal: bool, key_place: int
) -> tuple[Tile, ...]:
    """What the rows of ``query`` compute with the keys of ``key``, most rows first: what covers
    all rows begins a result without a merge. See Note [Tiles]."""
    rectangles = sorted(_rectangles(query, key, causal), key=lambda r: (-r[1], r[0], r[2]))
    return tuple(
        Tile(
            row, rows, column, columns, is_causal,
            cut(query, row, rows), cut(key, column, columns), key_place + column,
        )
        for row, rows, column, columns, is_causal in rectangles
    )  # fmt: skip


def _rectangles(query, key, causal: bool) -> Iterator[tuple[int, int, int, int, bool]]:
    rows, columns = (sum(span.length for span in spans) for spans in (query, key))
    if not rows or not columns:
        return
    if not causal:
        yield 0, rows, 0, columns, False
        return
    sorted_keys = _ascends(key)
    if query == key and sorted_keys:
        yield 0, rows, 0, rows, True
        return
    waiting = None  # a full rectangle that the next row span may extend
    start = 0
    for span in query:
        whole = 0  # keys before every row of the span, at the front of the shard
        if sorted_keys:
            whole = sum(max(0, min(k.length, span.position - k.position)) for k in key)
        if waiting is not None and (waiting[3] != whole):
            yield waiting
            waiting = None
        if whole:
            above = waiting[1] if waiting is not None else 0
            waiting = (start - above, above + span.length, 0, whole, False)
        column = 0
        for k in key:
            skip = max(0, min(k.length, whole - column))
            rest = Span(k.position + skip, k.length - skip)
            yield from _span_rectangles(span, start, rest, column + skip)
            column += k.length
        start += span.length
    if waiting is not None:
        yield waiting


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
