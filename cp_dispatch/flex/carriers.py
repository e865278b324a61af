"""What carries groups of heads between ranks: collectives, or copy engines.

A carrier moves on the stream on which it is called, but for what it says of the current one.
"""

from __future__ import annotations

from torch import Tensor

from cp_dispatch.by_need.selector import Pairs
from cp_dispatch.flex.exchange import Exchange
from cp_dispatch.schedules.comm import Ring


class Collectives:
    """Moves by collectives of NCCL or gloo."""

    def __init__(self, exchange: Exchange, ring: Ring):
        self._exchange, self._group = exchange, ring.group

    def offer(self, parts: list[tuple[Tensor, Tensor]]) -> Pairs:
        """Where this rank's keys and values of each group are to be put besides the buffers, so
        that others get them; on the current stream, before :meth:`open`."""
        return []

    def open(self) -> None:
        """All groups are there to be fetched; on the current stream."""

    def fetch(self, group: int, buffer: Tensor) -> None:
        """The keys of others that this rank needs to the buffer, which has its own."""
        self._exchange.fetch(self._group, buffer)

    def room(self, group: int, like: Tensor, columns: int) -> Tensor:
        """Where the group's shares of gradients are to be staged, on the current stream."""
        shares = self._exchange.shares[self._exchange.rank]
        return like.new_empty((sum(shares), columns))

    def give(self, group: int, staged: Tensor, shards: list[Tensor]) -> None:
        """Staged shares to their owners; what comes is added to the shards."""
        self._exchange.give(self._group, staged, shards)
