"""Schedules that move no keys, because query or keys are whole on every rank.

``ReplicatedKeys``: rows are sharded, and every rank has all keys. A rank computes its rows; the
backward sums dK and dV over the ranks.

``ReplicatedQueries``: every rank has all rows and its own keys, as in decoding with a sharded
cache. A rank computes all rows with its own keys. Outputs and logsumexp are gathered and merged, as
Flash-Decoding does over splits of the keys; the backward sums dQ over the ranks.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from cp_dispatch.backends import wide_dtype
from cp_dispatch.layouts import Geometry, RowGeometry, Span, Tile, chunk_spans, of_spans
from cp_dispatch.native.merge import token_major
from cp_dispatch.schedules.accumulate import OutputAccumulator, QueryGradient
from cp_dispatch.schedules.blocks import Rows, backward_block, forward_block
from cp_dispatch.schedules.comm import Ring
from cp_dispatch.schedules.gradients import TravellingGradient, mask_gradient
from cp_dispatch.schedules.job import Job


class _OneBlock:
    """Each rank computes one block: its own rows, or all rows, with its own keys, or all keys."""

    def __init__(self, queries_are_whole: bool):
        self.queries_are_whole = queries_are_whole

    def geometry(
        self, query_length: int, key_length: int, ring_shape: tuple[int, ...], causal: bool, layout
    ) -> Geometry | RowGeometry:
        """Whole tensors are in natural order, sharded ones in the layout's."""
        ranks = math.prod(ring_shape)
        whole = ((Span(0, query_length if self.queries_are_whole else key_length),),) * ranks
        if layout is not None:
            pair = (whole, None) if self.queries_are_whole else (None, whole)
            return of_spans(layout, *pair, causal)
        if self.queries_are_whole:
            return Geometry(whole, chunk_spans(key_length, ring_shape), causal)
        return Geometry(chunk_spans(query_length, ring_shape), whole, causal)

    def forward(self, job: Job, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """As :func:`cp_dispatch.schedules.ring.forward`."""
        tiles = job.tiles(job.rank, query)
        dtype = job.backend.output_dtype(query.dtype)
        merging = self.queries_are_whole and job.ring is not None
        lse_dtype = job.backend.logsumexp_dtype(query.dtype)
        own_dtype = wide_dtype(dtype) if merging else dtype
        result = OutputAccumulator(query, value.size(-1), tiles, own_dtype, lse_dtype)
        forward_block(job, query, key, value, tiles, result)
        output, logsumexp = result.finish()
        if not merging:
            return output, logsumexp
        rows = Tile(0, query.size(2), 0, 0, False)
        every = [rows] * job.ring.world_size
        result = OutputAccumulator(query, value.size(-1), every, dtype, lse_dtype)
        parts = job.ring.all_gather(output.transpose(1, 2)), job.ring.all_gather(logsumexp)
        for part, part_lse in zip(*parts, strict=True):
            result.add(part.transpose(1, 2), part_lse, rows)
        return result.finish()

    def backward(
        self,
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
        tiles = job.tiles(job.rank, query)
        summing_queries = self.queries_are_whole and job.ring is not None
        summing_keys = not self.queries_are_whole and job.ring is not None
        # The sum over the ranks is rounded only once, so its parts stay wide.
        wide = wide_dtype(query.dtype) if summing_queries else None
        query_grad = QueryGradient(query, tiles, wide)
        grad_mask = mask_gradient(job.mask, query.dtype) if mask_grad else None
        rows = Rows(grad_output, query, output, logsumexp)
        shares = backward_block(job, rows, key, value, tiles, query_grad, grad_mask)
        dq = query_grad.finish()
        if summing_queries:
            dq = _summed(dq, query.dtype, job.ring)
        if not key_grad:
            return dq, None, None, grad_mask
        own = TravellingGradient(key, value, job.geometry, job.rank, None)
        own.add(shares)
        if summing_keys:
            dk, dv = (_summed(x, key.dtype, job.ring) for x in own.wide_views())
        else:
            dk, dv = own.finish()
        return dq, dk, dv, grad_mask


def _summed(wide: Tensor, dtype: torch.dtype, ring: Ring) -> Tensor:
    """The sum over the ranks of a wide, token-major tensor, rounded once."""
    ring.all_reduce(wide.transpose(1, 2))
    return token_major(*wide.shape, like=wide, dtype=dtype).copy_(wide)


ReplicatedKeys = _OneBlock(queries_are_whole=False)
ReplicatedQueries = _OneBlock(queries_are_whole=True)
