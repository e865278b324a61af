"""One kernel call on every rank, for shards so short that the host's time dominates.

Every rank sends its keys to all others, which arrange them in natural order (:mod:`prefix_plan`)
and compute all their rows at once: one exchange, one kernel, no merge. Nothing overlaps, causal
work in natural order is not balanced, and each prefix takes memory; as long as shards are short,
all of that costs less than a launch. The backward is one kernel too; it sends the shares of dK and
dV to the keys' owners like a gather (:mod:`key_shares`).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from torch import Tensor

from cp_dispatch.errors import ContextParallelError
from cp_dispatch.layouts import Geometry, laid_out
from cp_dispatch.native.merge import to_token_major, token_major
from cp_dispatch.schedules.gradients import KeyShare
from cp_dispatch.schedules.job import Job
from cp_dispatch.schedules.key_shares import KeyShares
from cp_dispatch.schedules.known_call import KnownCalls
from cp_dispatch.schedules.prefix_keys import prefix_keys
from cp_dispatch.schedules.prefix_plan import (
    gradient_parcels,
    most_keys,
    prefix_parcels,
    prefixes_of,
)
from cp_dispatch.schedules.ranges import part
from cp_dispatch.schedules.transfer import Transfer

if TYPE_CHECKING:
    from cp_dispatch.plan import Plan

__all__ = ["KnownCalls", "backward", "blocks", "extra_bytes", "forward", "geometry", "transfers"]

geometry = laid_out


def forward(job: Job, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """As :func:`cp_dispatch.schedules.ring.forward`.

    Raises:
        ContextParallelError: a mask or dropout, which no plan lets through.
    """
    if job.mask is not None or job.dropout is not None or job.ring is None:
        raise ContextParallelError(
            "the schedule one_call supports neither attn_mask nor dropout and needs several ranks; "
            f"given: attn_mask {job.mask is not None}, dropout {job.dropout is not None}, several "
            f'ranks {job.ring is not None}. Call the op with "ring"'
        )
    if _is_empty(query):
        dtype, lse_dtype = (
            x(query.dtype) for x in (job.backend.output_dtype, job.backend.logsumexp_dtype)
        )
        out = token_major(*query.shape[:3], value.size(3), like=query, dtype=dtype)
        return out, query.new_empty(query.shape[:3], dtype=lse_dtype)
    keys = prefix_keys(key, value, job.geometry, job.ring)
    with part("one_call"):
        there = keys.come()
        if job.geometry.causal:
            prefixes = prefixes_of(job.geometry, job.rank)
            out, lse = job.backend.prefix_forward(query, *there, prefixes, job.scale)
        else:
            out, lse = job.backend.forward(query, *there, None, False, job.scale)
        keys.release()
    lse = lse.to(job.backend.logsumexp_dtype(query.dtype)).contiguous()
    return to_token_major(out, job.backend.output_dtype(query.dtype)), lse


def backward(
    job: Job,
    grad_output: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    logsumexp: Tensor,
    key_grad: bool,
    mask_grad: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """As :func:`cp_dispatch.schedules.ring.backward`; there is no mask."""
    if _is_empty(query):
        dq, dk, dv = (token_major(*x.shape, like=x) for x in (query, key, value))
        return (dq, dk, dv, None) if key_grad else (dq, None, None, None)
    keys = prefix_keys(key, value, job.geometry, job.ring)
    sums = None
    if key_grad:
        dtype = job.backend.gradient_dtype(key.dtype)
        sums = KeyShares(key, value, job.geometry, job.ring, dtype, gradient_parcels)
        sums.open()
    prefixes = prefixes_of(job.geometry, job.rank)
    with part("one_call_backward"):
        inputs = grad_output, query, *keys.come(), output, logsumexp
        if job.geometry.causal:
            dq, dk, dv = job.backend.prefix_backward(*inputs, prefixes, job.scale)
        else:
            dq, dk, dv, _ = job.backend.backward(*inputs, None, False, job.scale)
        keys.release()
    if sums is None:
        return to_token_major(dq, query.dtype), None, None, None
    sums.start([KeyShare(dk, dv, 0, None)])
    del dk, dv
    dq = to_token_major(dq, query.dtype)
    return dq, *sums.finish({}), None


def _is_empty(query: Tensor) -> bool:
    """Whether all ranks of the ring have no batch row or no head, which kernels refuse."""
    return 0 in query.shape[:2]


# -- What it costs, see cp_dispatch.planning.collectives ------------------------------------------


def transfers(plan: Plan, rank: int) -> tuple[list[Transfer], list[Transfer]]:
    """The collectives of a forward and of a backward."""
    _, key, _ = plan.shards
    keys = Transfer("all_gather", "key, value", plan.key_row_bytes * key[2])
    owners = (owner for owner in range(plan.world_size) if owner != rank)
    rows = sum(x.length for owner in owners for x in prefix_parcels(plan.geometry, rank, owner))
    size = rows * plan.key_row_bytes // plan.dtype.itemsize * plan.gradient_itemsize
    return [keys], [keys, Transfer("all_to_all", "dK, dV", size)]


def extra_bytes(plan: Plan) -> tuple[int, int]:
    """As :func:`cp_dispatch.planning.collectives.extra_bytes`: the keys as they arrive and as
    prefixes; in a backward also their gradients as the kernel returns them, as they are sent and as
    they arrive."""
    query, _, value = plan.padded_shards
    ranks = range(plan.world_size)
    owned = sum(map(plan.geometry.key_length, ranks)) * plan.key_row_bytes
    seen = most_keys(plan.geometry) * plan.key_row_bytes
    rows = math.prod(query[:3])
    output = rows * value[3] * plan.output_itemsize + rows * plan.lse_itemsize
    sums = 3 * seen // plan.dtype.itemsize * plan.gradient_itemsize
    dq = math.prod(query) * plan.dtype.itemsize
    return owned + seen + 2 * output, owned + seen + sums + 2 * dq


def blocks(plan: Plan, rank: int) -> tuple[int, int]:
    """The number of blocks that ``rank`` computes, and the number of all its blocks."""
    found: Geometry = plan.geometry
    owners = range(plan.world_size)
    return sum(found.sees(rank, owner) for owner in owners), len(owners)
