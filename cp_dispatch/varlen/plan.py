"""Makes the plan of a ``varlen_attn`` call: how it runs, or every reason why not."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from torch.distributed.tensor import DTensor

from cp_dispatch._compat import dtensor_spec, is_tracing
from cp_dispatch.bounded import keep
from cp_dispatch.by_need.plan import PlanByNeed
from cp_dispatch.call import sharded_dims
from cp_dispatch.layouts import Balancer
from cp_dispatch.options import Options
from cp_dispatch.varlen.call import VarlenCall
from cp_dispatch.varlen.refusal import refusals

EXCHANGE = "each rank is sent only the keys that its rows attend, for one kernel call"


@dataclass(frozen=True)
class VarlenPlan(PlanByNeed):
    """How one call of ``varlen_attn`` is handled.

    Attributes:
        handler: ``"cp_dispatch"``, ``"stock"`` (unmodified torch) or ``"refused"``.
        schedule: ``"exchange"``: ranks send each other the keys that their rows attend.
            ``"local"``: the sequence is not sharded.
        layout: the order of the shards, None for natural order.
        mesh_dims: mesh dims whose ranks share the sequence; ``ring_shape`` has their sizes.
        key_row_bytes: bytes of one position of key and value on a rank.
        reasons: why this plan was made; for ``"refused"`` all the reasons, each with what to do.
        rows_sent: key rows that each rank sends in a forward; None unless the documents were read
            (:func:`cp_dispatch.explain_varlen`).
        call: the call in words.
    """

    handler: str
    schedule: str | None = None
    layout: Balancer | None = None
    mesh_dims: tuple[int, ...] = ()
    ring_shape: tuple[int, ...] = ()
    key_row_bytes: int = 0
    reasons: tuple[str, ...] = ()
    rows_sent: tuple[int, ...] | None = None
    call: str = field(default="", compare=False)

    def __str__(self) -> str:
        words = self._words_of_others("varlen_attn")
        if words is not None:
            return words
        lines = self._head("varlen_attn")
        for rank, rows in enumerate(self.rows_sent or ()):
            size = self.bytes_sent(rank) / 2**20
            lines.append(f"  rank {rank} sends {rows} rows of keys, {size:.3f} MiB forward")
        return "\n".join([*lines, *self._why])


_plans: dict[tuple, VarlenPlan] = {}
_MOST_PLANS = 256


def known_plan(options: Options, call: VarlenCall) -> VarlenPlan:
    """:func:`make_plan`, which takes 0.1 ms, or its cached plan for an earlier call like this
    one."""
    tensors = call.tensors.values()
    if is_tracing() or not all(isinstance(x, DTensor) for x in tensors):
        return make_plan(options, call)
    starts = tuple(
        (type(x), getattr(x, "dtype", None), getattr(x, "shape", None), _placements(x))
        for x in call.starts.values()
    )
    rest = call.window_size and tuple(call.window_size), call.is_causal
    unsupported = call.seqused_k is None, call.block_table is None, call.num_splits
    key = (options, *map(dtensor_spec, tensors), starts, rest, *unsupported)
    plan = _plans.get(key)
    if plan is None:
        plan = make_plan(options, call)
        if plan.handler != "refused":
            keep(_plans, key, plan, _MOST_PLANS)
    return plan


def _placements(x):
    return tuple(x.placements) if isinstance(x, DTensor) else None


def make_plan(options: Options, call: VarlenCall) -> VarlenPlan:
    """Plan a call that involves a DTensor, without reading any data."""
    reasons = refusals(call, options.layout)
    if reasons:
        return VarlenPlan("refused", reasons=tuple(reasons))
    mesh, ring = call.query.device_mesh, sharded_dims(call.query, 0)
    schedule, why = "exchange", [EXCHANGE]
    if not ring:
        schedule, why = "local", ["the sequence is not sharded"]
    elif options.schedule not in ("auto", "gather"):
        why.append(f"schedule={options.schedule!r} does not apply: varlen_attn has only this one")
    sharers = math.prod(mesh.size(dim) for dim in sharded_dims(call.query, 1))
    heads, dim = int(call.key.shape[1]), int(call.key.shape[2])
    return VarlenPlan(
        "cp_dispatch",
        schedule=schedule,
        layout=options.order if ring else None,
        mesh_dims=ring,
        ring_shape=tuple(map(mesh.size, ring)),
        key_row_bytes=-(-heads // sharers) * 2 * dim * call.key.dtype.itemsize,
        reasons=tuple(why),
    )
