"""``Documents``: packed documents, and the keys that a rank's rows attend in them. Integers only.

Note [Pieces]
~~~~~~~~~~~~~
A *piece* is a run of a rank's rows within one document, with the keys of that document that they
attend, which are a run too. Torch's kernel aligns windows to the bottom right: with n rows and m
keys, row i sees the keys from ``i + m - n - left`` to ``i + m - n + right``. So if the keys of a
piece end at the diagonal of its last row, the user's window gives its rows the same keys as in the
whole document::

    document of 6 rows and keys, causal, rows 2 and 3:  keys 0 to 3, n = 2, m = 4

               0 1 2 3 4 5
        row 2  x x x
        row 3  x x x x

A window to the right extends past the diagonal of the last row, up to the end of the document.
These ``shift`` additional keys move the diagonal by the same amount, which a different window
corrects, ``(left + shift, right - shift)``. Pieces with the same shift are one call. In natural
order only the last document of a rank's rows is cut in this way, so there are at most two calls,
and one for causal windows.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from cp_dispatch.layouts import Span


class Window(NamedTuple):
    """The number of keys that a row sees before and after the diagonal, not counting the diagonal;
    -1 for all."""

    left: int
    right: int

    @property
    def is_full(self) -> bool:
        return self.left < 0 and self.right < 0

    @property
    def is_causal(self) -> bool:
        return self.left < 0 and self.right == 0

    def shifted(self, by: int) -> Window:
        left, right = self
        return Window(left if left < 0 else left + by, right if right < 0 else right - by)


class Documents(NamedTuple):
    """The starts of documents in the packed sequences, and the end of the last one."""

    queries: tuple[int, ...]
    keys: tuple[int, ...]

    def reasons(
        self, window: Window, query_length: int, key_length: int, covered: bool = False
    ) -> list[str]:
        """Reasons why the documents are not supported, each with what to do. ``covered``: they have
        to be all of the sequence."""
        given = ("cu_seq_q", self.queries, query_length), ("cu_seq_k", self.keys, key_length)
        reasons = [reason for one in given for reason in _not_cumulative(*one)]
        if covered and not reasons:
            reasons = [reason for one in given for reason in _not_whole(*one)]
        if len(self.queries) != len(self.keys):
            reasons.append(
                f"cu_seq_q is for {len(self.queries) - 1} documents, cu_seq_k for "
                f"{len(self.keys) - 1}; pass the same number"
            )
        # The kernel ignores a limit on the right if it reaches the longest of all keys.
        beyond = window.right > 0 or (window.right < 0 and window.left >= 0)
        if not reasons and beyond:
            pairs = zip(lengths(self.queries), lengths(self.keys), strict=True)
            found = [(i, rows, keys) for i, (rows, keys) in enumerate(pairs) if rows > keys]
            if found:
                i, rows, keys = found[0]
                reasons.append(
                    f"document {i} has {rows} queries and {keys} keys, and the window "
                    f"{tuple(window)} includes keys after the diagonal; torch's kernel computes "
                    "results that then depend on the longest document. Use a window (left, 0) or "
                    "(-1, -1)"
                )
        return reasons


def _not_cumulative(name: str, starts: Sequence[int], length: int) -> Iterator[str]:
    if not starts or starts[0] != 0:
        yield f"{name} must begin with 0, got {list(starts[:1])}"
    elif any(a > b for a, b in zip(starts, starts[1:], strict=False)):
        yield f"{name} must not decrease; pass cumulative lengths"
    elif starts[-1] > length:
        yield (
            f"{name} ends at {starts[-1]}, but the packed sequence has {length} positions; pass "
            "cumulative lengths of the whole sequence, and DTensors with their global shape"
        )


def _not_whole(name: str, starts: Sequence[int], length: int) -> Iterator[str]:
    if starts[-1] != length:
        yield (
            f"{name} ends at {starts[-1]}, but the shards of all ranks are {length} positions; on "
            "shards pass the cumulative lengths of the whole sequence, with padding at its end as "
            "one more document"
        )


def lengths(starts: Sequence[int]) -> list[int]:
    """The length of each document."""
    return [stop - start for start, stop in zip(starts, starts[1:], strict=False)]


class Piece(NamedTuple):
    """See Note [Pieces]: rows of the shard, positions of keys, and the piece's document."""

    row: int
    rows: int
    key: int
    keys: int
    shift: int
    document: int


def pieces_of(documents: Documents, window: Window, runs: Sequence[Span]) -> list[Piece]:
    """The pieces of a rank whose shard is the ``runs`` of query positions, one after the other.

    Rows outside of all documents are in no piece.
    """
    found = []
    starts, row = documents.queries, 0
    for position, length in runs:
        stop = position + length
        document = bisect_right(starts, position) - 1
        while document < len(starts) - 1 and starts[document] < stop:
            first, last = max(position, starts[document]), min(stop, starts[document + 1])
            if first >= last:
                pass
            elif window.is_full and found and found[-1].document == document:
                # These rows follow those of another run of the document, and all see the same keys.
                found[-1] = found[-1]._replace(rows=found[-1].rows + last - first)
            else:
                keys = _keys_of(documents, window, document, first, last)
                found.append(Piece(row + first - position, last - first, *keys, document))
            document += 1
        row += length
    return found


def _keys_of(
    documents: Documents, window: Window, document: int, first: int, last: int
) -> tuple[int, int, int]:
    """The first key, the number of keys and the shift of the rows ``[first, last)``."""
    start, stop = documents.keys[document : document + 2]
    if window.is_full:
        return start, stop - start, 0
    # The position of a row's diagonal minus that of the row, both global.
    diagonal = stop - documents.queries[document + 1]
    begin = start if window.left < 0 else max(start, first + diagonal - window.left)
    end = stop if window.right < 0 else min(stop, last + diagonal + window.right)
    if begin >= end:
        return start, 0, 0
    return begin, end - begin, end - (last + diagonal)


def union(spans: Sequence[Span]) -> tuple[Span, ...]:
    """The positions that are in any of the spans, as runs in ascending order."""
    merged: list[Span] = []
    for position, length in sorted(span for span in spans if span[1]):
        end = sum(merged[-1]) if merged else -1
        if position <= end:
            start = merged[-1].position
            merged[-1] = Span(start, max(end, position + length) - start)
        else:
            merged.append(Span(position, length))
    return tuple(merged)
