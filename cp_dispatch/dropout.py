"""Dropout that depends only on the (query, key) pair and a seed, not on ranks or kernels.

Note [Coins]
~~~~~~~~~~~~
A kernel's own random numbers depend on its launch: a ring would drop other pairs than one device,
and different ones for every number of ranks. Here the *coin* of a pair, which decides whether it is
dropped, is a hash of the call's seed and of the pair's *global* coordinates (batch, head, query
position, key position). So every schedule and world size drops the same pairs, the backward
recomputes the coins of the forward, and a checkpoint replays them because the seed comes from
torch's generator.

The hash is the finalizer of SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom
number generators", OOPSLA 2014), on int64 with wrap-around.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cp_dispatch.layouts import Tile, positions


@dataclass(frozen=True)
class Dropout:
    """Dropout of one call on one rank.

    Attributes:
        probability: of dropping a pair, in [0, 1].
        seed: int64 tensor of one element, on the inputs' device.
        batch_start, head_start: global index of this rank's first batch row and query head.
        heads, query_length: global sizes.
    """

    probability: float
    seed: Tensor
    batch_start: int
    head_start: int
    heads: int
    query_length: int

    def factors(
        self, tile: Tile, batch: int, heads: int, dtype: torch.dtype = torch.float32
    ) -> Tensor:
        """The factors of a tile's probabilities: 0 or ``1 / (1 - probability)``,
        ``(batch, heads, rows, keys)``."""
        device = self.seed.device

        def indices(start: int, count: int) -> Tensor:
            return torch.arange(start, start + count, device=device)

        row = indices(self.batch_start + (tile.row or 0), batch)[:, None] * self.heads
        row = (row + indices(self.head_start, heads))[:, :, None] * self.query_length
        row = row + positions(tile.query_spans, device)
        # Hashed twice, because the number of pairs of a long sequence could exceed 64 bits.
        stream = _mix(row + self.seed * _GOLDEN_GAMMA)
        pair = _mix(stream[..., None] + positions(tile.key_spans, device) * _GOLDEN_GAMMA)
        uniform = (pair >> 11 & (1 << 53) - 1).to(torch.float64) * 2.0**-53
        kept = uniform >= self.probability
        scale = 0.0 if self.probability >= 1.0 else 1.0 / (1.0 - self.probability)
        return kept.to(dtype) * scale


def _signed(constant: int) -> int:
    """The int64 of the same bits."""
    return constant - (1 << 64) if constant >= 1 << 63 else constant


_GOLDEN_GAMMA = _signed(0x9E3779B97F4A7C15)
_MIX_1 = _signed(0xBF58476D1CE4E5B9)
_MIX_2 = _signed(0x94D049BB133111EB)


def _mix(value: Tensor) -> Tensor:
    value = (value ^ _shift(value, 30)) * _MIX_1
    value = (value ^ _shift(value, 27)) * _MIX_2
    return value ^ _shift(value, 31)


def _shift(value: Tensor, bits: int) -> Tensor:
    """Logical shift to the right; ``>>`` of a signed integer copies the sign."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)
