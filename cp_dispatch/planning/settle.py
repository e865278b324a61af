"""Chooses a schedule by rules, from the user's choice and a rough model of costs.

- A causal ring in natural order takes as long as its last rank, which computes W - 1/2 blocks (a
  shard of queries with a shard of keys), where the mean is W / 2. A mirrored schedule computes the
  mean, and moves halves of query and output (a ring: of key and value too) once each.
- Exchanging heads balances everything, but needs at least as many query heads as ranks.
- A ring of W hops has W kernels, merges and waits, each with a fixed cost. A gather has three
  kernels, but holds all keys and, in the backward, their gradients, as well as what a kernel
  holds of scores or masks.
- If shards are so short that launches take longer than kernels, all keys are gathered for one
  kernel call on each rank, balanced or not. Kernels that cannot do that gather without the mirror
  rank.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cp_dispatch.backends import BACKENDS
from cp_dispatch.options import head_ranks
from cp_dispatch.schedules import gather_plan, mirror, prefix_plan
from cp_dispatch.schedules.head_groups import groups_for
from cp_dispatch.schedules.head_shares import are_alike
from cp_dispatch.schedules.mailboxes import LARGEST

if TYPE_CHECKING:
    from cp_dispatch.plan import Plan


@dataclass(frozen=True)
class Costs:
    """Rough speeds of a device: attention FLOP/s of 16-bit and of wider inputs, bytes/s from one
    rank to another, seconds of an exchange without its bytes, and the largest number of bytes of
    gathered keys for which a gather replaces a ring."""

    flops: float
    wide_flops: float
    bandwidth: float
    latency: float
    gather_bytes: int


# H100: flash and cuDNN forward at 8k and 32k tokens (tools/results), NVLink send and receive of
# halves; the gather was as fast or faster at both, and takes 1 GiB at 64k tokens of 8 key heads on
# 4 ranks. CPU: one core of a server, gloo, where kernels are slow enough for any schedule.
COSTS = {
    "cuda": Costs(450e12, 30e12, 150e9, 100e-6, gather_bytes=2**30),
    "cpu": Costs(30e9, 30e9, 1e9, 1e-3, gather_bytes=0),
}
# Exchanges, kernels and merges that a forward is made of.
_ONE_CALLS, _GATHER_CALLS, _MIRRORED_CALLS = 2, 4, 8
# GPUs of a node, whose links an all-to-all wants; what connects nodes carries a ring's keys.
_NODE = 8


def settle(
    plan: Plan, wish: str, device_type: str, masked: bool = False, own_rows: bool = False
) -> Plan:
    """The plan of a ring with the chosen schedule, and the reasons for it.

    ``own_rows``: each rank has only its own rows of the mask.
    """
    if plan.world_size == 1 or wish == "natural_ring":
        return plan
    if wish == "ulysses":
        return _by_heads(plan, plan.world_size, device_type, own_rows)
    if wish.startswith("hybrid"):
        ranks = head_ranks(wish) or _group_size(plan)
        if ranks == plan.world_size:
            plan = _with(
                plan, f"not hybrid: the group that shares heads would be all {ranks} ranks"
            )
        elif ranks == 1:
            plan = _with(plan, "not hybrid: a group of one rank has no heads to share")
        return _by_heads(plan, ranks, device_type, own_rows)
    if wish == "gather":
        return _gathered(plan)
    if wish == "one_call":
        return _in_one_call(plan, masked, device_type)
    if wish == "auto" and not masked and _gather_is_affordable(plan, device_type):
        if _is_short(plan, device_type):
            return _in_one_call(plan, masked, device_type)
        found = _stays_unbalanced(plan, device_type) or _gathered(plan)
        if found.schedule != "ring":
            return found
    if wish in ("auto", "ring", "mirrored_ring"):
        return _balanced(plan, wish, device_type)
    return _with(plan, f'"{wish}" runs every call: no rule restricts it', wish)


def _gathered(plan: Plan) -> Plan:
    if plan.is_causal and plan.layout is None:
        if mirror.fits(plan.query_length, plan.key_length, plan.world_size):
            reason = (
                '"gather" in natural order: half-shards of query and output are exchanged with the '
                "mirror rank"
            )
            return _in_groups(_with(plan, reason, "mirrored_gather"))
    elif gather_plan.fits(plan.geometry):
        return _in_groups(_with(plan, "all keys are gathered: few large kernels", "gather"))
    reason = "not gathered: the ranks own different numbers or lengths of spans of keys"
    return _with(plan, reason)


def _in_groups(plan: Plan) -> Plan:
    """Split a gather with too many keys for one buffer into groups of key heads."""
    _, (_, key_heads, length, _), _ = plan.shards
    size = plan.key_row_bytes * length * plan.world_size
    groups = groups_for(key_heads, size, LARGEST)
    if groups == 1:
        return plan
    words = (
        f"{groups} groups of key heads one after the other, because all keys and values are "
        f"{size / 2**20:.0f} MiB"
    )
    return dataclasses.replace(_with(plan, words), head_groups=groups)


def _in_one_call(plan: Plan, masked: bool, device_type: str) -> Plan:
    against = prefix_plan.reasons_against(plan.geometry, BACKENDS[plan.backend])
    if masked:
        against.insert(0, "the call has a mask or dropout")
    if against:
        return _balanced(_with(plan, f"not in one call: {'; '.join(against)}"), "ring", device_type)
    return _with(plan, "all keys are gathered for one kernel call on each rank", "one_call")


def _is_short(plan: Plan, device_type: str) -> bool:
    """Whether a single kernel call pays: unbalanced work and transfers that nothing overlaps must
    take less time than the calls that the host saves."""
    if not plan.has_lengths:
        return False
    if prefix_plan.reasons_against(plan.geometry, BACKENDS[plan.backend]):
        return False
    costs = COSTS[device_type]
    exposed = prefix_plan.most_keys(plan.geometry) * plan.key_row_bytes / costs.bandwidth
    others = _MIRRORED_CALLS if plan.is_causal and plan.layout is None else _GATHER_CALLS
    saved = (others - _ONE_CALLS) * costs.latency
    return _unbalanced_seconds(plan, device_type) + exposed <= saved


def _stays_unbalanced(plan: Plan, device_type: str) -> Plan | None:
    """A gather in natural order without balancing, if the exchanges with the mirror rank would cost
    more than they save; else None."""
    natural = plan.is_causal and plan.layout is None
    if not natural or not plan.has_lengths or not gather_plan.fits(plan.geometry):
        return None
    saved = _unbalanced_seconds(plan, device_type)
    spent = (_MIRRORED_CALLS - _GATHER_CALLS) * COSTS[device_type].latency
    if saved > spent:
        return None
    words = f"would save about {saved * 1e3:.3g} ms of a forward and cost {spent * 1e3:.3g} ms"
    reason = f"all keys are gathered; not balanced with the mirror rank: that {words}"
    return _with(plan, reason, "gather")


def _unbalanced_seconds(plan: Plan, device_type: str) -> float:
    """How much longer than the mean the rank with the most work computes, in a forward."""
    query, key, _ = plan.shards
    pair = _block_seconds(plan, device_type) / max(1, query[2] * key[2])
    ranks = range(plan.world_size)
    pairs = [prefix_plan.pairs_of(plan.geometry, rank) for rank in ranks]
    return (max(pairs) - sum(pairs) / len(pairs)) * pair


def _group_size(plan: Plan) -> int:
    """How many ranks share heads: those of the last mesh dim if there are several, else the largest
    proper divisor of the number of ranks that the heads allow."""
    if len(plan.ring_shape) > 1:
        return plan.ring_shape[-1]
    ranks = plan.world_size
    parts = [n for n in range(2, min(_NODE, ranks - 1) + 1) if ranks % n == 0]
    (_, heads, _, _), (_, key_heads, _, _), _ = plan.shards
    # Preferably without sending a key head to several ranks.
    fits = [n for n in parts if key_heads % n == 0] or [
        n for n in parts if heads >= n and are_alike(heads, key_heads, n)
    ]
    return max(fits, default=ranks)


def _by_heads(plan: Plan, ranks: int, device_type: str, own_rows: bool) -> Plan:
    """Exchange heads among ``ranks`` ranks, with a ring across; only a ring if that is not
    possible."""
    (batch, heads, *_), (_, key_heads, *_), _ = plan.shards
    against = []
    if plan.world_size % ranks:
        against.append(f"{plan.world_size} ranks cannot be divided into groups of {ranks}")
    if heads < ranks:
        against.append(f"a rank has {heads} query heads, fewer than the {ranks} ranks")
    elif ranks < plan.world_size and not are_alike(heads, key_heads, ranks):
        against.append(
            f"with {heads} query and {key_heads} key heads, some of {ranks} ranks would call "
            "kernels, and with them rings, more often than others"
        )
    if own_rows:
        against.append(
            "a mask that differs by row would have to be moved, and every rank would hold all rows"
        )
    if against:
        plan = _with(plan, f"heads are not exchanged: {'; '.join(against)}")
        return _balanced(plan, "ring", device_type)
    if ranks == plan.world_size:
        return _with(plan, _words_of_heads(heads, key_heads, ranks), "ulysses")
    if ranks == 1:
        return _balanced(plan, "ring", device_type)
    across = _across(plan, ranks, device_type)
    settled = _with(plan, _words_of_heads(heads, key_heads, ranks), "hybrid")
    return dataclasses.replace(
        settled,
        reasons=(*settled.reasons, *across.reasons),
        head_ranks=ranks,
        across=across.schedule,
    )


def _words_of_heads(heads: int, key_heads: int, ranks: int) -> str:
    shares = [(r + 1) * heads // ranks - r * heads // ranks for r in range(ranks)]
    many = f"{min(shares)} to {max(shares)}" if len(set(shares)) > 1 else f"{shares[0]}"
    words = f"{many} of {heads} query heads on each of {ranks} ranks"
    if key_heads % ranks:
        words += f"; some of the {key_heads} key heads go to several ranks"
    return words


def _across(plan: Plan, ranks: int, device_type: str) -> Plan:
    """The ring across groups of ``ranks`` ranks, as a separate plan."""
    shards = tuple(
        (shape[0], -(-shape[1] // ranks), shape[2] * ranks, shape[3]) for shape in plan.shards
    )
    coarse = dataclasses.replace(
        plan, ring_shape=(plan.world_size // ranks,), shards=shards, reasons=()
    )
    if plan.is_causal and plan.layout is None and plan.query_length % plan.world_size:
        return _with(coarse, "not balanced: the groups' shards differ in length")
    return _balanced(coarse, "ring", device_type)


def _balanced(plan: Plan, wish: str, device_type: str) -> Plan:
    if plan.layout is not None or not plan.is_causal:
        if wish == "mirrored_ring":
            return _with(plan, "nothing to balance: the call is not causal, or is in a layout")
        return plan
    if not mirror.fits(plan.query_length, plan.key_length, plan.world_size):
        return _with(
            plan,
            f"not balanced: {plan.query_length} queries and {plan.key_length} keys are not the "
            f"same multiple of 2 x {plan.world_size} ranks",
        )
    saved, spent = estimates(plan, device_type)
    if saved <= spent and wish != "mirrored_ring":
        words = f"would save about {saved * 1e3:.3g} ms of a forward and cost {spent * 1e3:.3g} ms"
        return _with(plan, f"not balanced with the mirror rank: that {words}")
    words = f"saves about {saved * 1e3:.3g} ms of a forward, costs {spent * 1e3:.3g} ms"
    reason = f"balanced by exchanging half-shards with the mirror rank: {words}"
    return _with(plan, reason, "mirrored_ring")


def _with(plan: Plan, reason: str, schedule: str | None = None) -> Plan:
    return dataclasses.replace(
        plan, schedule=schedule or plan.schedule, reasons=(*plan.reasons, reason)
    )


def _gather_is_affordable(plan: Plan, device_type: str) -> bool:
    """Whether the keys of all ranks are few enough to be gathered.

    Some kernels hold the scores of a tile, others the tile's part of a mask. A gather's tiles are W
    times as large as a ring's, so neither is affordable.
    """
    if BACKENDS[plan.backend].holds_scores:
        return False
    _, key, _ = plan.shards
    gathered = plan.key_row_bytes * key[2] * plan.world_size
    return gathered <= COSTS[device_type].gather_bytes


def _block_seconds(plan: Plan, device_type: str) -> float:
    """Seconds of a forward of one shard of queries with one shard of keys."""
    costs = COSTS[device_type]
    query, key, value = plan.shards
    rate = costs.flops if plan.dtype.itemsize == 2 else costs.wide_flops
    return 2 * math.prod(query[:3]) * key[2] * (query[3] + value[3]) / rate


def estimates(plan: Plan, device_type: str) -> tuple[float, float]:
    """Seconds that balancing a ring saves in a forward, and seconds that its exchanges take."""
    costs = COSTS[device_type]
    query, key, value = plan.shards
    saved = (plan.world_size - 1) / 2 * _block_seconds(plan, device_type)
    moved = math.prod(query) + math.prod(key) + math.prod(value) + math.prod(query[:3]) * value[3]
    spent = moved / 2 * plan.dtype.itemsize / costs.bandwidth + 2 * costs.latency
    return saved, spent
