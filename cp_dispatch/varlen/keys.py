"""Selects the keys of a kernel call from a rank's compact keys, and puts their gradients back."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from cp_dispatch.by_need.selector import Selector
from cp_dispatch.layouts import Span
from cp_dispatch.layouts.spans import append
from cp_dispatch.native.parts import add_up
from cp_dispatch.varlen.documents import Piece
from cp_dispatch.varlen.traffic import Traffic

# With more runs than this, keys are copied by an index, and their gradients are summed one layer
# after the other.
_MOST_RUNS = 32

Layer = tuple[Selector, Selector]


class Arrived(NamedTuple):
    """Compact keys and compact values, each as the parts from every rank, or as one part; in the
    order of the only kernel call if ``are_ordered``."""

    parts: Sequence[Sequence[Tensor]]
    are_ordered: bool = False

    def of(self, call: CallKeys) -> list[Tensor]:
        """The keys and values of a kernel call."""
        if self.are_ordered:
            return [part for (part,) in self.parts]
        return [call.take(parts) for parts in self.parts]


class CallKeys:
    """The keys of ``pieces``, one piece after the other, in the form for a kernel."""

    def __init__(self, pieces: Sequence[Piece], traffic: Traffic, device: torch.device):
        self._pieces, self._device = pieces, device
        self._places = [traffic.compact(piece.key, piece.keys) for piece in pieces]
        spans: list[Span] = []
        for place in self._places:
            for span in place:
                append(spans, *span)
        # No more of them than are counted: documents make thousands, on each of many ranks.
        self._runs = list(itertools.islice(_by_owner(spans, traffic.takes), _MOST_RUNS + 1))
        self._many = Selector(tuple(spans), device) if len(self._runs) > _MOST_RUNS else None
        self._spans = spans if self._many is None else []
        #: The places of compact keys and of the kernel's keys, in the form for
        #: :func:`~cp_dispatch.native.parts.add_up`.
        self.sums = tuple(in_turn(spans))
        #: Whether the kernel's keys are all compact keys, each once.
        self.are_all = sum(count for _, count, _ in self.sums) == sum(traffic.takes)
        back = [Span(first, length) for _, length, first in sorted(self.sums)]
        self._back = Selector(tuple(back), device) if len(back) > 1 else None

    def take(self, parts: Sequence[Tensor]) -> Tensor:
        """The kernel's keys, from the parts that came from every rank, or one part. No copy if they
        are a slice of one part."""
        if self._many is not None:
            return self._many.take(parts[0] if len(parts) == 1 else torch.cat(list(parts)))
        runs = self._runs if len(parts) > 1 else [(0, *span) for span in self._spans]
        rows = [parts[owner].narrow(0, start, count) for owner, start, count in runs]
        if len(rows) == 1:
            return rows[0]
        return torch.cat(rows) if rows else parts[0][:0]

    def give_back(self, grad: Tensor) -> Tensor:
        """The kernel's gradient in the order of the compact keys, if it covers all of them."""
        return grad if self._back is None else self._back.take(grad)

    @functools.cached_property
    def layers(self) -> list[Layer]:
        """Layers of pieces without common keys: the places of their keys among the kernel's keys
        and among the compact keys. Pieces of different documents never share keys."""
        found: list[tuple[list[Span], list[Span]]] = []
        of_document: dict[int, int] = {}
        start = 0
        for piece, spans in zip(self._pieces, self._places, strict=True):
            layer = of_document.get(piece.document, 0)
            of_document[piece.document] = layer + 1
            if layer == len(found):
                found.append(([], []))
            append(found[layer][0], start, piece.keys)
            for span in spans:
                append(found[layer][1], *span)
            start += piece.keys
        return [tuple(Selector(tuple(spans), self._device) for spans in both) for both in found]


def add_together(
    calls: Sequence[CallKeys], grads: Sequence[Sequence[Tensor]], totals: Sequence[Tensor]
) -> None:
    """Write the sums of all calls' kernel gradients into ``totals``, the gradients of the compact
    keys."""
    places = tuple(place for keys in calls for place in keys.sums)
    if len(places) <= _MOST_RUNS and totals[0].size(0):
        of_runs = [pair for keys, pair in zip(calls, grads, strict=True) for _ in keys.sums]
        parts = [[as_batch(x) for x in of_one] for of_one in zip(*of_runs, strict=True)]
        add_up([as_batch(x) for x in totals], parts, places)
        return
    for total in totals:
        total.zero_()
    for keys, pair in zip(calls, grads, strict=True):
        for of_kernel, compact in keys.layers:
            for total, grad in zip(totals, pair, strict=True):
                add(compact, total, of_kernel.take(grad))


def as_batch(rows: Tensor) -> Tensor:
    """``(rows, H, D)`` as ``(1, H, rows, D)``."""
    return rows.transpose(0, 1).unsqueeze(0)


def add(place: Selector, total: Tensor, rows: Tensor) -> None:
    """Add rows to their places, which do not repeat."""
    for part, values in place.parts(total, rows):
        part.add_(values)


def _by_owner(spans: Sequence[Span], takes: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Runs of compact keys as ``(rank that they come from, first row of that rank's part,
    length)``."""
    for start, length in spans:
        begin = 0
        for owner, count in enumerate(takes):
            first, last = max(start, begin), min(start + length, begin + count)
            if first < last:
                yield owner, first - begin, last - first
            begin += count


def in_turn(spans: Sequence[Span]) -> Iterator[tuple[int, int, int]]:
    """The places of a sum's rows that are one after the other in a part, in the form for
    :func:`~cp_dispatch.native.parts.add_up`."""
    first = 0
    for start, length in spans:
        yield start, length, first
        first += length
