"""Predicts the pieces of a plan: kernels, merges, copies and transfers of one direction."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from cp_dispatch.backends import wide_dtype
from cp_dispatch.costs.constants import Constants

if TYPE_CHECKING:
    from cp_dispatch.plan import Plan


@dataclass(frozen=True)
class Links:
    """How ranks are connected: ``node`` ranks as measured, and nodes by one link per rank. For
    extrapolation; these numbers describe a cluster and are not measured."""

    node: int
    bandwidth: float
    latency: float


class Pieces:
    """One direction of one plan."""

    def __init__(
        self, plan: Plan, constants: Constants, links: Links | None, dim: int, direction: str
    ):
        self.plan, self.constants, self.links = plan, constants, links
        self.dim, self.direction = dim, direction
        self.backward = direction == "backward"
        # ``dim`` is one that was measured, at least those of the call.
        (batch, heads, _, own_dim), _, (_, _, _, value_dim) = plan.shards
        size = plan.dtype.itemsize
        self._heads = batch * heads
        #: Bytes of a position: query, output, key and value, and dK and dV as they travel.
        self.query_row = batch * heads * own_dim * size
        self.output_row = batch * heads * value_dim * size
        self.key_row = plan.key_row_bytes
        wide = wide_dtype(plan.dtype).itemsize
        self.sums_row = self.key_row // size * wide
        self._pairs = 2 * batch * heads * (own_dim + value_dim) * (2.5 if self.backward else 1)

    def kernels(self, tiles) -> float:
        """Seconds of tiles, one kernel call each."""
        return sum(self.kernel(x.query_length, x.key_length, x.causal) for x in tiles)

    def kernel(self, rows: int, keys: int, causal: bool, share: float = 1.0) -> float:
        """Seconds of one kernel call, with a share of the heads."""
        flops = self._pairs * rows * keys * share * (0.5 if causal else 1)
        name = f"{self.direction} causal" if causal else self.direction
        heads = self._heads * share
        return self.constants.kernel(self.plan.backend, self.dim, name, heads, flops)

    def merges(self, tiles, first: bool) -> float:
        """Seconds of merging results of tiles with earlier ones: outputs, or dQ."""
        curve = self.constants.copy if self.backward else self.constants.merge
        row = self.query_row if self.backward else self.output_row
        return sum(curve(tile.query_length * row) for tile in tiles[first:])

    def copy(self, size: float) -> float:
        return self.constants.copy(size)

    @property
    def pushed(self) -> bool:
        """Whether copy engines move what the plan's ranks send each other. A ring among groups has
        no mailboxes."""
        return self.plan.owners is None and self.pushes(self.plan.world_size)

    def push(self, size: float, otherwise: str) -> float:
        """Seconds of moving ``size`` bytes by copy engines, or by the collective otherwise used."""
        return self.move("push" if self.pushed else otherwise, size, self.plan.world_size)

    def move(self, name: str, size: float, ranks: int) -> float:
        """Seconds of moving ``size`` bytes to a rank from ``ranks - 1`` others (a shift: one)."""
        moves = self.constants.moves
        seconds = moves[name](size)
        if size <= 0 or not self._spans_nodes(ranks):
            return seconds
        links = self.links
        if name == "all_gather":  # once into each node, by the links of all its ranks
            outside = size * (1 - links.node / ranks) / links.node
        elif name == "shift":
            outside = size
        else:
            outside = size * (ranks - links.node) / (ranks - 1)
        return max(seconds, outside / links.bandwidth + links.latency)

    def pushes(self, ranks: int) -> bool:
        """Whether copy engines move what these ranks send each other."""
        return "push" in self.constants.moves and not self._spans_nodes(ranks)

    def _spans_nodes(self, ranks: int) -> bool:
        return self.links is not None and ranks > self.links.node

    def beside(self, compute: float, moving: float, pushed: bool = False) -> float:
        """Seconds of both at the same time. Copy engines take nothing from kernels."""
        if not moving or (pushed and self.pushed):
            return max(compute, moving)
        return max(compute + min(compute, moving) * (self.constants.slowdown - 1), moving)
