"""Sums of gradients over the blocks of a schedule, in float32 (float64 for float64)."""

from __future__ import annotations

import torch
from torch import Tensor

from cp_dispatch.layouts import Geometry
from cp_dispatch.merge import token_major
from cp_dispatch.schedules.comm import Ring
from cp_dispatch.schedules.pair import Pair


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype is torch.float64 else torch.float32


class QueryGradient:
    """dQ of this rank's rows. The first share is kept as the kernel made it."""

    def __init__(self, query: Tensor):
        self._query = query
        self._sum: Tensor | None = None

    def add(self, share: Tensor, start: int) -> None:
        whole = share.size(2) == self._query.size(2)
        if self._sum is None and whole:
            self._sum = share
            return
        wide = wide_dtype(self._query.dtype)
        if self._sum is None:
            self._sum = token_major(*self._query.shape, like=self._query, dtype=wide).zero_()
        elif self._sum.dtype is not wide:
            first = self._sum
            self._sum = token_major(*self._query.shape, like=self._query, dtype=wide).copy_(first)
        self._sum[:, :, start : start + share.size(2)].add_(share)

    def finish(self) -> Tensor:
        final = token_major(*self._query.shape, like=self._query)
        if self._sum is None:
            return final.zero_()
        if self._sum.dtype is final.dtype and self._sum.stride() == final.stride():
            return self._sum
        return final.copy_(self._sum)


class TravellingGradient:
    """dK and dV of the keys at hand: received, added to, passed on.

    Holds two buffers of one key/value shard each, in float32 whatever the inputs' dtype.
    """

    def __init__(self, key: Tensor, value: Tensor, geometry: Geometry, ring: Ring | None):
        self._key, self._value = key, value
        self._geometry = geometry
        self._ring = ring
        self._pair = Pair(key, value, wide_dtype(key.dtype))
        self._hop = 0
        self._work = None
        length = max(map(geometry.key_length, range(geometry.world_size)))
        self._buffers = [self._pair.buffer(length) for _ in range(2 if ring is not None else 1)]

    def add_and_pass_on(self, shares: list[tuple[Tensor, Tensor, int]]) -> None:
        """Add this rank's ``(dk, dv, first key row)`` shares and send the sum to the next rank."""
        if self._work is not None:
            self._work.wait()
        at_hand = self._sum_of(self._rank)
        dk, dv = self._pair.views(at_hand, self._length(self._rank))
        for index, (share_dk, share_dv, start) in enumerate(shares):
            rows = slice(start, start + share_dk.size(2))
            first = self._hop == 0 and index == 0
            if first and share_dk.size(2) == dk.size(2):
                dk.copy_(share_dk)
                dv.copy_(share_dv)
                continue
            if first:
                at_hand.zero_()
            dk[:, :, rows].add_(share_dk)
            dv[:, :, rows].add_(share_dv)
        if self._hop == 0 and not shares:
            at_hand.zero_()
        if self._ring is None:
            return
        arriving = self._sum_of((self._rank - 1) % self._geometry.world_size, moved=True)
        self._work = self._ring.shift(at_hand, arriving)
        self._hop += 1

    def finish(self) -> tuple[Tensor, Tensor]:
        """dK and dV of this rank's own keys, in their dtype, token-major."""
        if self._work is not None:
            self._work.wait()
        grads = []
        views = self._pair.views(self._sum_of(self._rank), self._length(self._rank))
        for like, grad in zip((self._key, self._value), views, strict=True):
            grads.append(token_major(*like.shape, like=like).copy_(grad))
        return tuple(grads)

    @property
    def _rank(self) -> int:
        return self._ring.rank if self._ring is not None else 0

    def _sum_of(self, rank: int, moved: bool = False) -> Tensor:
        """The buffer part for what ``rank`` holds now, here or (``moved``) after its move."""
        buffer = self._buffers[(self._hop + moved) % len(self._buffers)]
        return buffer[: self._pair.numel(self._length(rank))]

    def _length(self, rank: int) -> int:
        """Rows of the keys that ``rank`` has at hand."""
        return self._geometry.key_length((rank - self._hop) % self._geometry.world_size)
