"""Divides a backward's work with a rank's own keys in two parts: the first overlaps with what
arrives, the second with what is sent.

If one kernel computes all of it, the parts are heads. (Divided by rows, one part would consist of
several tiles with fewer keys each, and more partial results would have to be combined.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from torch import Tensor

from cp_dispatch.layouts import Span, Tile
from cp_dispatch.native.merge import token_major
from cp_dispatch.native.parts import add_up
from cp_dispatch.schedules.blocks import Rows, backward_block
from cp_dispatch.schedules.gradients import KeyShare
from cp_dispatch.schedules.job import Job


class Part(NamedTuple):
    """Some of the work: the tiles and heads, and the job of these heads."""

    job: Job
    tiles: tuple[Tile, ...]
    #: Query heads and key heads.
    rows: Span
    keys: Span


def divided(job: Job, tiles: tuple[Tile, ...], query: Tensor, key: Tensor) -> tuple[Part, ...]:
    """The work with own keys in two parts; fewer if there is too little to divide."""
    heads, key_heads = query.size(1), key.size(1)
    rows, keys = Span(0, heads), Span(0, key_heads)
    if len(tiles) > 1:
        first = len(tiles) // 2
        return tuple(Part(job, x, rows, keys) for x in (tiles[:first], tiles[first:]))
    if not tiles:
        return ()
    if heads < 2:
        return (Part(job, tiles, rows, keys),)
    found = []
    if key_heads > 1:
        cut, shared = key_heads // 2, heads // key_heads
        for own in (Span(0, cut), Span(cut, key_heads - cut)):
            found.append((Span(own.position * shared, own.length * shared), own))
    else:  # a single key head, of which both parts give shares of the gradient
        cut = heads // 2
        found = [(own, keys) for own in (Span(0, cut), Span(cut, heads - cut))]
    return tuple(Part(of_heads(job, own), tiles, own, of_key) for own, of_key in found)


def of_heads(job: Job, heads: Span) -> Job:
    """The job of some query heads."""
    if job.mask is not None:
        job = replace(job, mask=mask_of(job.mask, heads))
    if job.dropout is not None:
        first = job.dropout.head_start + heads.position
        job = replace(job, dropout=replace(job.dropout, head_start=first))
    return job


def mask_of(mask: Tensor, heads: Span) -> Tensor:
    """Some query heads of a mask, or of its gradient; a head dim of 1 stays."""
    return mask if mask.size(1) == 1 else narrowed(mask, heads)


def narrowed(tensor: Tensor, heads: Span) -> Tensor:
    """Some heads of a tensor ``(B, H, ...)``."""
    return tensor if tensor.size(1) == heads.length else tensor.narrow(1, *heads)


class Gradients:
    """A rank's gradients in a backward whose work with own keys is divided. Shares of dQ are kept,
    and added in one pass at the end."""

    def __init__(self, query: Tensor, parts: Sequence[Part]):
        self._query = query
        # By query heads: shares with own keys, each with its first row; and those of all heads.
        self._own: dict[Span, list[tuple[Tensor, int]]] = {part.rows: [] for part in parts}
        self._all: list[tuple[Tensor, int]] = []
        self._into = self._all
        #: Shares of dK and dV of own keys, by key heads.
        self.of_keys: dict[Span, list[KeyShare]] = {part.keys: [] for part in parts}

    def compute(self, part: Part, rows: Rows, key: Tensor, value: Tensor, grad_mask) -> None:
        """Compute a part."""
        of_rows = rows  # with the cuts that it has
        if part.rows.length < self._query.size(1):
            of_rows = Rows(*(narrowed(x, part.rows) for x in rows.tensors))
        of_keys = (narrowed(x, part.keys) for x in (key, value))
        if grad_mask is not None:
            grad_mask = mask_of(grad_mask, part.rows)
        self._into = self._own[part.rows]
        self.of_keys[part.keys] += backward_block(
            part.job, of_rows, *of_keys, part.tiles, self, grad_mask
        )
        self._into = self._all

    def add(self, share: Tensor, tile: Tile) -> None:
        """Add the dQ of a tile's rows."""
        self._into.append((share, tile.query_start))

    def finish(self) -> Tensor:
        """dQ, token-major; its shares are freed."""
        total = token_major(*self._query.shape, like=self._query)
        totals, shares, places = [], [], ()
        for heads, own in (self._own or {Span(0, total.size(1)): []}).items():
            found = own + [(narrowed(x, heads), start) for x, start in self._all]
            totals.append(narrowed(total, heads))
            shares.append([x for x, _ in found])
            places = tuple((start, x.size(2), 0) for x, start in found)
        add_up(totals, shares, places)
        self._own, self._all = {}, []
        return total
