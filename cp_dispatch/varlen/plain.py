"""``varlen_attn`` on plain tensors that are this rank's shards, inside ``context_parallel``.

The plan is made for the DTensors of which these are the shards; the op gets the shards themselves,
also in a trace, so that autograd and torch.compile see a single op. The cumulative lengths are
those of the whole sequence. They have to end where it does: lengths that a model derives from its
own shard would otherwise be taken for those of the first rows.
"""

from __future__ import annotations

import dataclasses
import functools

import torch
from torch import Tensor

from cp_dispatch._compat import (
    disable_current_modes,
    functorch_is_active,
    has_tangent,
    is_tracing,
)
from cp_dispatch.agreement import agree, debug_is_on, tell_refusal
from cp_dispatch.errors import ContextParallelError
from cp_dispatch.graphs.checkpoints import attended
from cp_dispatch.groups import ring_group_name
from cp_dispatch.layouts import Balancer
from cp_dispatch.options import Options
from cp_dispatch.plain_tensors.context import PlainContext, outline, whole_of, words
from cp_dispatch.plain_tensors.sharded_buffers import overwritten_by_ddp
from cp_dispatch.plain_tensors.uneven import UNEVEN_IN_A_TRACE, not_chunks, told_by_ranks
from cp_dispatch.varlen.call import VarlenCall
from cp_dispatch.varlen.ops import FORWARD
from cp_dispatch.varlen.plan import VarlenPlan, make_plan
from cp_dispatch.varlen.rule import check_agreement


def attend_plain(context: PlainContext, call: VarlenCall) -> tuple[Tensor, Tensor, Tensor]:
    """Output ``(L, H, D)`` and logsumexp ``(H, L)`` of this rank's rows, and a placeholder for the
    random state that torch's op returns.

    Raises:
        ContextParallelError: if the call is not supported or, in debug mode, if the ranks' calls
            differ; nothing was computed.
    """
    mesh = context.mesh
    attended(context, by_order=True)
    try:
        lengths = _lengths(context, call)
        plan = plan_of(context, call, lengths)
        if plan.handler == "refused":
            raise dataclasses.replace(plan, call=words(context, call)).error()
    except ContextParallelError as error:
        tell_refusal(mesh, error)
        raise
    if debug_is_on():
        check_agreement(Options(context.schedule, plan.layout), _spread(mesh, call, lengths))
    output, logsumexp = FORWARD(
        *call.tensors.values(), *call.starts.values(), list(call.window), call.scale, *lengths,
        True, call.num_splits, [context.world_size], mesh.get_local_rank(),
        ring_group_name(mesh, (0,)), "" if plan.layout is None else plan.layout.text,
    )  # fmt: skip
    state = torch.empty(2, dtype=torch.uint64, device=call.query.device)
    return output, logsumexp, state


def _lengths(context: PlainContext, call: VarlenCall) -> tuple[int, int]:
    """The lengths of the whole queries and keys; a collective if shards may be uneven."""
    check_form(context, call)
    # Ints, also in a trace, because a graph is for one length.
    own = int(call.query.shape[0]), int(call.key.shape[0])
    if not context.uneven:
        return own[0] * context.world_size, own[1] * context.world_size
    if is_tracing():
        refuse(UNEVEN_IN_A_TRACE)
    if debug_is_on():  # ranks that refuse do not get to the exchange
        agree("varlen_attn", "    lengths are told next", (), context.mesh)
    of_ranks = told_by_ranks(context.mesh, own)
    for rows in of_ranks:
        if reason := not_chunks(rows):
            refuse(reason)
    return sum(of_ranks[0]), sum(of_ranks[1])


def check_form(context: PlainContext, call: VarlenCall) -> None:
    """Raise ContextParallelError for errors that do not depend on what other ranks hold."""
    if functorch_is_active():
        refuse("torch.func transforms (vmap, grad, jvp) are on; use autograd, or leave the block")
    if any(map(has_tangent, call.tensors.values())):  # which the op would drop
        refuse("forward-mode AD is on; use reverse mode, or leave the block")
    device = context.mesh.device_type
    for name, tensor in (call.tensors | call.starts).items():
        if isinstance(tensor, Tensor) and tensor.device.type != device:
            refuse(f"{name} is on {tensor.device}, but the mesh is on {device}")
    for name, tensor in call.tensors.items():
        if tensor.ndim != 3:
            refuse(f"{name} must have shape [L, H, D], got {list(tensor.shape)}")
        if context.lengths is not None and int(tensor.shape[0]) not in context.lengths:
            refuse(
                f"{name} has {int(tensor.shape[0])} rows, but the module's inputs have "
                f"{sorted(context.lengths)} along seq_dim; seq_dim must be the dim that is dim 0 "
                "in varlen_attn"
            )
    rows = [int(x.shape[0]) for x in (call.key, call.value)]
    if rows[0] != rows[1]:
        refuse(f"key and value must have the same length, got {rows[0]} and {rows[1]} rows")
    if reason := overwritten_by_ddp(context.mesh):
        refuse(reason)


def order_of(context: PlainContext, lengths: tuple[int, int]) -> Balancer | None:
    """The layout of queries and keys of these lengths."""
    if unknown := context.unknown_order(*lengths):
        refuse(f"documents depend on positions, and {unknown}")
    queries, keys = (context.layout(length) for length in lengths)
    if queries != keys:
        refuse(
            f"{lengths[0]} queries and {lengths[1]} keys are in different orders, "
            f"{queries or 'natural'} and {keys or 'natural'}; shard both with balancer=None"
        )
    return queries


def plan_of(context: PlainContext, call: VarlenCall, lengths: tuple[int, int]) -> VarlenPlan:
    """The plan for the DTensors of which the call's tensors are shards."""
    outlines = tuple(
        ((length, *map(int, x.shape[1:])), x.dtype)
        for x, length in zip(call.tensors.values(), (*lengths, lengths[1]), strict=True)
    )
    starts = tuple(x if x is None else _kind_of_starts(x) for x in call.starts.values())
    options = Options(context.schedule, order_of(context, lengths))
    # In a trace numbers may be symbols (dynamic=True), which cannot be looked up.
    window = None if call.window_size is None else tuple(map(int, call.window_size))
    splits = None if call.num_splits is None else int(call.num_splits)
    others = call.seqused_k is not None, call.block_table is not None, splits
    is_causal = bool(call.is_causal)
    return _plan(context.mesh, options, outlines, starts, is_causal, window, others)


def _kind_of_starts(x: Tensor) -> tuple[tuple[int, ...], torch.dtype]:
    """Shape and dtype, as far as a plan depends on them: not on the number of documents, for each
    of which a graph would be compiled."""
    is_usual = x.ndim == 1 and x.dtype is torch.int32 and x.shape[0] > 0
    return (1,) if is_usual else tuple(map(int, x.shape)), x.dtype


@functools.lru_cache(maxsize=256)
def _plan(mesh, options, outlines, starts, is_causal, window, others) -> VarlenPlan:
    with disable_current_modes(), torch.inference_mode(False):
        tensors = [outline(mesh, shape, dtype, False, 0) for shape, dtype in outlines]
        starts = [x if x is None else torch.empty(x[0], dtype=x[1], device="meta") for x in starts]
        seqused_k, block_table = (True if given else None for given in others[:2])
        call = VarlenCall(
            *tensors, *starts, is_causal=is_causal, window_size=window, seqused_k=seqused_k,
            block_table=block_table, num_splits=others[2],
        )  # fmt: skip
        return make_plan(options, call)


def _spread(mesh, call: VarlenCall, lengths: tuple[int, int]) -> VarlenCall:
    """The call on the DTensors of which these are the shards; the same on every rank."""
    tensors = zip(call.tensors.items(), (*lengths, lengths[1]), strict=True)
    spread = {
        name: whole_of(mesh, x.detach(), 0, length).requires_grad_(x.requires_grad)
        for (name, x), length in tensors
    }
    return dataclasses.replace(call, **spread)


def refuse(reason: str):
    """Raise a ContextParallelError."""
    raise ContextParallelError(
        f"varlen_attn on plain shards inside context_parallel is refused: {reason}."
    )
