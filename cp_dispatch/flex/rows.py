"""Rows of keys: some of them in a tensor, and the attention's tensors as rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cp_dispatch.layouts import Span
from cp_dispatch.permute import span_indices
from cp_dispatch.rows import copy_rows

#: Tensors, or rows by an index, and what is to be written there.
Pairs = list[tuple["Tensor | Indexed", Tensor]]

# With more runs than this rows are copied by an index.
_MAX_RUNS = 4


class Selector:
    """Some rows of a tensor: as slices, where they are few runs, else by an index."""

    def __init__(self, spans: tuple[Span, ...], device: torch.device):
        self._spans = spans
        self._index = span_indices(spans).to(device) if len(spans) > _MAX_RUNS else None

    @property
    def is_sliced(self) -> bool:
        return self._index is None

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
            return [(into, rows.index_select(0, self._index))]
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


class Indexed:
    """Rows by an index in which none occurs twice."""

    def __init__(self, rows: Tensor, index: Tensor):
        self._rows, self._index = rows, index

    def copy_(self, values: Tensor) -> None:
        self._rows.index_copy_(0, self._index, values.to(self._rows.dtype))

    def add_(self, values: Tensor) -> None:
        self._rows.index_add_(0, self._index, values.to(self._rows.dtype))


def copy_all(pairs: Pairs) -> None:
    """Write every second tensor to its place, in one launch where memory allows it."""
    pairs = [(target, source) for target, source in pairs if source.numel()]
    plain = [(a, b) for a, b in pairs if isinstance(a, Tensor) and a.dtype is b.dtype]
    if plain:
        targets, sources = map(list, zip(*plain, strict=True))
        copy_rows(targets, sources, None, [0] * len(plain), False)
    for target, source in pairs:
        if not isinstance(target, Tensor) or target.dtype is not source.dtype:
            target.copy_(source)


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
