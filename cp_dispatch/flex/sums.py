"""Sums the shares of the gradients of one rank's keys.

The shares come from the rank itself and from the ranks that took its keys, in runs of rows. If runs
begin and end in few places, they are summed in place, with one launch for each stretch of rows with
the same sources (:mod:`cp_dispatch.native.parts`). Orders of scattered blocks have so many
stretches that the launches would take the host longer than it takes a GPU to copy the rank's own
rows next to the others; then all rows are summed in one launch, in the same order and with the same
rounding.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cp_dispatch.by_need.selector import Pairs, Selector
from cp_dispatch.flex.needs import Move
from cp_dispatch.native.permute import span_indices

#: With more stretches, or runs, than this they are summed row by row.
MOST_STRETCHES, MOST_RUNS = 8, 32


class Sums:
    """The sums for a rank with ``rows`` rows in a single lane; ``moved`` are the moves of its rows.

    The rank itself comes first, then its takers in ascending order.
    """

    def __init__(self, moved: Sequence[Move], rank: int, rows: int, device: torch.device):
        takers = [moved[rank], *(move for move in moved if move.taker != rank)]
        places: list[tuple[int, int, int]] = []
        for move in takers:
            at = 0
            for start, place, count in move.pieces:
                places.append((start, count, place if move.taker == rank else at))
                at += count
        #: For each run of rows, its place in the shard, its length and its place in its source, for
        #: :func:`~cp_dispatch.native.parts.add_up`. The rank's own rows are among all positions; a
        #: taker's rows follow each other in ascending order.
        self.places = tuple(places)
        #: The same if the rank's own rows are already in the shard.
        self.places_in_place = (
            *((start, count, start) for start, _, count in takers[0].pieces),
            *self.places[len(takers[0].pieces) :],
        )
        self._own = takers[0].pieces
        #: The number of runs of each taker.
        self.counts = {move.taker: len(move.pieces) for move in takers}
        edges = {0, rows}.union(*((start, start + count) for start, count, _ in self.places))
        #: Set if the runs are summed row by row.
        self.by_row: RowSums | None = None
        if len(edges) > MOST_STRETCHES + 1 or len(self.places) > MOST_RUNS:
            self.by_row = RowSums(takers, rows, device)

    def own_in_place(self, parts: Sequence[Tensor], grads: Sequence[Tensor]) -> Pairs:
        """The places in this rank's ``grads`` (B, H, L, D) of the rows that it computed itself,
        with their values in ``parts`` (B, H, positions, D)."""
        return [
            (grad.narrow(2, start, count), part.narrow(2, place, count))
            for grad, part in zip(grads, parts, strict=True)
            for start, place, count in self._own
        ]


class RowSums:
    """Sums over the rows of one tensor that holds the rank's own rows, then those of each taker."""

    def __init__(self, takers: Sequence[Move], rows: int, device: torch.device):
        own, *others = takers
        self._own, self._own_rows = Selector(own.places, device), own.rows
        self._starts: dict[int, int] = {}
        self.rows = own.rows
        for move in others:
            self._starts[move.taker] = self.rows
            self.rows += move.rows
        into = [span_indices(move.shard) for move in takers]
        counts = torch.bincount(torch.cat(into), minlength=rows)
        offsets = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
        # The same as a stable sort of all rows, but faster.
        order, free, at = into[0].new_empty(self.rows), offsets[:-1].clone(), 0
        for index in into:
            places = free[index]
            order[places] = torch.arange(at, at + index.numel(), device="cpu")
            free[index] = places + 1
            at += index.numel()
        self.order, self.offsets = order.to(device), offsets.to(device)

    def of(self, taker: int, gathered: Tensor, count: int) -> Tensor:
        """The place of a taker's rows in the tensor."""
        return gathered.narrow(0, self._starts[taker], count)

    def own_into(self, gathered: Sequence[Tensor], parts: Sequence[Tensor]) -> Pairs:
        """This rank's own rows of ``parts`` (positions, ...), with their places in columns of the
        tensor."""
        pairs: Pairs = []
        for into, part in zip(gathered, parts, strict=True):
            pairs += self._own.taken_into(into[: self._own_rows], part)
        return pairs
