"""Calls on plain tensors that are this rank's shards, inside ``context_parallel``.

Note [Plain shards]
~~~~~~~~~~~~~~~~~~~
A plain shard does not know its global length, its order or its mesh. The context has the mesh and
the order of sequences. The global length is the local one times the number of ranks, unless some
buffer of the context was cut unevenly, or its balancer cuts unevenly; then the ranks exchange their
lengths in one small collective per call. The plan is made for DTensors of those global shapes
without data, and is cached. The op, or in eager mode its kernels
(:mod:`cp_dispatch.plain_tensors.plain_path`), get the plain shards themselves, so autograd and
torch.compile see a single op.
"""

from __future__ import annotations

import dataclasses
import functools

import torch
from torch.distributed.tensor import DTensor

from cp_dispatch._compat import (
    disable_current_modes,
    functorch_is_active,
    has_tangent,
    is_tracing,
)
from cp_dispatch.agreement import agree, check_agreement, debug_is_on, tell_refusal
from cp_dispatch.call import Call
from cp_dispatch.dispatch import run_op
from cp_dispatch.errors import ContextParallelError
from cp_dispatch.graphs.checkpoints import attended
from cp_dispatch.layouts import Balancer
from cp_dispatch.normalize import four_dims, like_query
from cp_dispatch.options import Options
from cp_dispatch.plain_tensors.context import PlainContext, outline, refuse, whole_of, words
from cp_dispatch.plain_tensors.local_mask import KEYS, ROWS, Shares, mask_of_op, sharded_dim_of
from cp_dispatch.plain_tensors.sharded_buffers import overwritten_by_ddp
from cp_dispatch.plain_tensors.uneven import UNEVEN_IN_A_TRACE, not_chunks, told_by_ranks
from cp_dispatch.plan import Plan
from cp_dispatch.planning.choose import sdp_flags
from cp_dispatch.planning.decide import make_plan


def attend_plain(
    context: PlainContext, query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa
):
    """Run a call on plain shards, or return NotImplemented if there is only one rank.

    Raises:
        ContextParallelError: if the call is not supported or is ambiguous; nothing was computed.
    """
    given = Call(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    mesh = context.mesh
    try:
        call = formed(context, given)
    except ContextParallelError as error:
        tell_refusal(mesh, error)
        raise
    if call is None:
        return NotImplemented
    attended(context, is_causal or attn_mask is not None or dropout_p > 0)
    even = not context.uneven
    shares = even_shares(context, call) if even else _told_shares(context, given, call)
    lengths = shares.lengths
    try:
        plan, sharded_dim = decided(context, given, call, shares)
        if plan.handler == "refused":
            raise dataclasses.replace(plan, call=words(context, given)).error()
    except ContextParallelError as error:
        tell_refusal(mesh, error)
        raise
    if debug_is_on():
        check_agreement(
            Options(context.schedule, plan.layout), spread_call(mesh, call, lengths, sharded_dim)
        )
    mask = call.attn_mask
    if mask is not None:
        mask = mask_of_op(context, given, mask, sharded_dim, plan.layout, lengths)
    origin = [0, 0, int(call.query.shape[1])]
    output = run_op(context, plan, call, mask, mesh, lengths, origin)
    return like_query(output, query)


def formed(context: PlainContext, given: Call) -> Call | None:
    """The call in four dims, None if there is only one rank.

    Raises:
        ContextParallelError: for errors that do not depend on what the other ranks hold.
    """
    _check_form(context, given)
    if context.world_size == 1:
        return None
    call = four_dims(given)
    mask = call.attn_mask
    if any(x.ndim != 4 for x in call.tensors.values()) or (mask is not None and mask.ndim != 4):
        refuse(context, given, "query, key and value must have shape [B, H, S, D], or [B, S, D]")
    return call


def decided(
    context: PlainContext, given: Call, call: Call, shares: Shares
) -> tuple[Plan, int | None]:
    """The plan, and the dim along which the mask holds only this rank's part; no communication.

    Raises:
        ContextParallelError: if the call is not supported or is ambiguous.
    """
    lengths = shares.lengths
    if context.window is not None and call.attn_mask is None and lengths[1] > context.window:
        refuse(
            context, given,
            f"the module has a sliding_window or attention_chunk_size of {context.window}, there "
            f"are {lengths[1]} keys, but no mask was passed, probably because masks made from a "
            "shard's length leave the window out. Use context_parallel around the whole model, "
            "where masks of transformers are made for all keys, or pass attn_mask",
        )  # fmt: skip
    sharded_dim = sharded_dim_of(context, given, call.attn_mask, shares)
    layout = _layout(context, given, call.attn_mask, sharded_dim, lengths)
    return _plan_of(context, call, sharded_dim, layout, lengths), sharded_dim


def check_transforms(context: PlainContext, call: Call) -> None:
    """Raise a ContextParallelError, and tell the other ranks, if a transform is on."""
    try:
        _check_transforms(context, call)
    except ContextParallelError as error:
        tell_refusal(context.mesh, error)
        raise


def _check_transforms(context: PlainContext, call: Call) -> None:
    if functorch_is_active():
        refuse(
            context, call,
            "torch.func transforms (vmap, grad, jvp) are on; use autograd, or leave the block",
        )  # fmt: skip


def _check_form(context: PlainContext, call: Call) -> None:
    _check_transforms(context, call)
    if any(x is not None and has_tangent(x) for x in (*call.tensors.values(), call.attn_mask)):
        refuse(context, call, "forward-mode AD is on; use reverse mode, or leave the block")
    if reason := overwritten_by_ddp(context.mesh):
        refuse(context, call, reason)
    device = context.mesh.device_type
    for name, tensor in call.tensors.items():
        if tensor.is_nested or tensor.layout != torch.strided:
            refuse(context, call, f"{name} is nested or sparse; pass padded, strided tensors")
        if tensor.device.type != device:
            refuse(context, call, f"{name} is on {tensor.device}, but the mesh is on {device}")
        if tensor.ndim < 2:
            refuse(context, call, f"{name} has {tensor.ndim} dims; it must be [..., S, D]")
    if call.key.shape[-2] != call.value.shape[-2]:
        refuse(
            context, call,
            f"key and value must have the same length, got {call.key.shape[-2]} and "
            f"{call.value.shape[-2]} rows",
        )  # fmt: skip
    if context.lengths is not None:
        for name in ("query", "key"):
            length = int(getattr(call, name).shape[-2])
            if length not in context.lengths:
                refuse(
                    context, call,
                    f"{name} has {length} rows, but the module's inputs have "
                    f"{sorted(context.lengths)} along seq_dim; seq_dim must be the dim that is dim "
                    "-2 in attention",
                )  # fmt: skip


def even_shares(context: PlainContext, call: Call) -> Shares:
    """What ranks hold if all hold as much as this one."""
    local, of_mask = _own_lengths(call)
    world_size = context.world_size
    lengths = local[0] * world_size, local[1] * world_size
    return Shares(lengths, ([local[0]], [local[1]]), ([of_mask[0]], [of_mask[1]]))


def _own_lengths(call: Call) -> tuple[tuple[int, int], tuple[int, int]]:
    """This rank's rows of query and key, and the mask's rows and keys."""
    local, mask = tuple(int(x.shape[2]) for x in (call.query, call.key)), call.attn_mask
    return local, (1, 1) if mask is None else (int(mask.shape[ROWS]), int(mask.shape[KEYS]))


def _told_shares(context: PlainContext, given: Call, call: Call) -> Shares:
    """What ranks hold, by a collective."""
    mesh = context.mesh
    local, of_mask = _own_lengths(call)
    if is_tracing():
        refuse(context, given, UNEVEN_IN_A_TRACE)
    if debug_is_on():  # ranks that refuse, or whose lengths are even, do not get to the exchange
        alike = dataclasses.replace(context, lengths=None)  # lengths of shards may differ
        agree("scaled_dot_product_attention", f"    lengths are told next, {alike}", (), mesh)
    of_ranks = told_by_ranks(mesh, (*local, *of_mask))
    for own in of_ranks[:2]:
        if reason := not_chunks(own):
            refuse(context, given, reason)
    lengths = sum(of_ranks[0]), sum(of_ranks[1])
    return Shares(lengths, tuple(of_ranks[:2]), tuple(of_ranks[2:]))


def _layout(context, call, mask, sharded_dim, lengths) -> Balancer | None:
    """The layout that matters to the call; None if there is none or the order does not matter."""
    whole_dims = mask is not None and any(
        mask.shape[dim] > 1 and dim != sharded_dim for dim in (ROWS, KEYS)
    )
    order_matters = call.is_causal or whole_dims
    if not order_matters and call.dropout_p == 0.0:
        return None
    if order_matters and (unknown := context.unknown_order(*lengths)):
        refuse(context, call, f"is_causal and masks depend on positions, and {unknown}")
    layouts = [context.layout(length) for length in lengths]
    fits = all(x is None or x.seq_len == n for x, n in zip(layouts, lengths, strict=True))
    if layouts[0] == layouts[1] and fits:
        return layouts[0]
    if order_matters:
        ranks, both = context.world_size, zip(layouts, lengths, strict=True)
        given_whole = any(x is not None and x.seq_len * ranks == n for x, n in both)
        refuse(
            context, call,
            f"the rows of {ranks} ranks are {lengths[0]} positions of the query and {lengths[1]} "
            f"of the key, in the layouts {layouts}; is_causal and masks need both in one layout of "
            "their length, or balancer=None"
            + "; pass this rank's rows (cp_dispatch.shard), not the whole sequence" * given_whole,
        )  # fmt: skip
    return None


def _plan_of(context, call: Call, sharded_dim, layout, lengths) -> Plan:
    mesh, mask = context.mesh, call.attn_mask
    options = Options(context.schedule, layout)
    outlines = []
    for x, length in zip(call.tensors.values(), (lengths[0], lengths[1], lengths[1]), strict=True):
        batch, heads, _, dim = map(int, x.shape)
        outlines.append(((batch, heads, length, dim), x.dtype, x.requires_grad, ROWS))
    if mask is not None:
        shape = list(map(int, mask.shape))
        if sharded_dim is not None:
            shape[sharded_dim] = lengths[sharded_dim - ROWS]
        outlines.append((tuple(shape), mask.dtype, mask.requires_grad, sharded_dim))
    return _plan(
        mesh, options, tuple(outlines), float(call.dropout_p), bool(call.is_causal), call.scale,
        bool(call.enable_gqa), torch.is_grad_enabled(), sdp_flags(),
        torch.cuda.current_device() if mesh.device_type == "cuda" else None,
    )  # fmt: skip


def spread_call(mesh, call: Call, lengths, sharded_dim: int | None) -> Call:
    """The call on the DTensors of which these are the shards; the same on every rank."""
    tensors = zip(call.tensors.items(), (lengths[0], lengths[1], lengths[1]), strict=True)
    spread = {name: _spread(mesh, x, ROWS, length) for (name, x), length in tensors}
    if sharded_dim is not None:
        length = lengths[sharded_dim - ROWS]
        spread["attn_mask"] = _spread(mesh, call.attn_mask, sharded_dim, length)
    return dataclasses.replace(call, **spread)


def _spread(mesh, shard: torch.Tensor, dim: int, length: int) -> DTensor:
    """A leaf that represents the DTensor of which ``shard`` is this rank's shard."""
    return whole_of(mesh, shard.detach(), dim, length).requires_grad_(shard.requires_grad)


@functools.lru_cache(maxsize=256)
def _plan(
    mesh, options, outlines, dropout_p, is_causal, scale, enable_gqa, grad_mode, *switches
) -> Plan:
    """``switches`` are only part of the cache key: the choice of a kernel depends on them."""
    with disable_current_modes(), torch.inference_mode(False), torch.set_grad_enabled(grad_mode):
        tensors = [outline(mesh, *given) for given in outlines]
        mask = tensors.pop() if len(tensors) > 3 else None
        call = Call(*tensors, mask, dropout_p, is_causal, scale, enable_gqa)
        return make_plan(options, call)
