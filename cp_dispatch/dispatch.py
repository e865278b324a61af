"""Handles a call from torch's dispatcher: decides whether it is ours, and runs the right op."""

from __future__ import annotations

import dataclasses

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from cp_dispatch import fast_path
from cp_dispatch._compat import (
    functorch_is_active,
    is_tracing,
    local_tensor,
    put_known_sizes,
    save_in_traced_checkpoints,
)
from cp_dispatch.agreement import check_agreement, debug_is_on
from cp_dispatch.call import Call
from cp_dispatch.graphs.compile_cache import note_group
from cp_dispatch.graphs.order import keep_in_graph, warn_of_no_rows
from cp_dispatch.groups import ring_group_name
from cp_dispatch.layouts.spans import Span, chunk
from cp_dispatch.normalize import four_dims, like_query
from cp_dispatch.ops import forward_op
from cp_dispatch.options import Options
from cp_dispatch.plain_tensors import plain_path
from cp_dispatch.plan import Plan
from cp_dispatch.planning.decide import make_plan
from cp_dispatch.transforms import refuse_transforms


def involves_dtensor(query, key, value, attn_mask) -> bool:
    """Whether any argument is a DTensor. Every plain call pays for this check, so it is fast."""
    plain = torch.Tensor
    if (
        type(query) is plain
        and type(key) is plain
        and type(value) is plain
        and (attn_mask is None or type(attn_mask) is plain)
        and not functorch_is_active()
    ):
        return False
    tensors = query, key, value, attn_mask
    if functorch_is_active():
        refuse_transforms(tensors, "scaled_dot_product_attention")
    return isinstance(query, DTensor) or any(isinstance(x, DTensor) for x in tensors)


def attend(
    options: Options,
    query,
    key,
    value,
    attn_mask,
    dropout_p,
    is_causal,
    scale,
    enable_gqa,
):
    """Run a call that involves a DTensor, or return NotImplemented to leave it to torch.

    Raises:
        ContextParallelError: if the call is not supported or, in debug mode, if the ranks' calls
            differ; nothing was computed.
    """
    call = slot = None
    if debug_is_on():
        call = Call(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        check_agreement(options, call)
    elif attn_mask is None and dropout_p == 0.0:
        slot = fast_path.slot(options, query, key, value, is_causal, scale, enable_gqa)
        prepared = fast_path.known(slot) if slot is not None else None
        if prepared is not None:
            return prepared(query, key, value)
    call = call or Call(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    given, call = call, four_dims(call)
    plan = make_plan(options, call)
    if plan.handler == "stock":
        return NotImplemented
    if plan.handler == "refused":
        raise dataclasses.replace(plan, call=given.describe()).error()
    mesh = query.device_mesh
    mask = call.attn_mask
    if mask is not None and not isinstance(mask, DTensor) and not is_tracing():
        everywhere = [Replicate()] * mesh.ndim
        mask = DTensor.from_local(mask.detach(), mesh, everywhere, run_check=False)
    lengths = call.query.shape[2], call.key.shape[2]
    output = run_op(options, plan, call, mask, mesh, lengths, _origin(call.query), slot)
    return like_query(output, query)


def run_op(
    state, plan: Plan, call: Call, mask, mesh, lengths, origin: list[int], slot=None
) -> torch.Tensor:
    """Run the op of a plan on DTensors or on this rank's shards; output in the query's dtype.

    ``lengths`` and ``origin`` are global, ``state`` is what compiled graphs depend on, and ``slot``
    is where the fast path may store the call.
    """
    query = call.query
    seed = None
    if call.dropout_p > 0.0:
        # From torch's default generator, which checkpoints restore, so dropout is the same again.
        seed = torch.randint(2**62, (), device=mesh.device_type)
        save_in_traced_checkpoints(torch.ops.aten.randint.default)
    group_name = ring_group_name(mesh, plan.mesh_dims)
    if is_tracing():
        warn_of_no_rows((query, call.key, call.value))
        note_group(group_name, state)
        _guard_shards(plan, call)
    layout = ("", "rows") if plan.layout is None else (plan.layout.text, plan.mask_order)
    arguments = (
        mask, seed, call.dropout_p, origin, call.is_causal, call.scale, *lengths, plan.op_schedule,
        [*plan.ring_shape], group_name, *layout,
    )  # fmt: skip
    tensors = query, call.key, call.value
    output = plain_path.attend(plan.backend, arguments, *tensors)
    if output is None:
        output, logsumexp = forward_op(plan.backend)(*tensors, *arguments)
        if group_name:
            keep_in_graph(output, tensors[:2])
        if slot is not None:
            fast_path.learn(slot, plan, *tensors, arguments, output, logsumexp)
    return output if output.dtype is query.dtype else output.to(query.dtype)


def _guard_shards(plan: Plan, call: Call) -> None:
    """In a trace, guard on the lengths that the graph relies on, and make heads and head dims
    constants.

    Guards on a DTensor's global size have no effect if it is dynamic; those on its shard do.
    """
    for tensor in call.tensors.values():
        shard = local_tensor(tensor) if isinstance(tensor, DTensor) else tensor
        for dim in (1, 3):  # as ints, or torch 2.11 runs a second op to read strides of its output
            int(shard.shape[dim]), int(tensor.shape[dim])
        if plan.layout is not None:
            int(shard.shape[2])
        elif plan.can_choose and plan.schedule not in ("ring", "ulysses"):
            # Every rank has the same number of rows, and it is even. Two inequalities, because an
            # equation would substitute one size for the other, and torch loses track of sizes if
            # the length of a shard equals the head dim.
            bool(shard.shape[2] * plan.world_size <= tensor.shape[2])
            bool(shard.shape[2] * plan.world_size >= tensor.shape[2])
            bool(shard.shape[2] % 2 == 0)
    # A length that equals a head dim is constant too: a trace has one symbol for equal sizes.
    for tensor in (*call.tensors.values(), call.attn_mask):
        if isinstance(tensor, DTensor):
            put_known_sizes(tensor)


def _origin(query: DTensor) -> list[int]:
    """Global indices of the first batch row and head of this rank's shard, and the global number of
    heads."""
    mesh = query.device_mesh
    coordinate = mesh.get_coordinate() or (0,) * mesh.ndim
    starts = []
    for tensor_dim in (0, 1):
        span = Span(0, int(query.shape[tensor_dim]))
        for mesh_dim, placement in enumerate(query.placements):
            if placement == Shard(tensor_dim):
                span = chunk(span, mesh.size(mesh_dim))[coordinate[mesh_dim]]
        starts.append(span.position)
    return [*starts, int(query.shape[1])]
