"""What a schedule is asked to do, beside the tensors."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from cp_dispatch.backends import Backend
from cp_dispatch.dropout import Dropout
from cp_dispatch.layouts import Geometry
from cp_dispatch.schedules.comm import Ring


@dataclass(frozen=True)
class Job:
    """One call on one rank.

    Attributes:
        backend: the kernel.
        geometry: who owns which rows and keys, and the causal mask between them.
        scale: factor of the scores.
        ring: the ranks that share the sequence, None for one rank.
        mask: None, boolean or a bias; broadcasts to ``(B, H, this rank's rows, all keys)``.
        dropout: None, or whose coins fall how.
    """

    backend: Backend
    geometry: Geometry
    scale: float
    ring: Ring | None = None
    mask: Tensor | None = None
    dropout: Dropout | None = None

    @property
    def rank(self) -> int:
        """This rank's place in the ring."""
        return self.ring.rank if self.ring is not None else 0
