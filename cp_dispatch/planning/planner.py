"""Chooses the schedule of a call by predicted time, if its kind of GPU has been measured."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch

from cp_dispatch.costs import Constants, Links, Prediction, constants_of, kind_of, predict
from cp_dispatch.planning.settle import COSTS, settle

if TYPE_CHECKING:
    from cp_dispatch.plan import Plan

# What "auto" chooses from.
WISHES = ("ring", "gather", "one_call", "ulysses", "hybrid")

#: Predicted times within this factor count as equal.
ALIKE = 1.005
#: Kernels of the first ones wait least often for other ranks, whose fluctuations are not predicted.
#: On 4 H200s, 32,768 tokens each, ring and gather had equal predictions; the ring took 2% longer.
FEWEST_MOVES = (
    "one_call", "gather", "mirrored_gather", "ulysses", "ring", "mirrored_ring", "hybrid",
)  # fmt: skip

#: Pairs of a forward's and a backward's schedule that may be faster than either alone, because only
#: a gather's backward moves shares of dK and dV. 8,192 tokens each on 2 H200s, forward and
#: backward, flash: in natural order 13.4 ms with a gather and 12.9 with such a pair; in head-tail
#: order 13.2 with a gather, 13.0 with a ring and 12.8 with a pair. (cuDNN: 7.9 with each.)
PAIRS = (("mirrored_gather", "ulysses"), ("gather", "ulysses"))
#: The first pair may take longer than its gather alone by this factor, for less memory: in natural
#: order a gather's backward also holds the mirror's halves of four tensors. With 32,768 tokens on
#: each of 4 ranks it holds 2,680 MiB, a backward by heads 2,188 (cuDNN).
SMALLER = 1.02


def constants_here(device_type: str) -> Constants | None:
    """The constants of this rank's kind of GPU. Ranks of one group must have the same kind, as
    torch's choice of a kernel requires too, and the same file of constants; ``CP_DISPATCH_DEBUG=1``
    checks both."""
    if device_type != "cuda":
        return None
    return constants_of(kind_of(torch.cuda.get_device_name()))


def choose(
    plan: Plan,
    wish: str,
    device_type: str,
    masked: bool,
    own_rows: bool,
    constants: Constants | None,
    training: bool,
) -> Plan:
    """The plan of a ring's call with its schedule.

    For ``"auto"``, with constants and without a mask: the schedule with the least predicted time
    among those that are affordable. If several are predicted to be about as fast, the one with the
    fewest moves, then the one with the least memory. Otherwise by :func:`settle`'s rules.

    ``training`` counts the backward too. Symbolic lengths are not predicted: it would guard them.
    """
    settled = settle(plan, wish, device_type, masked, own_rows)
    if wish != "auto" or constants is None or masked or plan.world_size == 1:
        return settled
    if not plan.has_lengths:
        return settled
    ring = settle(plan, "ring", device_type)
    found = [
        (candidate, prediction)
        for candidate, prediction in alternatives(plan, device_type, own_rows, constants)
        if _is_affordable(candidate, ring, device_type)
        and (training or not candidate.backward_schedule)
    ]
    if not found:
        return settled
    least = min(_seconds(prediction, training) for _, prediction in found)
    alike = [x for x in found if _seconds(x[1], training) <= least * ALIKE]
    best, prediction = min(
        alike, key=lambda x: (FEWEST_MOVES.index(x[0].schedule), max(x[0].extra_bytes()))
    )
    smaller = _smaller(best, _seconds(prediction, training), found)
    best, prediction = smaller or (best, prediction)
    words = f"predicted {prediction.forward * 1e3:.3g} ms forward"
    if training:
        words += f", {prediction.backward * 1e3:.3g} ms backward"
    why = f"the fastest of {len(found)} schedules"
    if smaller:
        why = f"little more than {why}, and less memory"
    elif len(alike) > 1:
        why = (
            f"of {len(alike)} schedules that are predicted to be about as fast, the one with the "
            "fewest moves, then the least memory"
        )
    reason = f"{words} (constants of {constants.device}): {why}"
    return dataclasses.replace(best, reasons=(*best.reasons, reason))


def alternatives(
    plan: Plan, device_type: str, own_rows: bool, constants: Constants, links: Links | None = None
) -> list[tuple[Plan, Prediction]]:
    """Every schedule that the plan of a ring's call can have, with its predicted time."""
    found: dict[str, tuple[Plan, Prediction]] = {}
    for wish in ("natural_ring", "mirrored_ring", *WISHES):
        candidate = settle(plan, wish, device_type, own_rows=own_rows)
        if candidate.op_schedule not in found:
            prediction = predict(candidate, constants, links)
            if prediction is not None:
                found[candidate.op_schedule] = candidate, prediction
    for pair in PAIRS:
        if all(name in found for name in pair):
            candidate = of_two(*(found[name][0] for name in pair))
            found[candidate.op_schedule] = candidate, predict(candidate, constants, links)
    return list(found.values())


def of_two(first: Plan, second: Plan) -> Plan:
    """A plan with the first plan's forward and the second one's backward."""
    reason = f"the backward exchanges heads: {second.reasons[-1]}"
    return dataclasses.replace(
        first, backward_schedule=second.schedule, reasons=(*first.reasons, reason)
    )


def with_predictions(plan: Plan, device_type: str) -> Plan:
    """The settled plan of a call without a mask, with the predicted times of every schedule and, if
    it is another one (a hybrid of chosen groups), of its own."""
    constants = constants_here(device_type)
    if constants is None or plan.world_size == 1 or not plan.can_choose:
        return plan
    ring = dataclasses.replace(
        plan, schedule="ring", backward_schedule="", head_ranks=1, head_groups=1, across="",
        reasons=(),
    )  # fmt: skip
    found = alternatives(ring, device_type, False, constants)
    if all(x.op_schedule != plan.op_schedule for x, _ in found):
        own = predict(plan, constants)
        found += [(plan, own)] if own is not None else []
    return dataclasses.replace(
        plan, predictions=tuple((x.op_schedule, *prediction) for x, prediction in found)
    )


def _smaller(best: Plan, seconds: float, found) -> tuple[Plan, Prediction] | None:
    """See ``SMALLER``; of ``found``, which has no pairs where the backward does not count."""
    if best.op_schedule != PAIRS[0][0]:
        return None
    for plan, prediction in found:
        if plan.op_schedule == "+".join(PAIRS[0]) and sum(prediction) <= seconds * SMALLER:
            return plan, prediction
    return None


def _seconds(prediction: Prediction, training: bool) -> float:
    return prediction.forward + (prediction.backward if training else 0.0)


def _is_affordable(plan: Plan, ring: Plan, device_type: str) -> bool:
    """Whether a schedule's memory exceeds a ring's by at most what is allowed for a gather."""
    more = max(x - y for x, y in zip(plan.extra_bytes(), ring.extra_bytes(), strict=True))
    gathered = plan.key_row_bytes * plan.key_length if "gather" in plan.schedule else 0
    return max(more, gathered) <= COSTS[device_type].gather_bytes
