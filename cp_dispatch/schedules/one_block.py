"""Schedules without moving keys, for when one side is already whole on every rank.

``ReplicatedKeys``: rows are sharded, every rank has all keys. A rank computes its rows and is
done; in the backward dK/dV are summed over the ranks.

``ReplicatedQueries``: every rank has all rows and its own keys, as in decoding against a sharded
cache. A rank computes what all rows see of its keys; one gather of outputs and logsumexp merges
them (flash decoding), and in the backward dQ is summed over the ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cp_dispatch.backends import Backend, wide_dtype
from cp_dispatch.layouts import Geometry, Span, chunk_spans
from cp_dispatch.merge import OutputAccumulator, token_major
from cp_dispatch.schedules.blocks import backward_block, forward_block
from cp_dispatch.schedules.comm import Ring
from cp_dispatch.schedules.gradients import QueryGradient, TravellingGradient


class _OneBlock:
    """Each rank computes one block: its rows, or all, with its keys, or all."""

    def __init__(self, queries_are_whole: bool):
        self.queries_are_whole = queries_are_whole

    def geometry(
        self, query_length: int, key_length: int, world_size: int, causal: bool
    ) -> Geometry:
        spans = [chunk_spans(n, world_size) for n in (query_length, key_length)]
        whole = 0 if self.queries_are_whole else 1
        spans[whole] = ((Span(0, (query_length, key_length)[whole]),),) * world_size
        return Geometry(*spans, causal)

    def forward(
        self,
        backend: Backend,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        geometry: Geometry,
        scale: float,
        ring: Ring | None,
    ) -> tuple[Tensor, Tensor]:
        """As :func:`cp_dispatch.schedules.ring.forward`."""
        tiles = self._tiles(geometry, ring, query)
        dtype = backend.output_dtype(query.dtype)
        merging = self.queries_are_whole and ring is not None
        wide = wide_dtype(query.dtype)
        result = OutputAccumulator(query, value.size(-1), len(tiles), wide if merging else dtype)
        forward_block(backend, query, key, value, mask, tiles, scale, result)
        output, logsumexp = result.finish()
        if not merging:
            return output, logsumexp
        result = OutputAccumulator(query, value.size(-1), ring.world_size, dtype)
        for part, part_lse in zip(
            ring.all_gather(output.transpose(1, 2)),
            ring.all_gather(logsumexp),
            strict=True,
        ):
            result.add(part.transpose(1, 2), part_lse, 0)
        return result.finish()

    def backward(
        self,
        backend: Backend,
        grad_output: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        output: Tensor,
        logsumexp: Tensor,
        mask: Tensor | None,
        geometry: Geometry,
        scale: float,
        ring: Ring | None,
        key_grad: bool,
        mask_grad: bool,
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        """As :func:`cp_dispatch.schedules.ring.backward`."""
        tiles = self._tiles(geometry, ring, query)
        wide = wide_dtype(query.dtype)
        query_grad = QueryGradient(query, len(tiles))
        grad_mask = mask.new_zeros(mask.shape, dtype=wide) if mask_grad else None
        shares = backward_block(
            backend, grad_output, query, key, value, output, logsumexp, mask, tiles, scale,
            query_grad, grad_mask,
        )  # fmt: skip
        dq = query_grad.finish()
        if self.queries_are_whole and ring is not None:
            dq = _summed(dq, ring, wide)
        if not key_grad:
            return dq, None, None, grad_mask
        home = TravellingGradient(key, value, geometry, None)
        home.add(shares)
        dk, dv = home.finish()
        if not self.queries_are_whole and ring is not None:
            dk, dv = _summed(dk, ring, wide), _summed(dv, ring, wide)
        return dq, dk, dv, grad_mask

    def _tiles(self, geometry: Geometry, ring: Ring | None, query: Tensor):
        rank = ring.rank if ring is not None else 0
        return geometry.tiles(rank, rank) if query.numel() else ()


def _summed(grad: Tensor, ring: Ring, wide: torch.dtype) -> Tensor:
    """The sum over the ranks, in the wide dtype and rounded once."""
    total = ring.all_reduce(token_major(*grad.shape, like=grad, dtype=wide).copy_(grad))
    return token_major(*grad.shape, like=grad).copy_(total)


ReplicatedKeys = _OneBlock(queries_are_whole=False)
ReplicatedQueries = _OneBlock(queries_are_whole=True)
