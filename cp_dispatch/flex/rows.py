"""Rows of keys: some of them in a tensor, and the attention's tensors as rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from cp_dispatch.layouts import Span
from cp_dispatch.permute import span_indices
from cp_dispatch.rows import copy_rows

#: Tensors, or rows by an index, and what is to be written there; one of the two may be by an index.
Pairs = list[tuple["Tensor | Indexed", "Tensor | Indexed"]]

# With more runs than this rows are copied by an index.
_MAX_RUNS = 4


class Selector:
    """Some rows of a tensor: as slices, where they are few runs, else by an index."""

    def __init__(self, spans: tuple[Span, ...], device: torch.device):
        self._spans = spans
        self._index = span_indices(spans).to(device) if len(spans) > _MAX_RUNS else None

    def take(self, rows: Tensor) -> Tensor:
        if self._index is not None:
            return rows.index_select(0, self._index)
        parts = [rows[start : start + length] for start, length in self._spans]
        if len(parts) == 1:
            return parts[0]
        return torch.cat(parts) if parts else rows[:0]

    def taken_into(self, into: Tensor, rows: Tensor) -> Pairs:
        """Where the chosen rows go in ``into``, for :func:`copy_all`."""
        if self._index is not None:
            return [(into, Indexed(rows, self._index))]
        pairs, at = [], 0
        for start, length in self._spans:
            pairs.append((into[at : at + length], rows[start : start + length]))
            at += length
        return pairs

    def parts(self, rows: Tensor, values: Tensor):
        """``(some of the rows, their values)``, which are to be written or added."""
        if self._index is not None:
            yield Indexed(rows, self._index), values
            return
        at = 0
        for start, length in self._spans:
            yield rows[start : start + length], values[at : at + length]
            at += length


@dataclass(frozen=True)
class Indexed:
    """Rows by an index in which none occurs twice."""

    rows: Tensor
    index: Tensor

    @property
    def dtype(self) -> torch.dtype:
        return self.rows.dtype

    def taken(self) -> Tensor:
        return self.rows.index_select(0, self.index)

    def copy_(self, values: Tensor) -> None:
        self.rows.index_copy_(0, self.index, values.to(self.dtype))

    def add_(self, values: Tensor) -> None:
        self.rows.index_add_(0, self.index, values.to(self.dtype))


class Copies(NamedTuple):
    """Pairs that :func:`~cp_dispatch.rows.copy_rows` takes at a time; the index, if there is one,
    is that of the targets (``scatter``) or of the sources."""

    targets: list[Tensor]
    sources: list[Tensor]
    index: Tensor | None
    scatter: bool


def copies(pairs: Pairs) -> list[Copies]:
    """What is to be written, in as few launches as memory allows."""
    found: dict[tuple, Copies] = {}
    for target, source in pairs:
        scatter, gather = isinstance(target, Indexed), isinstance(source, Indexed)
        if (source if scatter else target).numel() == 0:
            continue
        if target.dtype is not source.dtype:
            source = (source.taken() if gather else source).to(target.dtype)
            gather = False
        index = target.index if scatter else source.index if gather else None
        made = found.setdefault((id(index), scatter), Copies([], [], index, scatter))
        made.targets.append(target.rows if scatter else target)
        made.sources.append(source.rows if gather else source)
    return list(found.values())


def copy_all(pairs: Pairs) -> None:
    """Write every second of a pair to its first."""
    for targets, sources, index, scatter in copies(pairs):
        copy_rows(targets, sources, index, [0] * len(targets), scatter)


def pack_rows(tensors: Sequence[Tensor], lanes: int) -> Tensor:
    """``(B, H, L, D)`` tensors side by side: ``(lanes * L, B / lanes * H * sum of D)``."""
    batch, heads, length, _ = tensors[0].shape
    dims = [x.size(3) for x in tensors]
    rows = tensors[0].new_empty((lanes, length, batch // lanes, heads, sum(dims)))
    views = split_rows(rows, dims)
    for view, x in zip(views, tensors, strict=True):
        view.copy_(x)
    return rows.view(lanes * length, batch // lanes * heads * sum(dims))


def split_rows(rows: Tensor, dims: Sequence[int]) -> list[Tensor]:
    """``(lanes, L, B / lanes, H, sum of D)`` as views ``(B, H, L, D)``."""
    lanes, length, per_lane, heads, dim = rows.shape
    # One of the two is 1, so that the batch is a view.
    batch = rows.permute(0, 2, 3, 1, 4).view(lanes * per_lane, heads, length, dim)
    return list(batch.split(list(dims), dim=-1))


def rows_of(x: Tensor, lanes: int) -> Tensor:
    """``(B, H, S, D)`` as ``(lanes * S, B / lanes * H * D)``, a view where memory allows it."""
    batch, heads, length, dim = x.shape
    rows = x.view(lanes, batch // lanes, heads, length, dim).permute(0, 3, 1, 2, 4)
    return rows.reshape(lanes * length, batch // lanes * heads * dim)
