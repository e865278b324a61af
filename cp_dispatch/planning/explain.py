"""``explain()``: what a ``scaled_dot_product_attention`` call would do, without running it."""

from __future__ import annotations

import dataclasses

import torch
from torch.distributed.tensor import DTensor

from cp_dispatch.call import Call
from cp_dispatch.errors import ContextParallelError
from cp_dispatch.normalize import autocast, four_dims, without_causal_bias
from cp_dispatch.plain_tensors.context import PlainContext, rows_of_ranks, words
from cp_dispatch.plain_tensors.local_call import decided, even_shares, formed, spread_call
from cp_dispatch.plain_tensors.local_mask import KEYS, ROWS, Shares
from cp_dispatch.plan import Plan
from cp_dispatch.planning.decide import in_words, make_plan
from cp_dispatch.planning.planner import with_predictions
from cp_dispatch.planning.transport import carrier, redistributed
from cp_dispatch.sharding import mask_placements, target_placements
from cp_dispatch.toggle import current_options, plain_context


def explain(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Plan:
    """Explain what ``F.scaled_dot_product_attention`` would do with these arguments, without
    running it.

    Computes nothing, except for the casts of autocast where that is on, and does not communicate.
    Where the lengths of other ranks' shards are unknown, it assumes them and says so.

    Args:
        query, key, value: ``(B, H, Sq, D)``, ``(B, Hkv, Sk, D)``, ``(B, Hkv, Sk, Dv)``, of any
            floating dtype and with any number of batch dims: DTensors or, inside a
            :func:`cp_dispatch.context_parallel` block, this rank's shards.
        attn_mask, dropout_p, is_causal, scale, enable_gqa: the other arguments of the call.

    Returns:
        A :class:`Plan`; print it for a readable report. For a call that would raise, it holds all
        the reasons.
    """
    arguments = query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa
    if not torch.is_inference_mode_enabled():
        return _explain(*arguments)
    # In inference mode, Python cannot reshape tensors that were made outside of it.
    with torch.inference_mode(False), torch.no_grad():
        return _explain(*arguments)


def _explain(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa) -> Plan:
    query, key, value, attn_mask = map(autocast, (query, key, value, attn_mask))
    call = Call(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    if any(isinstance(x, DTensor) for x in (query, key, value, attn_mask)):
        four = four_dims(without_causal_bias(call))
        plan = in_words(make_plan(current_options(), four), four)
        plan = _with_costs(plan, four, getattr(query, "device_mesh", None))
        if plan.handler == "cp_dispatch":
            plan = dataclasses.replace(plan, reasons=(*plan.reasons, *_placed_anew(plan, four)))
        return dataclasses.replace(plan, call=call.describe())
    context = plain_context()
    if context is None:
        why = "no argument is a DTensor, and no block of context_parallel is on in this thread"
        return Plan("stock", reasons=(why,), call=call.describe())
    assumed: list[str] = []
    try:
        plan = _explain_shards(context, without_causal_bias(call), assumed)
    except ContextParallelError as error:
        plan = Plan("refused", reasons=(getattr(error, "reason", str(error)),))
    plan = dataclasses.replace(plan, reasons=(*plan.reasons, *assumed))
    return dataclasses.replace(plan, call=words(context, call))


def _explain_shards(context: PlainContext, given: Call, assumed: list[str]) -> Plan:
    """Adds what was assumed to ``assumed``, in words, whether or not the call is refused."""
    call = formed(context, given)
    if call is None:
        return Plan("stock", reasons=("context_parallel is over one rank",))
    shares = _shares(context, call, assumed)
    plan, sharded_dim = decided(context, given, call, shares)
    if plan.handler == "cp_dispatch":
        plan = in_words(plan, spread_call(context.mesh, call, shares.lengths, sharded_dim))
        plan = _with_costs(plan, call, context.mesh)
    return plan


def _with_costs(plan: Plan, call: Call, mesh) -> Plan:
    """The plan with predicted times, and with what carries the data that moves."""
    if plan.handler != "cp_dispatch":
        return plan
    if call.attn_mask is None and not call.dropout_p:
        plan = with_predictions(plan, mesh.device_type)
    moved = carrier(mesh, plan.schedule, plan.mesh_dims)
    return dataclasses.replace(plan, reasons=(*plan.reasons, *([moved] if moved else [])))


def _placed_anew(plan: Plan, call: Call) -> list[str]:
    """What DTensor has to redistribute before the op runs, in words."""
    tensors = call.tensors
    query, key = target_placements(*(x.placements for x in tensors.values()))
    wanted = [query, key, key]
    if isinstance(call.attn_mask, DTensor):
        whole_rows = plan.layout is not None and "rows" not in plan.mask_order
        tensors = {**tensors, "attn_mask": call.attn_mask}
        wanted.append(mask_placements(query, call.attn_mask.shape, whole_rows))
    return redistributed(tensors, wanted)


def _shares(context: PlainContext, call: Call, assumed: list[str]) -> Shares:
    """What the ranks hold, as far as this rank knows; adds what it assumes to ``assumed``."""
    if not context.uneven:
        return even_shares(context, call)
    lengths, owns, sizes = [], [], []
    for dim, name in ((ROWS, "query"), (KEYS, "key")):
        local = int(getattr(call, name).shape[ROWS])
        owns.append(rows_of_ranks(context, local, name, assumed))
        lengths.append(sum(owns[-1]))
        size = 1 if call.attn_mask is None else int(call.attn_mask.shape[dim])
        sizes.append(owns[-1] if size == local != 1 else [size] * context.world_size)
        if size == local == 1 and call.attn_mask is not None:
            assumed.append(
                f"assumed that size 1 of attn_mask broadcasts over every {name}: this rank holds "
                "only one"
            )
    return Shares(tuple(lengths), tuple(owns), tuple(sizes))
