"""``Job``: the arguments of a schedule other than tensors."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cp_dispatch.backends import Backend
from cp_dispatch.dropout import Dropout
from cp_dispatch.layouts import Geometry, RowGeometry, Tile
from cp_dispatch.schedules.comm import Ring


@dataclass(frozen=True)
class Job:
    """One call on one rank.

    Attributes:
        backend: the kernel.
        geometry: who owns which rows and keys, and the causal mask between them.
        scale: factor of the scores, more than 0.
        sign: an additional factor of the query, 1, 0 or -1, for scales that are not positive.
        ring: the ranks that share the sequence, None for one rank.
        mask: None, boolean or a bias, ``(B or 1, H or 1, rows or 1, keys or 1)``. Its rows and keys
            are those of the whole sequence by original position, unless the next two say otherwise.
        own_rows: the mask has only this rank's rows.
        keys_in_place: the mask's keys are in the order of the shards.
        batch_start: this rank's first batch row.
        dropout: the dropout of the call, or None.
        key_grad_dtype: dtype of dK and dV, None for the keys' dtype. Wide if they have yet to be
            summed with those of other ranks.
        layout: the text of the balancer that defines the order of the shards, "" for natural order.
    """

    backend: Backend
    geometry: Geometry | RowGeometry
    scale: float
    ring: Ring | None = None
    mask: Tensor | None = None
    own_rows: bool = True
    keys_in_place: bool = False
    batch_start: int = 0
    dropout: Dropout | None = None
    key_grad_dtype: torch.dtype | None = None
    layout: str = ""
    sign: float = 1.0

    @property
    def rank(self) -> int:
        """This rank's place in the ring."""
        return self.ring.rank if self.ring is not None else 0

    def tiles(self, owner: int, query: Tensor) -> tuple[Tile, ...]:
        """The tiles that this rank computes with the keys of ``owner``; none if it has no rows."""
        if query.numel() == 0:
            return ()
        return self.geometry.tiles_of(self.rank, owner, self.batch_start, query.size(0))
