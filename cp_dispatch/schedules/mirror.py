"""Exchanges half-shards with the mirror rank, which turns natural order into head-tail pairs.

With W ranks, rank r holds pieces 2r and 2r + 1 of 2W. It keeps the first and exchanges the second
with rank W - 1 - r. Then it computes with pieces 2r and 2W - 1 - 2r, a head-tail pair. Every rank
has one such pair::

    W = 4               rank 0   rank 1   rank 2   rank 3
    natural order        0 1      2 3      4 5      6 7
    computed             0 7      2 5      3 4      1 6
"""

from __future__ import annotations

from torch import Tensor

from cp_dispatch.layouts import Span
from cp_dispatch.layouts.balancer import coalesce
from cp_dispatch.native.merge import token_major
from cp_dispatch.schedules.comm import Ring
from cp_dispatch.schedules.half_swap import Swap, mirror_of


def fits(query_length: int, key_length: int, world_size: int) -> bool:
    """Whether every rank has a shard of the same, even length."""
    alike = query_length == key_length and query_length % (2 * world_size) == 0
    return alike and query_length > 0


def pair_spans(length: int, world_size: int) -> tuple[tuple[Span, ...], ...]:
    """The positions that each rank computes with, ascending."""
    half = length // (2 * world_size)
    return tuple(
        coalesce([Span(piece * half, half) for piece in (2 * r, 2 * (world_size - r) - 1)])
        for r in range(world_size)
    )


def to_pairs(ring: Ring, *tensors: Tensor) -> list[Tensor]:
    """This rank's first half and its mirror's second half of tensors ``(B, H, S, ...)``,
    ascending."""
    return _put_together(ring, tensors, 0, int(ring.rank >= mirror_of(ring)))


def to_natural(ring: Ring, *tensors: Tensor) -> list[Tensor]:
    """The inverse of :func:`to_pairs`."""
    return _put_together(ring, tensors, int(ring.rank >= mirror_of(ring)), 0)


def _put_together(ring: Ring, tensors: tuple[Tensor, ...], kept: int, place: int) -> list[Tensor]:
    """Put together the half that is kept, first or second, and the received half that the mirror
    does not keep."""
    half = tensors[0].size(2) // 2
    swap = Swap(ring, tensors, (1 - kept) * half, half)
    if swap.is_alone:  # its own pieces are already a pair
        return list(tensors)
    results = [
        token_major(*x.shape, like=x) if x.dim() == 4 else x.new_empty(x.shape) for x in tensors
    ]
    places = [x.tensor_split(2, dim=2) for x in results]
    for into, x in zip(places, tensors, strict=True):
        into[place].copy_(x.narrow(2, kept * half, half))
    for into, received in zip(places, swap.wait(), strict=True):
        into[1 - place].copy_(received)
    swap.release()
    return results
