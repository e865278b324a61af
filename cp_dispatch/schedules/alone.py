"""The schedule of a sequence that one rank holds: no transfers, and results as kernels return
them."""

from __future__ import annotations

from torch import Tensor

from cp_dispatch.schedules.accumulate import OutputAccumulator, QueryGradient
from cp_dispatch.schedules.blocks import Rows, backward_block, forward_block
from cp_dispatch.schedules.gradients import TravellingGradient, mask_gradient
from cp_dispatch.schedules.job import Job


def forward(job: Job, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """As :func:`cp_dispatch.schedules.ring.forward`, with a geometry of one rank."""
    tiles = job.tiles(0, query)
    dtype = job.backend.output_dtype(query.dtype)
    lse_dtype = job.backend.logsumexp_dtype(query.dtype)
    result = OutputAccumulator(query, value.size(-1), tiles, dtype, lse_dtype)
    forward_block(job, query, key, value, tiles, result)
    return result.finish()


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
    """As :func:`cp_dispatch.schedules.ring.backward`, with a geometry of one rank. dK and dV are in
    the kernel's dtype if one call returns all of them."""
    tiles = job.tiles(0, query)
    query_grad = QueryGradient(query, tiles)
    grad_mask = mask_gradient(job.mask, query.dtype) if mask_grad else None
    rows = Rows(grad_output, query, output, logsumexp)
    shares = backward_block(job, rows, key, value, tiles, query_grad, grad_mask)
    dq = query_grad.finish()
    if not key_grad:
        return dq, None, None, grad_mask
    if len(shares) == 1 and shares[0].dk.shape == key.shape:
        return dq, shares[0].dk, shares[0].dv, grad_mask
    total = TravellingGradient(key, value, job.geometry, 0, None, job.key_grad_dtype)
    total.add(shares)
    return dq, *total.finish(), grad_mask
