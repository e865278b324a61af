"""Whether causal work in natural order is worth balancing, by a model of what it costs.

A natural-order ring takes as long as its last rank, which computes W - 1/2 blocks of a shard with a
shard where the mean is W / 2. The mirrored ring computes the mean and moves halves of query, key,
value and output once each.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cp_dispatch.schedules import mirrored_ring

if TYPE_CHECKING:
    from cp_dispatch.plan import Plan


@dataclass(frozen=True)
class Costs:
    """Rough speeds of a device: attention FLOP/s of 16-bit and of wider inputs, bytes/s that one
    rank sends to another, and seconds that an exchange takes beside its bytes."""

    flops: float
    wide_flops: float
    bandwidth: float
    latency: float


# H100: flash and cuDNN forward at 8k and 32k tokens (tools/results), NVLink send and receive of
# halves. CPU: one core of a server, gloo.
COSTS = {
    "cuda": Costs(flops=450e12, wide_flops=30e12, bandwidth=150e9, latency=100e-6),
    "cpu": Costs(flops=30e9, wide_flops=30e9, bandwidth=1e9, latency=1e-3),
}


def balanced(plan: Plan, wish: str, device_type: str) -> Plan:
    """A plan of a ring, mirrored where the user wishes it or, unless the wish is
    ``"natural_ring"``, where it pays; the reasons say so."""
    if plan.layout is not None or not plan.is_causal or plan.world_size == 1:
        return plan
    if wish == "natural_ring":
        return plan
    if not mirrored_ring.fits(plan.query_length, plan.key_length, plan.world_size):
        reason = (
            f"not balanced: {plan.query_length} queries and {plan.key_length} keys are not the "
            f"same multiple of 2 x {plan.world_size} ranks"
        )
        return dataclasses.replace(plan, reasons=(*plan.reasons, reason))
    saved, spent = estimates(plan, device_type)
    words = (
        f"balancing saves about {saved * 1e3:.3g} ms of a forward and costs {spent * 1e3:.3g} ms"
    )
    if saved <= spent and wish != "mirrored_ring":
        return dataclasses.replace(plan, reasons=(*plan.reasons, f"not balanced: {words}"))
    reason = f"half-shards are exchanged with the mirror rank: {words}"
    return dataclasses.replace(plan, schedule="mirrored_ring", reasons=(*plan.reasons, reason))


def estimates(plan: Plan, device_type: str) -> tuple[float, float]:
    """Seconds of a forward that balancing saves, and those that its exchanges take."""
    costs = COSTS[device_type]
    query, key, value = plan.shards
    rate = costs.flops if plan.dtype.itemsize == 2 else costs.wide_flops
    block = 2 * math.prod(query[:3]) * key[2] * (query[3] + value[3])
    saved = (plan.world_size - 1) / 2 * block / rate
    moved = math.prod(query) + math.prod(key) + math.prod(value) + math.prod(query[:3]) * value[3]
    spent = moved / 2 * plan.dtype.itemsize / costs.bandwidth + 2 * costs.latency
    return saved, spent
