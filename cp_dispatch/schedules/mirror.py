"""Half-shards for the mirror rank: natural order becomes head-tail pairs by one exchange.

With W ranks, rank r holds pieces 2r and 2r + 1 of 2W. It keeps the first and exchanges the second
with rank W - 1 - r, so that it computes with pieces 2r and 2W - 1 - 2r: a head-tail pair, of which
every rank has one::

    W = 4               rank 0   rank 1   rank 2   rank 3
    natural order        0 1      2 3      4 5      6 7
    computed             0 7      2 5      3 4      1 6
"""

from __future__ import annotations

import torch
from torch import Tensor

from cp_dispatch.layouts import Span
from cp_dispatch.layouts.balancer import coalesce
from cp_dispatch.merge import token_major
from cp_dispatch.schedules.comm import Ring


def fits(query_length: int, key_length: int, world_size: int) -> bool:
    """Whether every rank has a shard of the same, even length."""
    return query_length == key_length and query_length % (2 * world_size) == 0


def pair_spans(length: int, world_size: int) -> tuple[tuple[Span, ...], ...]:
    """The positions that each rank computes with, ascending."""
    half = length // (2 * world_size)
    return tuple(
        coalesce([Span(piece * half, half) for piece in (2 * r, 2 * (world_size - r) - 1)])
        for r in range(world_size)
    )


def to_pairs(ring: Ring, *tensors: Tensor) -> list[Tensor]:
    """This rank's first half and its mirror's second one, in ascending order."""
    return _exchanged(ring, tensors, give=1, keep_at=0 if ring.rank < _mirror(ring) else 1)


def to_natural(ring: Ring, *tensors: Tensor) -> list[Tensor]:
    """The inverse of :func:`to_pairs`."""
    return _exchanged(ring, tensors, give=1 if ring.rank < _mirror(ring) else 0, keep_at=0)


def _mirror(ring: Ring) -> int:
    return ring.world_size - 1 - ring.rank


def _exchanged(ring: Ring, tensors, give: int, keep_at: int) -> list[Tensor]:
    """Each tensor ``(B, H, S, D)`` with half ``give`` sent to the mirror rank, the other half at
    half ``keep_at`` and what the mirror sent at the other."""
    if _mirror(ring) == ring.rank:  # its own pieces are a pair
        ring.exchange(ring.rank, tensors[0].new_empty(0), tensors[0].new_empty(0)).wait()
        return list(tensors)
    halves = [x.tensor_split(2, dim=2) for x in tensors]
    send, receive = (_Message([half[give] for half in halves]) for _ in range(2))
    for view, half in zip(send.views, halves, strict=True):
        view.copy_(half[give])
    work = ring.exchange(_mirror(ring), send.buffer, receive.buffer)
    results = [token_major(*x.shape, like=x) for x in tensors]
    for result, half in zip(results, halves, strict=True):
        result.tensor_split(2, dim=2)[keep_at].copy_(half[1 - give])
    work.wait()
    for result, view in zip(results, receive.views, strict=True):
        result.tensor_split(2, dim=2)[1 - keep_at].copy_(view)
    return results


class _Message:
    """Room for tensors of several dtypes in one buffer, each token-major."""

    _ALIGNMENT = 16  # bytes

    def __init__(self, like: list[Tensor]):
        offsets, end = [], 0
        for x in like:
            offsets.append(end)
            end += -(-x.numel() * x.itemsize // self._ALIGNMENT) * self._ALIGNMENT
        self.buffer = like[0].new_empty(end, dtype=torch.uint8)
        self.views = []
        for x, offset in zip(like, offsets, strict=True):
            batch, heads, length, dim = x.shape
            part = self.buffer[offset : offset + x.numel() * x.itemsize].view(x.dtype)
            self.views.append(part.view(batch, length, heads, dim).transpose(1, 2))
