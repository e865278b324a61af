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
from cp_dispatch.schedules.mailbox import rows_for


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


class Exchange:
    """Halves of tensors ``(B, H, S, D)`` on their way to the mirror rank and from it."""

    def __init__(self, ring: Ring, tensors: tuple[Tensor, ...], give: int, keep_at: int):
        self._ring, self._keep_at, self._peer = ring, keep_at, _mirror(ring)
        halves = [x.tensor_split(2, dim=2) for x in tensors]
        given = [half[give] for half in halves]
        box = ring.mailbox("halves", _message_bytes(given))
        self.tensors, self._work = list(tensors), None
        if self._peer == ring.rank:  # its own pieces are a pair
            if box is None:
                nothing = tensors[0].new_empty(0)
                ring.exchange(ring.rank, nothing, nothing).wait()
            return
        self._box = box
        if box is None:
            send, received = (given[0].new_empty(_message_bytes(given), dtype=torch.uint8)
                              for _ in range(2))  # fmt: skip
            for view, half in zip(_views(send, given), given, strict=True):
                view.copy_(half)
            self._work = ring.exchange(self._peer, send, received)
        else:
            targets = _views(box.at(self._peer, 0, _message_bytes(given), torch.uint8), given)
            box.open([self._peer])
            box.push([x.transpose(1, 2) for x in targets], rows_for(given), [self._peer])
            received = box.at(ring.rank, 0, _message_bytes(given), torch.uint8)
            self._work = box
        self._received = _views(received, given)
        self.tensors = [token_major(*x.shape, like=x) for x in tensors]
        for result, half in zip(self.tensors, halves, strict=True):
            result.tensor_split(2, dim=2)[keep_at].copy_(half[1 - give])

    def finish(self) -> list[Tensor]:
        """The tensors, once they are whole."""
        if self._work is not None:
            self._work.wait()
            for result, view in zip(self.tensors, self._received, strict=True):
                result.tensor_split(2, dim=2)[1 - self._keep_at].copy_(view)
            if self._box is not None:
                self._box.release()
            self._work = self._received = None
        return self.tensors


def to_pairs(ring: Ring, *tensors: Tensor) -> Exchange:
    """This rank's first half and its mirror's second one, in ascending order."""
    return Exchange(ring, tensors, give=1, keep_at=0 if ring.rank < _mirror(ring) else 1)


def to_natural(ring: Ring, *tensors: Tensor) -> Exchange:
    """The inverse of :func:`to_pairs`."""
    return Exchange(ring, tensors, give=1 if ring.rank < _mirror(ring) else 0, keep_at=0)


def _mirror(ring: Ring) -> int:
    return ring.world_size - 1 - ring.rank


_ALIGNMENT = 16  # bytes, of each tensor in a message


def _message_bytes(like: list[Tensor]) -> int:
    return sum(-(-x.numel() * x.itemsize // _ALIGNMENT) * _ALIGNMENT for x in like)


def _views(message: Tensor, like: list[Tensor]) -> list[Tensor]:
    """Tensors of several dtypes in one buffer, each token-major."""
    views, offset = [], 0
    for x in like:
        batch, heads, length, dim = x.shape
        part = message[offset : offset + x.numel() * x.itemsize].view(x.dtype)
        views.append(part.view(batch, length, heads, dim).transpose(1, 2))
        offset += _message_bytes([x])
    return views
