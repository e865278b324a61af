"""The collectives that a plan consists of, the bytes that it holds, and the blocks it computes."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

from cp_dispatch.backends import wide_dtype
from cp_dispatch.schedules import SCHEDULES
from cp_dispatch.schedules.gather_plan import parcels_of, plan_of
from cp_dispatch.schedules.mirrored_gather import parcels_before
from cp_dispatch.schedules.transfer import Transfer

if TYPE_CHECKING:
    from cp_dispatch.plan import Plan


RINGS = ("ring", "mirrored_ring")
GATHERS = ("gather", "mirrored_gather")


def _one_group(plan: Plan) -> Plan:
    """A plan of one of the groups of heads."""
    shards = tuple((b, h // plan.head_groups, *rest) for b, h, *rest in plan.shards)
    return dataclasses.replace(plan, head_groups=1, shards=shards)


def forward_transfers(plan: Plan, rank: int) -> list[Transfer]:
    """The collectives of one forward on ``rank``, in order."""
    if plan.head_groups > 1:
        return forward_transfers(_one_group(plan), rank) * plan.head_groups
    schedule = SCHEDULES[plan.schedule_name]
    if hasattr(schedule, "transfers"):
        return schedule.transfers(plan, rank)[0]
    query, key, value = plan.padded_shards
    if plan.world_size == 1 or plan.schedule == "replicated_keys":
        return []
    if plan.schedule == "replicated_queries":
        rows = math.prod(query[:3])
        return [
            Transfer("all_gather", "output", rows * value[3] * plan.output_itemsize),
            Transfer("all_gather", "logsumexp", rows * plan.lse_itemsize),
        ]
    back = _exchange(plan, rank, "halves of output, logsumexp", *_outputs(plan))
    if plan.schedule == "mirrored_gather":
        halves = _exchange(plan, rank, "halves of query", _inputs(plan)[0])
        return _shared_rows(plan, rank, halves, back, [])
    if plan.schedule == "gather":
        return _gathers(plan)
    moves = _key_moves(plan, rank)
    if plan.schedule == "mirrored_ring":
        halves = _exchange(plan, rank, "halves of query, key, value", *_inputs(plan))
        moves = [halves, *moves, back]
    return moves


def backward_transfers(plan: Plan, rank: int) -> list[Transfer]:
    """The collectives of one backward on ``rank`` when all inputs need gradients."""
    plan = plan.of_backward
    if plan.head_groups > 1:
        return backward_transfers(_one_group(plan), rank) * plan.head_groups
    schedule = SCHEDULES[plan.schedule_name]
    if hasattr(schedule, "transfers"):
        return schedule.transfers(plan, rank)[1]
    query, key, value = plan.padded_shards
    wide = wide_dtype(plan.dtype).itemsize
    if plan.world_size == 1:
        return []
    if plan.schedule == "replicated_keys":
        return [
            Transfer("all_reduce", what, math.prod(shape) * wide)
            for what, shape in (("dK", key), ("dV", value))
        ]
    if plan.schedule == "replicated_queries":
        return [Transfer("all_reduce", "dQ", math.prod(query) * wide)]
    outputs = *_outputs(plan), _outputs(plan)[0]
    if plan.schedule in GATHERS:
        gathers = _gathers(plan)
        sums = [Transfer("all_to_all", "dK, dV", _shares_sent(plan, rank))]
        if plan.schedule == "gather":
            return gathers + sums
        what = "halves of query, output, its gradient, logsumexp"
        there = _exchange(plan, rank, what, _inputs(plan)[0], *outputs)
        dq = _inputs(plan)[0] // plan.dtype.itemsize * plan.gradient_itemsize
        return _shared_rows(plan, rank, there, _exchange(plan, rank, "halves of dQ", dq), sums)
    row = plan.key_row_bytes // plan.dtype.itemsize
    transfers = _key_moves(plan, rank)
    for hop in range(plan.world_size):
        # Sums travel wide; the last move, home, in the inputs' dtype.
        last = hop == plan.world_size - 1 and not plan.wide_key_grads
        size = plan.dtype.itemsize if last else wide
        length = plan.geometry.key_length((rank - hop) % plan.world_size)
        transfers.append(Transfer("all_to_all", "dK, dV", row * length * size))
    if plan.schedule == "mirrored_ring":
        what = "halves of query, key, value, output, its gradient, logsumexp"
        there = _exchange(plan, rank, what, *_inputs(plan), *outputs)
        dq, *dkv = _inputs(plan)
        if plan.wide_key_grads:
            dkv = [size // plan.dtype.itemsize * wide for size in dkv]
        back = _exchange(plan, rank, "halves of dQ, dK, dV", dq, *dkv)
        return [there, *transfers, back]
    return transfers


def _shared_rows(plan: Plan, rank: int, there, back, sums: list[Transfer]) -> list[Transfer]:
    """The collectives of a mirrored gather. No keys are before those of rank 0, whose rows stay."""
    if rank == 0:
        there = there._replace(bytes=0)
    if rank == plan.world_size - 1:
        back = back._replace(bytes=0)
    return [there, *_gathers(plan), back, *sums]


def _key_moves(plan: Plan, rank: int) -> list[Transfer]:
    return [
        Transfer("all_to_all", "key, value", plan.key_row_bytes * length)
        for length in _rows_sent(plan, rank)
    ]


def _gathers(plan: Plan) -> list[Transfer]:
    _, key, _ = plan.shards
    pieces = plan_of(plan.geometry, 0).pieces
    size = plan.key_row_bytes * key[2] // pieces
    return [Transfer("all_gather", "key, value", size)] * pieces


def _shares_sent(plan: Plan, rank: int) -> int:
    """Bytes of dK and dV that a rank sends to the owners of gathered keys."""
    parcels = parcels_before if plan.schedule == "mirrored_gather" else parcels_of
    owners = (owner for owner in range(plan.world_size) if owner != rank)
    rows = sum(x.length for owner in owners for x in parcels(plan.geometry, rank, owner))
    return rows * plan.key_row_bytes // plan.dtype.itemsize * plan.gradient_itemsize


def _inputs(plan: Plan) -> tuple[int, ...]:
    """Bytes of a rank's query, key and value."""
    return tuple(math.prod(shape) * plan.dtype.itemsize for shape in plan.padded_shards)


def _outputs(plan: Plan) -> tuple[int, int]:
    """Bytes of a rank's output, in the kernel's dtype, and logsumexp."""
    query, _, value = plan.padded_shards
    rows = math.prod(query[:3])
    return rows * value[3] * plan.kernel_itemsize, rows * plan.lse_itemsize


def _exchange(plan: Plan, rank: int, what: str, *parts: int) -> Transfer:
    """Half of each part goes to the mirror rank; each starts at a multiple of 16 bytes."""
    size = 0 if 2 * rank == plan.world_size - 1 else sum(-(-part // 32) * 16 for part in parts)
    return Transfer("all_to_all", what, size)


def extra_bytes(plan: Plan) -> tuple[int, int]:
    """Approximate peak bytes of a forward and of a backward on a full rank, without inputs and
    kernels' workspaces: results of kernels, accumulators, buffers in transit. (Many tiles at one
    hop hold a little more.)"""
    if plan.backward_schedule:
        return extra_bytes(plan.of_forward)[0], extra_bytes(plan.of_backward)[1]
    schedule = SCHEDULES[plan.schedule_name]
    if hasattr(schedule, "extra_bytes"):
        return schedule.extra_bytes(plan)
    query, key, value = plan.padded_shards
    narrow, wide = plan.dtype.itemsize, plan.output_itemsize
    rows, output = math.prod(query[:3]), math.prod(query[:3]) * value[3]
    dq, dkv = math.prod(query), math.prod(key) + math.prod(value)
    if plan.head_groups > 1:
        forward, backward = extra_bytes(_one_group(plan))
        whole = output * plan.kernel_itemsize + rows * plan.lse_itemsize
        return forward + whole, backward + (dq + dkv) * narrow
    kernel = output * (wide if wide == 8 else narrow) + rows * plan.lse_itemsize
    kernel_grads = (dq + dkv) * narrow
    if plan.world_size == 1:
        return 2 * kernel, kernel_grads + dq * narrow + dkv * (narrow + wide)
    # A partial output held, one that a kernel gives, and where both are merged.
    merging = 2 * kernel + output * wide + rows * plan.lse_itemsize
    summing = kernel_grads + dq * (narrow + wide) + dkv * narrow
    if plan.schedule in GATHERS:
        # The message and the gathered keys, and in the backward beside them their gradients as the
        # kernels give them; then these, as they are sent and as they come, where keys were.
        gathered = (plan.world_size + 1) * dkv * narrow
        # Halves of rows as they are sent and as they come.
        exchanged = (dq + output * 2) * narrow * (plan.schedule != "gather")
        shares = plan.world_size * dkv * plan.gradient_itemsize
        moving = max(gathered + shares, 3 * shares)
        return gathered + merging + exchanged, moving + summing + exchanged
    if plan.schedule in RINGS:
        in_flight = 2 * dkv * narrow if plan.geometry.key_transitions else 0
        forward, backward = in_flight + merging, in_flight + 2 * dkv * wide + summing
        if plan.schedule == "mirrored_ring":
            # Copies of the inputs in the order that is computed, and a message of half as much.
            forward += (dq + dkv) * narrow * 2
            backward += (dq + dkv + 2 * output) * narrow * 2
        return forward, backward
    if plan.schedule == "replicated_keys":
        return 2 * kernel, kernel_grads + dq * narrow + dkv * (narrow + wide)
    gathered = plan.world_size * (output + rows) * wide
    return kernel + gathered + output * wide, kernel_grads + dq * (narrow + wide) + dkv * wide


def blocks(plan: Plan, rank: int) -> tuple[int, int]:
    """The number of blocks that ``rank`` computes, and of all blocks for it."""
    schedule = SCHEDULES[plan.schedule if plan.head_groups > 1 else plan.schedule_name]
    if hasattr(schedule, "blocks"):
        return schedule.blocks(plan, rank)
    everyone = plan.schedule in RINGS + GATHERS
    owners = range(plan.world_size) if everyone else (rank,)
    return sum(plan.geometry.sees(rank, owner) for owner in owners), len(owners)


def _rows_sent(plan: Plan, rank: int) -> list[int]:
    """Key rows that ``rank`` sends in each move of a ring."""
    geometry = plan.geometry
    owners = [(rank - hop) % plan.world_size for hop in range(geometry.key_transitions)]
    return [
        geometry.key_length(owner) if geometry.last_hop(owner) > hop else 0
        for hop, owner in enumerate(owners)
    ]
