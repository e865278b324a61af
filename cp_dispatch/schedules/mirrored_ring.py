"""A balanced ring for causal calls in natural order, by half-shards from the mirror rank.

See :mod:`cp_dispatch.schedules.mirror`. Halves of query, key and value go in one message before the
ring, and the output comes back in one after it. The backward sends what it needs again, and keeps
only the tensors in natural order that autograd saves anyway.
"""

from __future__ import annotations

import functools
import math

from torch import Tensor

from cp_dispatch.layouts import Geometry
from cp_dispatch.schedules import ring
from cp_dispatch.schedules.job import Job
from cp_dispatch.schedules.mirror import pair_spans, to_natural, to_pairs


def geometry(
    query_length: int, key_length: int, ring_shape: tuple[int, ...], causal: bool, layout
) -> Geometry:
    """Who computes with which positions. ``layout`` is None: the order is the natural one."""
    return _geometry(int(query_length), math.prod(ring_shape), causal)


@functools.lru_cache(maxsize=256)
def _geometry(length: int, world_size: int, causal: bool) -> Geometry:
    spans = pair_spans(length, world_size)
    return Geometry(spans, spans, causal)


def forward(job: Job, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """As :func:`cp_dispatch.schedules.ring.forward`."""
    query, key, value = to_pairs(job.ring, query, key, value)
    output, logsumexp = ring.forward(job, query, key, value)
    del query, key, value
    return tuple(to_natural(job.ring, output, logsumexp))


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
    *tensors, logsumexp = to_pairs(job.ring, grad_output, query, key, value, output, logsumexp)
    dq, dk, dv, grad_mask = ring.backward(job, *tensors, logsumexp, key_grad, mask_grad)
    del tensors, logsumexp
    if key_grad:
        dq, dk, dv = to_natural(job.ring, dq, dk, dv)
    else:
        (dq,) = to_natural(job.ring, dq)
    return dq, dk, dv, grad_mask
