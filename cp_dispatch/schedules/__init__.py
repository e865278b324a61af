"""Who computes which block when, and what travels.

A schedule has ``geometry``, ``forward`` and ``backward`` (see :mod:`cp_dispatch.schedules.ring`),
and tells its costs: ``transfers``, ``extra_bytes`` and ``blocks`` of a plan (see
:mod:`cp_dispatch.schedules.head_costs`; of rings and gathers :mod:`cp_dispatch.report` knows them).
``KnownCalls`` of one makes calls again that were made before (see :mod:`known_call`).
Forward and backward may have two, for a backward needs nothing of a forward's but its results.
To add one, name it in ``SCHEDULES``; unless it is for particular placements, name it in
``CHOICES`` too, and it becomes a choice of ``enable(schedule=...)`` that takes every call, but for
what rules in :mod:`cp_dispatch.settle` keep from it.
"""

from cp_dispatch.schedules import mirrored_ring, one_call, ring
from cp_dispatch.schedules.gather import Gather
from cp_dispatch.schedules.head_groups import HeadGroups
from cp_dispatch.schedules.heads import Heads
from cp_dispatch.schedules.mirrored_gather import MirroredGather
from cp_dispatch.schedules.one_block import ReplicatedKeys, ReplicatedQueries


class _Schedules(dict):
    """Schedules by name; ``"hybrid:4:ring"`` shares heads among 4 ranks, with a ring across,
    ``"gather:4"`` gathers 4 groups of key heads one after the other."""

    def __missing__(self, name: str):
        if name.startswith(("gather:", "mirrored_gather:")):
            kind, groups = name.split(":")
            self[name] = found = HeadGroups(self[kind], int(groups))
            return found
        kind, ranks, across = name.split(":")
        if kind != "hybrid" or across not in ("ring", "mirrored_ring"):
            raise KeyError(name)
        self[name] = found = Heads(int(ranks), across, self[across])
        return found


SCHEDULES = _Schedules(
    {
        "ring": ring,
        "mirrored_ring": mirrored_ring,
        "gather": Gather,
        "mirrored_gather": MirroredGather,
        "one_call": one_call,
        "ulysses": Heads(),
        "replicated_keys": ReplicatedKeys,
        "replicated_queries": ReplicatedQueries,
    }
)
# "natural_ring" is "ring" that is never mirrored; "gather" is mirrored where it must be.
CHOICES = ("ring", "natural_ring", "mirrored_ring", "gather", "one_call", "ulysses", "hybrid")


def of_direction(name: str, backward: bool) -> str:
    """The name of a forward's or a backward's schedule; ``"gather+ulysses"`` names both."""
    forward, _, other = name.partition("+")
    return other if backward and other else forward


__all__ = ["CHOICES", "SCHEDULES", "of_direction"]
