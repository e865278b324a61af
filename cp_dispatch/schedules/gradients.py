"""Sums gradients over the blocks of a schedule, in float32 (float64 for float64)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from cp_dispatch.backends import wide_dtype
from cp_dispatch.layouts import Geometry
from cp_dispatch.native.merge import token_major
from cp_dispatch.schedules.comm import Ring
from cp_dispatch.schedules.pair import Pair


def mask_gradient(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Zeros in wide dtype, in the bias's shape, to sum its gradient."""
    return mask.new_zeros(mask.shape, dtype=wide_dtype(dtype))


class KeyShare(NamedTuple):
    """A tile's share of dK and dV, and its place in the shard of keys."""

    dk: Tensor
    dv: Tensor
    start: int
    #: The batch row, None for all.
    row: int | None


def window_of(total: Tensor, start: int, share: Tensor, row: int | None) -> Tensor:
    """The part of ``total`` that a share of the rows from ``start`` on belongs to."""
    rows = slice(start, start + share.size(2))
    return total[:, :, rows] if row is None else total[row : row + 1, :, rows]


class TravellingGradient:
    """dK and dV of the keys that the rank currently holds: received, added to, passed on.

    Holds two buffers of one key/value shard each, in float32 for 16-bit inputs too. Only the last
    move, back to the owner, is in ``dtype`` (the inputs' or a wide one), because nothing is added
    after it. Without a ring the sum stays on this rank.
    """

    def __init__(
        self,
        key: Tensor,
        value: Tensor,
        geometry: Geometry,
        rank: int,
        ring: Ring | None,
        dtype: torch.dtype | None = None,
    ):
        self._key, self._value = key, value
        self._dtype = dtype or key.dtype
        self._geometry = geometry
        self._rank = rank
        self._ring = ring
        self._pair = Pair(key, value, wide_dtype(key.dtype))
        self._hop = 0
        self._work = None
        length = max(map(geometry.key_length, range(geometry.world_size)))
        self._buffers = [self._pair.buffer(length) for _ in range(2 if ring is not None else 1)]

    def add(self, shares: list[KeyShare]) -> None:
        """Wait for the sum so far and add this rank's shares."""
        if self._work is not None:
            self._work.wait()
        length = self._length(self._rank)
        dk, dv = self._pair.views(self._buffer(), length)
        begins = self._hop == 0
        if begins and not (shares and shares[0].dk.shape[:3] == dk.shape[:3]):
            self._buffer()[: self._pair.numel(length)].zero_()
            begins = False
        for share in shares:
            if begins:
                dk.copy_(share.dk)
                dv.copy_(share.dv)
                begins = False
            else:
                for total, part in ((dk, share.dk), (dv, share.dv)):
                    window_of(total, share.start, part, share.row).add_(part)

    def pass_on(self) -> None:
        """Start sending the sum to the next rank, while the sum for the next keys arrives."""
        if self._ring is None:
            return
        world_size = self._geometry.world_size
        send = self._buffer()[: self._pair.numel(self._length(self._rank))]
        receive = self._buffer(1)[: self._pair.numel(self._length((self._rank - 1) % world_size))]
        if self._hop == world_size - 1 and self._dtype is not self._pair.dtype:
            # The free buffer, viewed in the narrow dtype, has room for what is sent and what
            # arrives.
            free = self._buffer(1).view(self._dtype)
            receive, narrow = (
                free[: receive.numel()],
                free[free.numel() - send.numel() :],
            )
            send = narrow.copy_(send)
        with self._ring.after(self._ring.mark()):
            self._work = self._ring.shift(send, receive)
        self._hop += 1

    def wide_views(self) -> tuple[Tensor, Tensor]:
        """The sums of dK and dV so far: wide, token-major views of one buffer."""
        return self._pair.views(self._buffer(), self._length(self._rank))

    def finish(self) -> tuple[Tensor, Tensor]:
        """dK and dV of this rank's own keys, in ``dtype``, token-major."""
        buffer = self._buffer()
        if self._ring is not None:
            self._work.wait()
            buffer = buffer.view(self._dtype)
        views = self._pair.views(buffer, self._length(self._rank))
        return tuple(
            token_major(*like.shape, like=like, dtype=self._dtype).copy_(grad)
            for like, grad in zip((self._key, self._value), views, strict=True)
        )

    def _buffer(self, moves: int = 0) -> Tensor:
        """The buffer in use at this hop, or ``moves`` hops on."""
        return self._buffers[(self._hop + moves) % len(self._buffers)]

    def _length(self, rank: int) -> int:
        """The number of keys that ``rank`` currently holds."""
        return self._geometry.key_length((rank - self._hop) % self._geometry.world_size)
