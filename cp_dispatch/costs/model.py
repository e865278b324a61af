"""Predicts how long a plan's forward and backward take, from the constants of a kind of GPU.

A schedule consists of a few phases. In each, the kernels of the compute stream overlap with the
transfers of the other stream, and the longer of the two counts. A rank's time is the sum of its
phases; the call's is that of the slowest rank. Calls with little work take as long as the host and
the latencies, the measured floor. The model leaves out contention between ranks, power limits and
other work.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from cp_dispatch.costs.constants import Constants
from cp_dispatch.costs.phases import PHASES
from cp_dispatch.costs.pieces import Links, Pieces
from cp_dispatch.schedules import SCHEDULES

if TYPE_CHECKING:
    from cp_dispatch.plan import Plan


#: How much longer head exchanges take that are not known calls, while those of the floors are
#: (:mod:`~cp_dispatch.schedules.known_heads`): mean of three kernels on 2 and 4 H200s, 2.1 to 2.5
#: and 1.4 to 1.7.
WHOLE_WAY = {"forward": 2.2, "backward": 1.5}


class Prediction(NamedTuple):
    """Seconds."""

    forward: float
    backward: float


def predict(plan: Plan, constants: Constants, links: Links | None = None) -> Prediction | None:
    """Predicted seconds of a plan that cp_dispatch handles; None if there are no constants for its
    kernel, or if its schedule is not one of those that can be chosen."""
    kernels = constants.kernels.get(plan.backend, {})
    dim = max(plan.shards[0][3], plan.shards[2][3])
    fitting = sorted(d for d in kernels if d >= dim)
    if plan.schedule not in PHASES or plan.dtype.itemsize != 2 or not fitting:
        return None
    found = []
    for direction, one in (("forward", plan.of_forward), ("backward", plan.of_backward)):
        model = Pieces(one, constants, links, fitting[0], direction)
        seconds = max(PHASES[one.schedule](model, rank) for rank in _looked_at(one.world_size))
        found.append(max(seconds, _host(one, constants, direction, bool(plan.backward_schedule))))
    return Prediction(*found)


def _host(plan: Plan, constants: Constants, direction: str, is_of_two: bool) -> float:
    """Seconds of the host and of latencies; ``is_of_two``: the other direction has a different
    schedule."""
    floor, schedule = _floor(plan, constants, direction), SCHEDULES[plan.schedule_name]
    if not hasattr(schedule, "messages"):
        return floor
    # Each stage is as much for the host as a call of one.
    messages = schedule.messages(plan, 0, direction == "backward")
    # A hybrid's floor is of what its calls are: never known.
    is_like_floors = plan.schedule == "hybrid" or (messages.are_known and not is_of_two)
    return floor * len(messages.stages) * (1.0 if is_like_floors else WHOLE_WAY[direction])


def _floor(plan: Plan, constants: Constants, direction: str) -> float:
    """Seconds of a call with almost no work. A hybrid, which two ranks cannot run, takes as long as
    both of its schedules."""
    found = constants.floor(plan.schedule, direction, plan.world_size)
    if found or plan.schedule != "hybrid":
        return found
    heads, across = (
        constants.floor(name, direction, plan.world_size) for name in ("ulysses", plan.across)
    )
    return heads * WHOLE_WAY[direction] + across


def _looked_at(ranks: int) -> list[int]:
    """The ranks whose time is computed: all if they are few, else those at the ends and in the
    middle."""
    if ranks <= 16:
        return list(range(ranks))
    return [0, 1, ranks // 2, ranks - 2, ranks - 1]
