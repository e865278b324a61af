"""Schedules: which rank computes which block when, and what travels.

A schedule has ``geometry``, ``forward`` and ``backward`` (see :mod:`cp_dispatch.schedules.ring`).
It reports its costs by ``transfers``, ``extra_bytes`` and ``blocks`` of a plan (see
:mod:`cp_dispatch.schedules.head_costs`; for rings and gathers they are in
:mod:`cp_dispatch.planning.collectives`). Its ``KnownCalls``, if any, repeats earlier calls cheaply
(see :mod:`known_call`). Forward and backward may have different schedules, because a backward needs
only the results of the forward.

To add a schedule, add it to ``SCHEDULES``. Unless it is for particular placements, add it to
``CHOICES`` too: it is then an option of ``enable(schedule=...)`` and runs every call, except where
rules in :mod:`cp_dispatch.planning.settle` exclude it.
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
