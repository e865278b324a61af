"""Windows of keys for the ring, which at hop h computes with the keys of the rank h places before.

Note [Windows]
~~~~~~~~~~~~~~
A *window* is the concatenation of the user's key blocks that contain some of an owner's positions.
Its keys are a buffer with as many rows; its columns are a subset of the mask's. A block on the
border of two owners is in the windows of both: rows that do not belong to the owner are hidden by a
mask of positions, and the block is never full.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from cp_dispatch.by_need.ownership import Ownership
from cp_dispatch.flex.mods import Pieces
from cp_dispatch.flex.needs import Needs, moves
from cp_dispatch.flex.rows import pack_rows, rows_of
from cp_dispatch.layouts import Span
from cp_dispatch.native.permute import span_indices

# The largest number of runs of positions per rank for which a ring is possible.
MAX_RUNS = 4


class Window(NamedTuple):
    """The key blocks of one owner.

    Attributes:
        blocks: the indices of the blocks.
        own: whether the owner owns the whole block.
        runs: the positions of the blocks, run by run.
        spans: the positions that the owner owns.
    """

    blocks: tuple[int, ...]
    own: tuple[bool, ...]
    runs: tuple[Span, ...]
    spans: tuple[Span, ...]

    @property
    def length(self) -> int:
        return sum(run.length for run in self.runs)

    @property
    def pieces(self) -> Pieces:
        """The map from keys of the window to positions."""
        starts, offsets, at = [], [], 0
        for position, length in self.runs:
            starts.append(at)
            offsets.append(position - at)
            at += length
        return Pieces(tuple(starts or [0]), tuple(offsets or [0]))

    def places(self, spans: tuple[Span, ...]) -> tuple[Span, ...]:
        """The places of positions in the window."""
        found, at = [], 0
        for position, length in self.runs:
            for start, count in spans:
                first, last = max(start, position), min(start + count, position + length)
                if first < last:
                    found.append(Span(at + first - position, last - first))
            at += length
        return tuple(found)


@functools.lru_cache(maxsize=256)
def window(keys: Ownership, owner: int, block: int) -> Window:
    """The window of an owner's keys; ``block`` is the number of keys of a block."""
    spans = keys.spans(owner)
    blocks = sorted(
        {i for position, n in spans for i in range(position // block, -(-(position + n) // block))}
    )
    runs: list[Span] = []
    own = []
    for i in blocks:
        start, stop = i * block, min((i + 1) * block, keys.length)
        if runs and sum(runs[-1]) == start:
            runs[-1] = Span(runs[-1].position, stop - runs[-1].position)
        else:
            runs.append(Span(start, stop - start))
        held = sum(max(0, min(stop, p + n) - max(start, p)) for p, n in spans)
        own.append(held == stop - start)
    return Window(tuple(blocks), tuple(own), tuple(runs), spans)


def fits(keys: Ownership) -> bool:
    """Whether every rank has keys, in few enough runs for windows."""
    ranks = range(keys.world_size)
    return keys.lanes == 1 and all(0 < len(keys.spans(rank)) <= MAX_RUNS for rank in ranks)


class Hop:
    """What one rank sends and receives at one hop."""

    def __init__(self, needs: Needs, keys: Ownership, rank: int, hop: int, block: int, device):
        size = keys.world_size
        table = moves(needs, keys)
        self.size, self.rank = size, rank
        self.owner, self.taker = (rank - hop) % size, (rank + hop) % size
        sent, came = table[rank][self.taker], table[self.owner][rank]
        self.window = window(keys, self.owner, block)
        self._shard = span_indices(sent.shard).to(device)
        self._places = span_indices(self.window.places(came.places)).to(device)
        #: Whether no rank computes anything at this hop; the same on all ranks.
        self.is_idle = not any(table[owner][(owner + hop) % size].rows for owner in range(size))

    def bring(self, group, key: Tensor, value: Tensor, into: Tensor) -> None:
        """Bring the owner's rows that this rank needs to their places in the window (rows, n)."""
        if self.is_idle:
            return
        rows = pack_rows([key, value], 1).index_select(0, self._shard)
        came = self._swap(group, rows, self.taker, self.owner, self._places.numel())
        into.index_copy_(0, self._places, came)

    def bring_back(self, group, grads: list[Tensor], into: list[Tensor]) -> None:
        """Send gradients (B, Hkv, window, D) of the owner's rows to the owner. Those that the taker
        computed for this rank's rows are added to ``into`` (rows, n)."""
        if self.is_idle:
            return
        columns = [total.size(1) for total in into]
        rows = [rows_of(grad, 1).index_select(0, self._places) for grad in grads]
        came = self._swap(group, torch.cat(rows, 1), self.owner, self.taker, self._shard.numel())
        for total, part in zip(into, came.split(columns, 1), strict=True):
            total.index_add_(0, self._shard, part.to(total.dtype))  # no row occurs twice

    def _swap(self, group, rows: Tensor, to: int, source: int, count: int) -> Tensor:
        if to == self.rank:
            return rows
        came = rows.new_empty((count, rows.size(1)))
        incoming, outgoing = [0] * self.size, [0] * self.size
        incoming[source] = came.numel() * came.element_size()
        outgoing[to] = rows.numel() * rows.element_size()
        dist.all_to_all_single(
            came.view(-1).view(torch.uint8), rows.view(-1).view(torch.uint8),
            incoming, outgoing, group=group,
        )  # fmt: skip
        return came
