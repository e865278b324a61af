"""A balanced ring for causal work in natural order: half-shards are exchanged with the mirror rank.

With W ranks, rank r holds pieces 2r and 2r + 1 of 2W. It keeps the first and exchanges the second
with rank W - 1 - r, so that it computes with pieces 2r and 2W - 1 - 2r: a head-tail pair, of which
every rank has one::

    W = 4               rank 0   rank 1   rank 2   rank 3
    natural order        0 1      2 3      4 5      6 7
    computed             0 7      2 5      3 4      1 6

Query, key and value halves go in one message before the ring, the output comes back in one after
it; the backward sends what it needs again and keeps nothing beside the tensors of the natural
order that autograd has saved anyway.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from cp_dispatch.layouts import Geometry, Span
from cp_dispatch.layouts.balancer import coalesce
from cp_dispatch.merge import token_major
from cp_dispatch.schedules import ring
from cp_dispatch.schedules.comm import Ring
from cp_dispatch.schedules.job import Job


def fits(query_length: int, key_length: int, world_size: int) -> bool:
    """Whether every rank has a shard of the same, even length."""
    return query_length == key_length and query_length % (2 * world_size) == 0


def geometry(
    query_length: int, key_length: int, ring_shape: tuple[int, ...], causal: bool, layout
) -> Geometry:
    """Who computes with which positions. ``layout`` is None: the order is the natural one."""
    world_size = math.prod(ring_shape)
    half = int(query_length) // (2 * world_size)
    spans = tuple(
        coalesce([Span(piece * half, half) for piece in (2 * r, 2 * (world_size - r) - 1)])
        for r in range(world_size)
    )
    return Geometry(spans, spans, causal)


def forward(job: Job, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """As :func:`cp_dispatch.schedules.ring.forward`."""
    query, key, value = _to_pairs(job.ring, query, key, value)
    output, logsumexp = ring.forward(job, query, key, value)
    del query, key, value
    output, logsumexp = _to_natural(job.ring, output, logsumexp.unsqueeze(-1))
    return output, logsumexp.squeeze(-1).contiguous()


def backward(
    job: Job,
    grad_output: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    logsumexp: Tensor,
    key_grad: bool,
    mask_grad: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """As :func:`cp_dispatch.schedules.ring.backward`."""
    *tensors, logsumexp = _to_pairs(
        job.ring, grad_output, query, key, value, output, logsumexp.unsqueeze(-1)
    )
    logsumexp = logsumexp.squeeze(-1).contiguous()
    dq, dk, dv, grad_mask = ring.backward(job, *tensors, logsumexp, key_grad, mask_grad)
    del tensors, logsumexp
    if key_grad:
        dq, dk, dv = _to_natural(job.ring, dq, dk, dv)
    else:
        (dq,) = _to_natural(job.ring, dq)
    return dq, dk, dv, grad_mask


def _to_pairs(ring: Ring, *tensors: Tensor) -> list[Tensor]:
    """This rank's first half and its mirror's second one, in ascending order."""
    return _exchanged(ring, tensors, give=1, keep_at=0 if ring.rank < _mirror(ring) else 1)


def _to_natural(ring: Ring, *tensors: Tensor) -> list[Tensor]:
    """The inverse of :func:`_to_pairs`."""
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
