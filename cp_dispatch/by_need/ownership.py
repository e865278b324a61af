"""``Ownership``: which positions of a sequence each rank holds, and where in its shard."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from cp_dispatch.bounded import ByWeight
from cp_dispatch.layouts import Span, chunk_spans, from_text


@dataclass(frozen=True)
class Ownership:
    """One sequence of ``length`` positions over the ranks of ``ring_shape``.

    ``layout`` is the text of a balancer, "" for natural order. A *lane* is a set of batch rows with
    the same order. There is one lane for all rows or, if the layout differs by batch row, one for
    each; ``batch``, the first batch row and their number, says for which ones.
    """

    length: int
    ring_shape: tuple[int, ...]
    layout: str = ""
    batch: tuple[int, int] | None = None

    @functools.cached_property
    def spans_of_all(self) -> tuple[tuple[tuple[Span, ...], ...], ...]:
        """``[rank][lane]`` -> spans."""
        if not self.layout:
            return tuple((spans,) for spans in chunk_spans(self.length, self.ring_shape))
        balancer = from_text(self.layout)
        first, count = self.batch or (0, balancer.rows)
        lanes = slice(first, first + count)
        return tuple(balancer.spans(rank)[lanes] for rank in range(balancer.world_size))

    @property
    def world_size(self) -> int:
        return len(self.spans_of_all)

    @property
    def lanes(self) -> int:
        return len(self.spans_of_all[0])

    def spans(self, rank: int, lane: int = 0) -> tuple[Span, ...]:
        """Runs of positions in the order of the shard's rows."""
        return self.spans_of_all[rank][lane]

    def rows(self, rank: int) -> int:
        """The number of positions that ``rank`` holds, in every lane."""
        return sum(span.length for span in self.spans(rank))


_known = ByWeight(
    Ownership, lambda found: 1 + sum(len(x) for own in found.spans_of_all for x in own), most=2**20
)


def ownership(
    length: int,
    ring_shape: tuple[int, ...],
    layout: str = "",
    batch: tuple[int, int] | None = None,
) -> Ownership:
    """The same object for the same arguments, so that spans are computed once."""
    return _known(length, ring_shape, layout, batch)


def lanes_of(first: int, batch: int) -> tuple[int, int]:
    """The ``batch`` of an :class:`Ownership` in a layout that differs by batch row. A rank without
    batch rows still has one lane, that of an arbitrary row."""
    return (first, batch) if batch else (0, 1)


def rank_at(coordinate: Sequence[int], ring_shape: Sequence[int]) -> int:
    """The rank, among those of a ring over mesh dims of these sizes, with these coordinates in
    them: the first dim is the slowest."""
    rank = 0
    for at, size in zip(coordinate, ring_shape, strict=True):
        rank = rank * size + at
    return rank
