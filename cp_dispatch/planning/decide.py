"""Makes the plan of a call: what handles it and how, or every reason why not.

Does not communicate. All ranks make the same plan, because it depends only on what all ranks know.
"""

from __future__ import annotations

import dataclasses
import logging

import torch
from torch.distributed.tensor import DTensor, Shard

from cp_dispatch._compat import dtensor_spec, is_tracing, size_hint
from cp_dispatch.bounded import keep
from cp_dispatch.call import Call
from cp_dispatch.options import Options
from cp_dispatch.plan import Plan
from cp_dispatch.planning.choose import LocalCall, Mask, choose_backend, sdp_flags
from cp_dispatch.planning.layout_rules import layout_refusals, mask_order
from cp_dispatch.planning.planner import choose, constants_here
from cp_dispatch.planning.refusal import (
    context_dims,
    form_refusals,
    ring_refusals,
    unsharded_refusals,
)
from cp_dispatch.planning.why_not import reasons_against
from cp_dispatch.sharding import sequence_kinds, target_placements

logger = logging.getLogger("cp_dispatch.decide")  # a name that users may have set a level for

_plans: dict[tuple, Plan] = {}
_told: dict[Plan, None] = {}  # plans that are in the log
_MAX_PLANS = 256  # of each: a plan holds its layout, which may be a new one at every step


def make_plan(options: Options | None, call: Call) -> Plan:
    """Decide about a call that involves a DTensor."""
    key = _cache_key(options, call)
    plan = _plans.get(key) if key is not None else None
    if plan is None:
        plan = _decide(options, call)
        if plan.handler == "refused":
            return in_words(plan, call)
        _tell(plan, call)
        if key is not None:
            keep(_plans, key, plan, _MAX_PLANS)
    return plan


def _tell(plan: Plan, call: Call) -> None:
    """Log a plan when it is new, not at every call; not with symbolic lengths, which have no
    numbers to report."""
    if not plan.has_lengths:
        return
    if logger.isEnabledFor(logging.INFO) and plan not in _told:
        keep(_told, plan, None, _MAX_PLANS)
        logger.info("%s", dataclasses.replace(plan, call=call.describe()))


def in_words(plan: Plan, call: Call) -> Plan:
    """The plan with the parts that are only for people to read."""
    against = reasons_against(_local_call(call), plan.backend) if plan.shards else {}
    return dataclasses.replace(plan, call=call.describe(), backends_refused=against)


def _cache_key(options: Options | None, call: Call) -> tuple | None:
    """Everything that a plan depends on; None if that is unknown (in a trace, for other types)."""
    tensors = call.query, call.key, call.value
    if is_tracing() or not all(type(x) is DTensor for x in tensors):
        return None
    mask = call.attn_mask
    if mask is not None and type(mask) is not DTensor:
        return None
    return (
        options,
        *map(dtensor_spec, tensors),
        None if mask is None else (dtensor_spec(mask), mask.requires_grad),
        call.dropout_p,
        call.is_causal,
        call.enable_gqa,
        _needs_grad(call),
        sdp_flags(),
        torch.cuda.current_device() if tensors[0].is_cuda else None,
    )


def _needs_grad(call: Call) -> bool:
    return torch.is_grad_enabled() and any(
        x.requires_grad for x in (call.query, call.key, call.value, call.attn_mask) if x is not None
    )


_UNSHARDED = "the sequence is not sharded (it is dim -2 of query, key and value)"


def _decide(options: Options | None, call: Call) -> Plan:
    if options is None:
        return Plan("stock", reasons=("cp_dispatch is not enabled",))
    devices = {x.device_mesh.device_type for x in call.tensors.values() if isinstance(x, DTensor)}
    if not devices <= {"cpu", "cuda"}:
        return Plan("stock", reasons=(f"cp_dispatch handles CPU and CUDA, not {devices}",))
    refusals = form_refusals(call)
    if refusals:
        return Plan("refused", reasons=tuple(refusals))
    mesh = call.query.device_mesh
    if not any(context_dims(x) for x in call.tensors.values()):
        if options.layout is not None and call.query.ndim == 4:
            refusals = layout_refusals(options.layout, call, "local", ())
            if refusals:
                return Plan("refused", reasons=tuple(refusals))
        if mesh.device_type != "cpu":
            return Plan("stock", reasons=(_UNSHARDED,))
        refusals = unsharded_refusals(call)
        if refusals:
            return Plan("refused", reasons=tuple(refusals))
        plan = _with_backend(call, options, "local", ())
        return dataclasses.replace(plan, reasons=(_UNSHARDED, *plan.reasons))
    refusals = ring_refusals(call)
    if not refusals:
        kinds = sequence_kinds(*(x.placements for x in call.tensors.values()))
        name, mesh_dims = next(iter(kinds.values())), tuple(kinds)
        if options.layout is not None:
            refusals = layout_refusals(options.layout, call, name, tuple(map(mesh.size, mesh_dims)))
    if refusals:
        return Plan("refused", reasons=tuple(refusals))
    return _with_backend(call, options, name, mesh_dims)


def _with_backend(call: Call, options: Options, schedule: str, mesh_dims: tuple[int, ...]) -> Plan:
    query, key, _ = call.tensors.values()
    local = _local_call(call)
    backend, reasons = choose_backend(local)
    if backend is None:
        refusal = (
            f"no enabled backend supports local shards of shapes {local.shapes} in {query.dtype}; "
            "allow another one with torch.nn.attention.sdpa_kernel or the torch.backends.cuda "
            "flags"
        )
        return Plan("refused", reasons=(refusal, *reasons), shards=local.shapes)
    layout = options.order if schedule != "local" else None
    plan = Plan(
        "cp_dispatch",
        backend=backend,
        schedule=schedule,
        layout=layout,
        mask_order=mask_order(call) if layout is not None else "",
        is_causal=call.is_causal,
        mesh_dims=mesh_dims,
        ring_shape=tuple(map(query.device_mesh.size, mesh_dims)),
        query_length=query.shape[2],
        key_length=key.shape[2],
        reasons=reasons,
        shards=local.shapes,
        dtype=query.dtype,
    )
    if schedule != "ring":
        return plan
    device = local.device_type
    return choose(
        plan, options.schedule, device, call.attn_mask is not None or call.dropout_p > 0,
        _own_rows(call, plan),
        constants_here(device), local.needs_grad,
    )  # fmt: skip


def _own_rows(call: Call, plan: Plan) -> bool:
    """Whether each rank has only its own rows of a mask."""
    mask = call.attn_mask
    if mask is None:
        return False
    if mask.shape[2] == 1:
        # With plain shards of a single query, only one rank has a row of the mask.
        cut = isinstance(mask, DTensor) and Shard(2) in mask.placements
        return cut and call.query.shape[2] == 1
    return plan.layout is None or "rows" in plan.mask_order


def _local_call(call: Call) -> LocalCall:
    query, key, value = call.tensors.values()
    query_target, key_target = target_placements(*(x.placements for x in (query, key, value)))
    shapes = (
        _largest_shard(query, query_target),
        _largest_shard(key, key_target),
        _largest_shard(value, key_target),
    )
    return LocalCall(
        shapes,
        query.dtype,
        query.device_mesh.device_type,
        call.is_causal,
        call.enable_gqa,
        _needs_grad(call),
        _mask(call, shapes),
        call.dropout_p,
    )


def _mask(call: Call, shapes) -> Mask | None:
    """The mask for the largest shards of query and key."""
    mask = call.attn_mask
    if mask is None:
        return None
    query, key, _ = shapes
    full = (*query[:3], key[2])
    shape = tuple(1 if size == 1 else n for size, n in zip(mask.shape, full, strict=True))
    return Mask(shape, mask.dtype, torch.is_grad_enabled() and mask.requires_grad)


def _largest_shard(tensor: DTensor, placements) -> tuple[int, ...]:
    """Shape of the first, largest shard under these placements; plain ints, also in a trace."""
    shape = list(tensor.shape)
    for size, placement in zip(tensor.device_mesh.shape, placements, strict=True):
        if isinstance(placement, Shard):
            shape[placement.dim] = -(-shape[placement.dim] // size)
    # In a trace without guards: which kernel fits does not depend on lengths.
    return tuple(map(size_hint if is_tracing() else int, shape))
