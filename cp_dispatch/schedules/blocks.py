"""What every schedule does with the block at hand: its tiles, forward and backward."""

from __future__ import annotations

from torch import Tensor

from cp_dispatch.layouts import Tile
from cp_dispatch.merge import OutputAccumulator
from cp_dispatch.schedules.gradients import QueryGradient
from cp_dispatch.schedules.job import Job


def forward_block(
    job: Job,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    tiles: tuple[Tile, ...],
    result: OutputAccumulator,
) -> None:
    """Merge into ``result`` what the rows see of one shard of keys."""
    for tile in tiles:
        rows, columns = _slices(tile)
        out, lse = job.backend.forward(
            query[:, :, rows],
            key[:, :, columns],
            value[:, :, columns],
            _mask_tile(job.mask, tile),
            tile.causal,
            job.scale,
            _dropout_factors(job, query, tile),
        )
        result.add(out, lse, tile.query_start)


def backward_block(
    job: Job,
    grad_output: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    logsumexp: Tensor,
    tiles: tuple[Tile, ...],
    query_grad: QueryGradient,
    mask_grad: Tensor | None,
) -> list[tuple[Tensor, Tensor, int]]:
    """Add to dQ and the bias's gradient; return ``(dk, dv, first key row)`` for each tile."""
    shares = []
    for tile in tiles:
        rows, columns = _slices(tile)
        dq, dk, dv, dbias = job.backend.backward(
            grad_output[:, :, rows],
            query[:, :, rows],
            key[:, :, columns],
            value[:, :, columns],
            output[:, :, rows],
            logsumexp[:, :, rows],
            _mask_tile(job.mask, tile),
            tile.causal,
            job.scale,
            _dropout_factors(job, query, tile),
            mask_grad is not None,
        )
        query_grad.add(dq, tile.query_start)
        shares.append((dk, dv, tile.key_start))
        if mask_grad is not None:
            part = _mask_tile(mask_grad, tile)
            part.add_(dbias.sum_to_size(part.shape))
    return shares


def _slices(tile: Tile) -> tuple[slice, slice]:
    rows = slice(tile.query_start, tile.query_start + tile.query_length)
    return rows, slice(tile.key_start, tile.key_start + tile.key_length)


def _mask_tile(mask: Tensor | None, tile: Tile) -> Tensor | None:
    """The tile's part of a mask that has this rank's rows and all columns; dims of 1 stay."""
    if mask is None:
        return None
    if mask.size(2) > 1:
        mask = mask[:, :, tile.query_start : tile.query_start + tile.query_length]
    if mask.size(3) > 1:
        mask = mask[..., tile.key_position : tile.key_position + tile.key_length]
    return mask


def _dropout_factors(job: Job, query: Tensor, tile: Tile) -> Tensor | None:
    if job.dropout is None:
        return None
    return job.dropout.factors(tile, query.size(0), query.size(1))
