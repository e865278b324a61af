"""Selects some rows of a tensor."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cp_dispatch.layouts import Span
from cp_dispatch.native.permute import span_indices

#: Pairs of a target and its new values. Each is a tensor or rows by an index; at most one of the
#: two is by an index.
Pairs = list[tuple["Tensor | Indexed", "Tensor | Indexed"]]

# With more runs than this, rows are copied by an index.
_MAX_RUNS = 4


class Selector:
    """Some rows of a tensor: by slices if they are few runs, otherwise by an index."""

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
        """The chosen rows, with their places in ``into``."""
        if self._index is not None:
            return [(into, Indexed(rows, self._index))]
        pairs, at = [], 0
        for start, length in self._spans:
            pairs.append((into[at : at + length], rows[start : start + length]))
            at += length
        return pairs

    def parts(self, rows: Tensor, values: Tensor):
        """``(some of the rows, their values)``, to be written or added."""
        if self._index is not None:
            yield Indexed(rows, self._index), values
            return
        at = 0
        for start, length in self._spans:
            yield rows[start : start + length], values[at : at + length]
            at += length


@dataclass(frozen=True)
class Indexed:
    """Rows by an index without repeats."""

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
