"""Combines partial results of a shard's rows with as few passes over memory as possible.

Tiles cover windows of rows. The edges of all windows divide the rows into *segments*, whose rows
have the same history. The first partial result of a segment stays where the kernel wrote it, later
ones are combined in wide precision, and the last combination writes the final dtype. Adjacent
segments with the same history are combined together, so a window takes one launch where possible.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cp_dispatch.backends import wide_dtype
from cp_dispatch.bounded import ByWeight
from cp_dispatch.layouts import Tile
from cp_dispatch.native.merge import is_token_major, merge_partials, token_major


@dataclass(eq=False)
class _Source:
    """Partial results: tensors ``(B, H, S, ...)`` whose first row is row ``start``, of batch row
    ``row`` or of all batch rows for None."""

    tensors: tuple[Tensor, ...]
    start: int = 0
    row: int | None = None

    def view(self, row: int | None, start: int, stop: int) -> list[Tensor]:
        tensors = self.tensors
        if row is not None and self.row != row:
            tensors = [x.narrow(0, row, 1) for x in tensors]
        # A narrow takes a third of the host time of an index.
        return [
            x if x.size(2) == stop - start else x.narrow(2, start - self.start, stop - start)
            for x in tensors
        ]


@dataclass(eq=False)
class _Segment:
    """Rows ``[start, stop)`` of one batch row or of all, with ``left`` partial results still to
    come."""

    row: int | None
    start: int
    stop: int
    left: int
    source: _Source | None = None


def _make_segments(windows: tuple[tuple[int, int], ...], length: int) -> list[tuple[int, int, int]]:
    """Start, stop and number of partial results of each segment; a window is ``(start, stop)``."""
    begin, end = Counter(start for start, _ in windows), Counter(stop for _, stop in windows)
    edges = sorted({0, length, *begin, *end})
    counts = itertools.accumulate(begin[edge] - end[edge] for edge in edges)
    return [(*both, count) for both, count in zip(itertools.pairwise(edges), counts, strict=False)]


# Documents make thousands of windows, and data may come in another layout at every step.
_segments = ByWeight(_make_segments, lambda found: 1 + len(found), most=2**16)


class _Accumulator:
    """Subclasses define how two partial results are combined and which tensors a result has."""

    def __init__(self, batch: int, length: int, tiles: Sequence[Tile], dtype: torch.dtype):
        self._dtype = dtype
        windows: dict[int | None, list[tuple[int, int]]] = {}
        for tile in tiles:
            window = tile.query_start, tile.query_start + tile.query_length
            windows.setdefault(tile.row, []).append(window)
        self._rows = {
            row: [_Segment(row, *segment) for segment in _segments(tuple(own), length)]
            for row, own in windows.items()
        }
        self._covered = None in self._rows or len(self._rows) == batch
        # With two partial results there is only one combination, which is also the last.
        wide = [x for own in self._rows.values() for x in own if x.left > 2]
        self._wide_start = min((x.start for x in wide), default=0)
        self._wide_stop = max((x.stop for x in wide), default=0)
        self._length = length
        self._wide: _Source | None = None
        self._final: _Source | None = None

    def _add(self, tile: Tile, tensors: tuple[Tensor, ...]) -> None:
        given = _Source(tensors, tile.query_start, tile.row)
        stop = tile.query_start + tile.query_length
        for group in self._groups(tile.row, tile.query_start, stop):
            first, last = group[0], group[-1]
            where = first.row, first.start, last.stop
            held, left = first.source, first.left - 1
            if held is None and left == 0 and tensors[0].size(2) < self._length:
                # These rows get no other result. They are not the whole result, so they are copied
                # out now rather than at the end: the next kernel can then reuse their memory.
                target = self._target(None, final=True)
                self._copy(given.view(*where), target.view(*where))
            elif held is None:
                target = given
            else:
                target = self._target(held, final=left == 0)
                before = held.view(*where)
                after = before if target is held else target.view(*where)
                self._combine(before, given.view(*where), after)
            for segment in group:
                segment.source, segment.left = target, left

    def _groups(self, row, start: int, stop: int) -> Iterator[list[_Segment]]:
        """Segments of a window; adjacent ones with the same history are grouped."""
        group: list[_Segment] = []
        segments = self._rows[row]
        edges = (bisect_left(segments, edge, key=lambda x: x.start) for edge in (start, stop))
        for segment in segments[slice(*edges)]:
            if group and (segment.source, segment.left) != (group[-1].source, group[-1].left):
                yield group
                group = []
            group.append(segment)
        if group:
            yield group

    def _target(self, held: _Source | None, final: bool) -> _Source:
        if final or self._wide_is_final():
            if self._final is None:
                # If a kernel returned all rows, its memory becomes the result, so some rows are
                # already in place.
                is_whole = held is not None and held.row is None and self._spans_all(held.tensors)
                self._final = held if is_whole else _Source(self._empty(self._dtype, self._length))
            return self._final
        if self._wide is None:
            wide, length = wide_dtype(self._dtype), self._wide_stop - self._wide_start
            self._wide = _Source(self._empty(wide, length), self._wide_start)
        return self._wide

    def _spans_all(self, tensors: tuple[Tensor, ...]) -> bool:
        if tensors[0].size(2) != self._length or not self._is_final(tensors):
            return False
        # A result must not keep a larger buffer alive.
        return all(x.untyped_storage().nbytes() == x.nbytes for x in tensors)

    def _wide_is_final(self) -> bool:
        return self._dtype is wide_dtype(self._dtype)

    def _finish(self) -> tuple[Tensor, ...]:
        segments = [segment for own in self._rows.values() for segment in own]
        sources = {segment.source for segment in segments}
        if self._covered and len(sources) == 1 and None not in sources:
            (source,) = sources
            if source.row is None and self._is_final(source.tensors):
                return source.tensors
        final = self._target(None, final=True)
        if not self._covered:
            batch, _, length = final.tensors[0].shape[:3]
            for row in set(range(batch)) - set(self._rows):
                self._clear(final.view(row, 0, length))
        for segment in segments:
            where = segment.row, segment.start, segment.stop
            if segment.source is None:
                self._clear(final.view(*where))
            elif segment.source is not final:
                self._copy(segment.source.view(*where), final.view(*where))
        return final.tensors

    @staticmethod
    def _copy(tensors: list[Tensor], into: list[Tensor]) -> None:
        for x, place in zip(tensors, into, strict=True):
            place.copy_(x)


class OutputAccumulator(_Accumulator):
    """Outputs and logsumexps of the tiles of a shard's rows, merged."""

    def __init__(
        self,
        query: Tensor,
        value_dim: int,
        tiles: Sequence[Tile],
        dtype: torch.dtype,
        lse_dtype: torch.dtype,
    ):
        super().__init__(query.size(0), query.size(2), tiles, dtype)
        self._like, self._lse_dtype = query, lse_dtype
        self._shape = (*query.shape[:3], value_dim)

    def add(self, out: Tensor, lse: Tensor, tile: Tile) -> None:
        """Merge the partial ``out``, ``lse`` of a tile's rows."""
        self._add(tile, (out, lse))

    def finish(self) -> tuple[Tensor, Tensor]:
        """``(output, logsumexp)``: in ``dtype``, token-major; in ``lse_dtype``, contiguous."""
        return self._finish()

    def _combine(self, held, given, target) -> None:
        merge_partials(*held, *given, *target)

    def _empty(self, dtype: torch.dtype, length: int) -> tuple[Tensor, Tensor]:
        batch, heads, _, dim = self._shape
        lse = self._like.new_empty((batch, heads, length), dtype=self._lse_dtype)
        return token_major(batch, heads, length, dim, like=self._like, dtype=dtype), lse

    def _is_final(self, tensors) -> bool:
        out, lse = tensors
        final = out.dtype is self._dtype and lse.dtype is self._lse_dtype and lse.is_contiguous()
        return final and is_token_major(out)

    def _clear(self, tensors) -> None:
        out, lse = tensors
        out.zero_()
        lse.fill_(-torch.inf)


class QueryGradient(_Accumulator):
    """dQ of a shard's rows, the sum of the tiles' shares; in ``dtype``, by default the query's."""

    def __init__(self, query: Tensor, tiles: Sequence[Tile], dtype: torch.dtype | None = None):
        super().__init__(query.size(0), query.size(2), tiles, dtype or query.dtype)
        self._query = query

    def add(self, share: Tensor, tile: Tile) -> None:
        """Add the share of a tile's rows."""
        self._add(tile, (share,))

    def finish(self) -> Tensor:
        """The sum, token-major."""
        return self._finish()[0]

    def _combine(self, held, given, target) -> None:
        (held,), (given,), (target,) = held, given, target
        if target.dtype is held.dtype or held.dtype is wide_dtype(held.dtype):
            torch.add(held, given, out=target)
        else:  # add would round the sum to the narrow dtype first
            target.copy_(held).add_(given)

    def _empty(self, dtype: torch.dtype, length: int) -> tuple[Tensor]:
        batch, heads, _, dim = self._query.shape
        return (token_major(batch, heads, length, dim, like=self._query, dtype=dtype),)

    def _is_final(self, tensors) -> bool:
        (grad,) = tensors
        return grad.dtype is self._dtype and is_token_major(grad)

    def _clear(self, tensors) -> None:
        tensors[0].zero_()
