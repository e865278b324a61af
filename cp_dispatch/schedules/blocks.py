"""Runs the tiles of one block, forward and backward, for every schedule."""

from __future__ import annotations

from torch import Tensor

from cp_dispatch.backends import wide_dtype
from cp_dispatch.layouts import Tile, selector
from cp_dispatch.schedules.accumulate import OutputAccumulator, QueryGradient
from cp_dispatch.schedules.gradients import KeyShare
from cp_dispatch.schedules.job import Job


def forward_block(
    job: Job,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    tiles: tuple[Tile, ...],
    result: OutputAccumulator,
) -> None:
    """Compute the rows with one shard of keys and merge the partial output into ``result``."""
    for tile in tiles:
        tile_query = _rows(query, tile)
        out, lse = job.backend.forward(
            tile_query,
            _keys(key, tile),
            _keys(value, tile),
            _mask_tile(job, job.mask, tile),
            tile.causal,
            job.scale,
            _dropout_factors(job, tile_query, tile),
        )
        result.add(out, lse, tile)
        del out, lse  # so that the next kernel can reuse their memory


class Rows:
    """A backward's tensors with one row for each query, cut to the rows of tiles. Several tiles may
    have the same rows, and a view takes the host as long as a small op, so each cut is made
    once."""

    def __init__(self, grad_output: Tensor, query: Tensor, output: Tensor, logsumexp: Tensor):
        self.tensors = grad_output, query, output, logsumexp
        self._cuts: dict[tuple[int | None, int, int], list[Tensor]] = {}

    def of(self, tile: Tile) -> list[Tensor]:
        """The tensors of the constructor, in its order, with the tile's rows."""
        window = tile.row, tile.query_start, tile.query_length
        found = self._cuts.get(window)
        if found is None:
            found = self._cuts[window] = [_rows(x, tile) for x in self.tensors]
        return found


def backward_block(
    job: Job,
    rows: Rows,
    key: Tensor,
    value: Tensor,
    tiles: tuple[Tile, ...],
    query_grad: QueryGradient,
    mask_grad: Tensor | None,
) -> list[KeyShare]:
    """Add to dQ and the bias's gradient; return this block's shares of dK and dV."""
    shares = []
    for tile in tiles:
        grad_output, query, output, logsumexp = rows.of(tile)
        dq, dk, dv, dbias = job.backend.backward(
            grad_output,
            query,
            _keys(key, tile),
            _keys(value, tile),
            output,
            logsumexp,
            _mask_tile(job, job.mask, tile),
            tile.causal,
            job.scale,
            _dropout_factors(job, query, tile),
            mask_grad is not None,
        )
        query_grad.add(dq, tile)
        shares.append(KeyShare(dk, dv, tile.key_start, tile.row))
        if mask_grad is not None:
            _add_mask_tile(job, mask_grad, tile, dbias)
        del dq, dbias
    return shares


def batch(row: int | None) -> slice:
    """The batch rows of a tile."""
    return slice(None) if row is None else slice(row, row + 1)


def _rows(tensor: Tensor, tile: Tile) -> Tensor:
    return _window(tensor, tile, tile.query_start, tile.query_length)


def _keys(tensor: Tensor, tile: Tile) -> Tensor:
    return _window(tensor, tile, tile.key_start, tile.key_length)


def _window(tensor: Tensor, tile: Tile, start: int, length: int) -> Tensor:
    # A narrow takes a third of the host time of an index.
    if tile.row is not None:
        tensor = tensor.narrow(0, tile.row, 1)
    return tensor if tensor.size(2) == length else tensor.narrow(2, start, length)


def _mask_index(job: Job, mask: Tensor, tile: Tile) -> tuple[slice | Tensor, ...]:
    """The index of the tile's part in each dim of the mask; dims of size 1 stay whole."""
    everything = slice(None)
    rows = columns = everything
    if mask.size(2) > 1 and job.own_rows:
        rows = slice(tile.query_start, tile.query_start + tile.query_length)
    elif mask.size(2) > 1:
        rows = selector(tile.query_spans, mask.device)
    if mask.size(3) > 1 and job.keys_in_place:
        columns = slice(tile.key_place, tile.key_place + tile.key_length)
    elif mask.size(3) > 1:
        columns = selector(tile.key_spans, mask.device)
    return batch(tile.row) if mask.size(0) > 1 else everything, everything, rows, columns


def _mask_tile(job: Job, mask: Tensor | None, tile: Tile) -> Tensor | None:
    if mask is None:
        return None
    *outer, rows, columns = _mask_index(job, mask, tile)
    part = mask[tuple(outer)]
    part = part[:, :, rows] if isinstance(rows, slice) else part.index_select(2, rows)
    return part[..., columns] if isinstance(columns, slice) else part.index_select(3, columns)


def _add_mask_tile(job: Job, mask_grad: Tensor, tile: Tile, share: Tensor) -> None:
    *outer, rows, columns = _mask_index(job, mask_grad, tile)
    part = mask_grad[tuple(outer)]
    if isinstance(rows, slice):
        part, rows = part[:, :, rows], None
    if isinstance(columns, slice):
        part, columns = part[..., columns], None
    shape = list(part.shape)
    for dim, index in ((2, rows), (3, columns)):
        if index is not None:
            shape[dim] = index.numel()
    share = share.sum_to_size(shape)
    if rows is None and columns is None:
        part.add_(share)
    elif columns is None:
        part.index_add_(2, rows, share.to(part.dtype))
    elif rows is None:
        part.index_add_(3, columns, share.to(part.dtype))
    else:
        part[:, :, rows[:, None], columns] += share


def _dropout_factors(job: Job, query: Tensor, tile: Tile) -> Tensor | None:
    if job.dropout is None:
        return None
    return job.dropout.factors(tile, query.size(0), query.size(1), wide_dtype(query.dtype))
