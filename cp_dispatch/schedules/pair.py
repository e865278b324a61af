"""Packs key and value (or their gradients) into one flat buffer, to send both in one message."""

from __future__ import annotations

import torch
from torch import Tensor


class Pair:
    """The layout of a key block ``(B, Hkv, S, D)`` and a value block ``(B, Hkv, S, Dv)`` in a
    buffer: first the key, then the value, each token-major ``(B, S, Hkv, D)``."""

    def __init__(self, key: Tensor, value: Tensor, dtype: torch.dtype | None = None):
        self._like = key
        self.dtype = dtype or key.dtype
        self._dims = key.size(-1), value.size(-1)
        self._batch, self._heads = key.size(0), key.size(1)
        #: Equal for pairs whose buffers have the same layout.
        self.layout = self._batch, self._heads, self._dims, self.dtype

    def numel(self, length: int) -> int:
        return self._batch * length * self._heads * sum(self._dims)

    def buffer(self, length: int) -> Tensor:
        return self._like.new_empty(self.numel(length), dtype=self.dtype)

    def views(self, buffer: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Key and value views, ``(B, Hkv, length, D)``, at the start of a buffer."""
        views, offset = [], buffer.storage_offset()
        for dim in self._dims:
            row = self._heads * dim
            size = (self._batch, self._heads, length, dim)
            # One call per view, because split, view and transpose take four times as long on the
            # host.
            views.append(buffer.as_strided(size, (length * row, dim, row, 1), offset))
            offset += self._batch * length * row
        return tuple(views)

    def pack(self, key: Tensor, value: Tensor, buffer: Tensor) -> None:
        """Copy one block to the start of ``buffer``."""
        into_key, into_value = self.views(buffer, key.size(2))
        into_key.copy_(key)
        into_value.copy_(value)
