"""Who computes which block when, and what travels.

A schedule has ``geometry``, ``forward`` and ``backward`` (see :mod:`cp_dispatch.schedules.ring`).
To add one, name it in ``SCHEDULES``; unless it is for particular placements, name it in
``CHOICES`` too, and it becomes a choice of ``enable(schedule=...)``.
"""

from cp_dispatch.schedules import mirrored_ring, ring
from cp_dispatch.schedules.gather import Gather, MirroredGather
from cp_dispatch.schedules.one_block import ReplicatedKeys, ReplicatedQueries

SCHEDULES = {
    "ring": ring,
    "mirrored_ring": mirrored_ring,
    "gather": Gather,
    "mirrored_gather": MirroredGather,
    "replicated_keys": ReplicatedKeys,
    "replicated_queries": ReplicatedQueries,
}
# "natural_ring" is "ring" that is never mirrored; "gather" is mirrored where it must be.
CHOICES = ("ring", "natural_ring", "mirrored_ring", "gather")

__all__ = ["CHOICES", "SCHEDULES"]
