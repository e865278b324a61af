"""Assigns heads to ranks, and computes the order of rows once a group of ranks has exchanged them.

Query heads are dealt as evenly as possible. A rank needs the key heads that its query heads use, so
a key head goes to several ranks if there are fewer key heads than ranks, or if its group of query
heads is split::

    8 query, 2 key heads, 4 ranks       12 query, 3 key heads, 2 ranks
    rank    0    1    2    3            rank        0             1
    query  0 1  2 3  4 5  6 7           query  0 1 2 3|4 5   6 7|8 9 10 11
    key     0    0    1    1            key       0   | 1     1 |   2

Kernels need the same number of query heads for each key head, so a share is cut where that number
changes (``|``). Each *segment* is one kernel call.
"""

from __future__ import annotations

import functools
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from cp_dispatch.layouts import Geometry, RowGeometry, Span, positions
from cp_dispatch.layouts.balancer import coalesce


class Segment(NamedTuple):
    """Query heads and their key heads, counted from the first heads of the share."""

    query: Span
    key: Span


class Share(NamedTuple):
    """The heads of one rank, and their split into kernel calls."""

    query: Span
    key: Span
    segments: tuple[Segment, ...]


@functools.lru_cache(maxsize=256)
def head_shares(
    heads: int, key_heads: int, ranks: int, stages: int = 1
) -> tuple[tuple[Share, ...], ...]:
    """The shares of all ranks at each stage. There is more than one stage only if every rank has a
    multiple of ``stages`` key heads to itself."""
    if stages > 1:
        own, key = heads // ranks // stages, key_heads // ranks // stages
        segments = (Segment(Span(0, own), Span(0, key)),)
        return tuple(
            tuple(
                Share(Span((rank * stages + stage) * own, own),
                      Span((rank * stages + stage) * key, key), segments)
                for rank in range(ranks)
            )
            for stage in range(stages)
        )  # fmt: skip
    groups = heads // max(1, key_heads)  # with uneven heads a tensor-parallel rank may have none
    return (
        tuple(_share(r * heads // ranks, (r + 1) * heads // ranks, groups) for r in range(ranks)),
    )


def _share(start: int, stop: int, groups: int) -> Share:
    if start == stop:
        nothing = Span(0, 0)
        return Share(Span(start, 0), nothing, (Segment(nothing, nothing),))
    first, last = start // groups, -(-stop // groups)
    # Up to the first complete key head, the complete ones, and the remainder.
    cuts = sorted({start, min(-(-start // groups) * groups, stop),
                   max(stop // groups * groups, start), stop})  # fmt: skip
    segments = []
    for a, b in zip(cuts, cuts[1:], strict=False):
        key = a // groups
        segments.append(Segment(Span(a - start, b - a), Span(key - first, -(-b // groups) - key)))
    return Share(Span(start, stop - start), Span(first, last - first), tuple(segments))


def most_stages(heads: int, key_heads: int, ranks: int, wanted: int) -> int:
    """The largest number of stages up to ``wanted`` that the heads allow."""
    if not key_heads or key_heads % ranks or heads % key_heads:
        return 1
    own = key_heads // ranks
    return max(n for n in range(1, max(1, min(wanted, own)) + 1) if own % n == 0)


def are_alike(heads: int, key_heads: int, ranks: int) -> bool:
    """Whether all ranks make the same number of kernel calls."""
    return len({len(share.segments) for share in head_shares(heads, key_heads, ranks)[0]}) == 1


@functools.lru_cache(maxsize=256)
def grouped(geometry: Geometry | RowGeometry, ranks: int) -> Geometry | RowGeometry:
    """The geometry of groups of ``ranks`` consecutive ranks, each of which owns what its ranks own.

    Under a causal mask the rows are in natural order, for few and large kernels. Otherwise they are
    one rank's after the other's: only ``attn_mask`` depends on positions, and its dims may be in
    the order of the shards.
    """
    if isinstance(geometry, RowGeometry):
        return RowGeometry(tuple(grouped(row, ranks) for row in geometry.rows))

    def joined(spans):
        groups = (sum(spans[i : i + ranks], ()) for i in range(0, len(spans), ranks))
        return tuple(coalesce(group) if geometry.causal else group for group in groups)

    return Geometry(joined(geometry.query_spans), joined(geometry.key_spans), geometry.causal)


class Order(NamedTuple):
    """Reorders rows of a group, one rank's after the other's, to natural order and back: an index
    ``(N,)``, or ``(B, N)`` if each batch row has its own layout."""

    there: Tensor
    back: Tensor


def true_order(
    geometry: Geometry | RowGeometry, of_keys: bool, first: int, ranks: int,
    batch_start: int, batch: int, device: torch.device,
) -> Order | None:  # fmt: skip
    """The order of the rows (or keys) of ``ranks`` ranks from ``first`` on; None if they are in
    natural order already, or if it does not matter."""
    rows = (geometry,)
    if isinstance(geometry, RowGeometry):
        rows = geometry.rows[batch_start : batch_start + batch]
    if not rows or not rows[0].causal:
        return None
    found = [_sorted(row, of_keys, first, ranks) for row in rows]
    if all(map(_is_as_it_lies, (there for there, _ in found))):
        return None
    # Created at each call: see layouts/select.py.
    both = ([positions(spans, device) for spans in way] for way in zip(*found, strict=True))
    return Order(*(way[0] if len(rows) == 1 else torch.stack(way) for way in both))


def _is_as_it_lies(runs: tuple[Span, ...]) -> bool:
    """Whether every run begins where the one before ends."""
    stops = [0, *map(sum, runs)]
    return all(run.position == stop for run, stop in zip(runs, stops, strict=False))


@functools.lru_cache(maxsize=1024)
def _sorted(geometry: Geometry, of_keys: bool, first: int, ranks: int):
    """The runs of a group's rows, by their places in the group, in natural order; and the places of
    the runs in natural order, in the order of the group."""
    owned = geometry.key_spans if of_keys else geometry.query_spans
    spans = sum(owned[first : first + ranks], ())
    starts = list(accumulate((span.length for span in spans), initial=0))
    order = sorted(range(len(spans)), key=lambda i: spans[i])
    there = tuple(Span(starts[i], spans[i].length) for i in order)
    places, end = {}, 0
    for i in order:
        places[i] = end
        end += spans[i].length
    return there, tuple(Span(places[i], spans[i].length) for i in range(len(spans)))
