"""Carriers move groups of heads between ranks, by collectives or by copy engines.

A carrier works on the stream on which it is called, except where it mentions the current stream.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cp_dispatch.backends import wide_dtype
from cp_dispatch.by_need.copies import copy_all
from cp_dispatch.by_need.selector import Pairs
from cp_dispatch.flex.exchange import Exchange
from cp_dispatch.flex.rows import rows_of, split_rows
from cp_dispatch.schedules.comm import Ring


class Collectives:
    """Moves by collectives of NCCL or gloo."""

    def __init__(self, exchange: Exchange, ring: Ring):
        self._exchange, self._group = exchange, ring.group

    def offer(self, key: Tensor, value: Tensor) -> Pairs:
        """The places, in addition to the buffer, where this rank's keys and values of a group must
        be copied so that other ranks get them; on the current stream."""
        return []

    def fetch(self, buffer: Tensor) -> None:
        """Fetch the keys of other ranks that this rank needs into the buffer, which has its own."""
        self._exchange.fetch(self._group, buffer)

    def put_aside(self, parts: Sequence[Tensor], grads: Sequence[Tensor]) -> list[Tensor]:
        """Save what :meth:`give` needs of ``parts``, the gradients of a group's keys of all
        positions, because :meth:`give` does not read ``parts``; on the current stream."""
        exchange = self._exchange
        rows, sums = kept_wide(exchange, parts, grads)
        shares = exchange.shares[exchange.rank]
        staged = rows[0].new_empty((sum(shares), sum(x.size(1) for x in rows)))
        copy_all(exchange.stage(rows, staged))
        return [staged, *sums]

    def give(self, aside: list[Tensor], grads: Sequence[Tensor]) -> None:
        """Send shares of gradients to their owners, and write the sums for this rank's keys to
        ``grads`` ``(B, H, L, D)``."""
        staged, *sums = aside
        self._exchange.give(self._group, staged, [x.flatten(2).flatten(0, 1) for x in sums])
        finish_wide(sums, grads)


def kept_wide(
    exchange: Exchange, parts: Sequence[Tensor], grads: Sequence[Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    """The parts as rows, and wide sums ``(lanes, L, B / lanes, H, D)`` that start with this rank's
    own shares. The takers' shares are added to them later."""
    lanes = exchange.keys.lanes
    rows = [rows_of(x, lanes) for x in parts]
    sums = []
    for x in grads:
        batch, heads, length, dim = x.shape
        wide = wide_dtype(x.dtype) if exchange.adds_up else x.dtype
        shape = lanes, length, batch // lanes, heads, dim
        sums.append(torch.empty(shape, dtype=wide, device=x.device))
    exchange.keep(rows, [x.flatten(2).flatten(0, 1) for x in sums])
    return rows, sums


def finish_wide(sums: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
    """Round the sums into ``grads``."""
    for grad, total in zip(grads, sums, strict=True):
        grad.copy_(split_rows(total, [grad.size(3)])[0])
