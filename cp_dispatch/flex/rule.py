"""``flex_attention`` on DTensors: the rules of the higher-order op and of its backward.

Note [Where the rules stand]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~
``flex_attention`` checks its arguments, has dynamo trace the mods into graphs, with all captured
tensors as arguments, and calls the higher-order op with DTensors. Torch's autograd kernel of the op
comes first: its ``autograd.Function`` saves DTensors and calls the op below autograd, and in the
backward ``flex_attention_backward``. Both then reach the rules of their first subclass argument,
which are ours. This holds in eager mode and also in a trace, because tracing modes defer to
subclasses; there the local tensors are those of the graph. So a rule needs no autograd of its own:
it fetches keys, calls the op again on local tensors, and wraps the results.

A backward may run in another thread, or after the block in which its forward ran, so it must not
depend on what is enabled. Of everything that torch passes from the forward to the backward,
``kernel_options`` is a dict that belongs to that call alone, so the forward stores its options
there (:mod:`cp_dispatch.flex.remember`).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial

from cp_dispatch._compat import (
    compiles_for_inductor,
    dynamo_traces,
    is_fake,
    is_tracing,
    local_tensor,
)
from cp_dispatch.agreement import debug_is_on
from cp_dispatch.backends import wide_dtype
from cp_dispatch.errors import ContextParallelError
from cp_dispatch.flex import bring_and_cut as _op  # noqa: F401  defines an op
from cp_dispatch.flex import captured, grouped, ring
from cp_dispatch.flex import group_ops as _ops  # noqa: F401  defines the ops, with those of ops.py
from cp_dispatch.flex.agreement import check_flex_agreement
from cp_dispatch.flex.call import FlexCall
from cp_dispatch.flex.local import LocalFlex
from cp_dispatch.flex.mask_tuple import MaskTuple
from cp_dispatch.flex.ops import check_length
from cp_dispatch.flex.plain import inside, is_inside
from cp_dispatch.flex.plan import make_plan
from cp_dispatch.flex.program_order import with_order
from cp_dispatch.flex.remember import remember, remembered, users
from cp_dispatch.flex.results import no_gradients, not_before, nothing, outlines, wrap, zeros_for
from cp_dispatch.flex.traced_calls import options_at_look, options_of_graph
from cp_dispatch.graphs import recomputed
from cp_dispatch.graphs.checkpoints import attends_in
from cp_dispatch.graphs.guards import note_trace
from cp_dispatch.graphs.order import keep_in_graph, warn_of_no_rows

FORWARD = torch.ops.higher_order.flex_attention
BACKWARD = torch.ops.higher_order.flex_attention_backward


def rules(current_options, plain_context):
    """The rules of both ops. They use the options that ``current_options()`` returns at a call, or
    in a trace those of a style; None leaves the call to torch. ``plain_context()`` returns the
    block of plain shards."""

    def options_now(query):
        # A call on plain shards has the guard of its block instead.
        if dynamo_traces() is None or is_inside():
            return current_options()
        if _is_dynamos_look(query):
            options, is_own = options_at_look(current_options())
        else:
            _check_block(plain_context)
            options = options_of_graph()
            is_own = options is not None
        if is_own:  # its style has the guard
            return options
        note_trace("options of cp_dispatch", current_options)
        return current_options()

    def flex_attention(
        query, key, value, score_mod, block_mask, scale, kernel_options,
        score_mod_other_buffers=(), mask_mod_other_buffers=(),
    ):  # fmt: skip
        options = options_now(query)
        if options is None:
            return NotImplemented
        call = FlexCall(
            query, key, value, MaskTuple(block_mask), score_mod_other_buffers,
            mask_mod_other_buffers,
        )  # fmt: skip
        with inside():
            results = forward(options, call, score_mod, scale, users(kernel_options))
        remember(kernel_options, options)
        return results

    def flex_attention_backward(
        query, key, value, out, logsumexp, grad_out, grad_logsumexp, fw_graph, joint_graph,
        block_mask, scale, kernel_options, score_mod_other_buffers=(), mask_mod_other_buffers=(),
    ):  # fmt: skip
        options = remembered(kernel_options) or options_now(query)
        if options is None:
            return NotImplemented
        call = FlexCall(
            query, key, value, MaskTuple(block_mask), score_mod_other_buffers,
            mask_mod_other_buffers,
        )  # fmt: skip
        joint_graph = captured.gradients_of_mod(joint_graph, fw_graph, query, call.score_buffers)
        return backward(
            options, call, (out, logsumexp, grad_out, grad_logsumexp), fw_graph, joint_graph,
            scale, users(kernel_options),
        )  # fmt: skip

    return flex_attention, flex_attention_backward


@torch.no_grad()
def forward(options, call: FlexCall, score_mod, scale, kernel_options):
    """Output ``(B, H, Sq, Dv)``, logsumexp and maximum ``(B, H, Sq)`` as DTensors placed like the
    query.

    Raises:
        ContextParallelError: the call is not supported; nothing was computed.
    """
    if _is_outside(call):
        return tuple(nothing(call.query, dims) for dims in (4, 3, 3))
    if _is_dynamos_look(call.query):
        # Refusals are left to the call itself, which raises them unchanged. But torch makes its
        # cache keys next, and these must differ between ranks.
        plan = make_plan(options, call)
        if plan.handler != "refused":
            LocalFlex(call, plan).note_trace(options)
        return tuple(wrap(x, call.query) for x in _outlines(call))
    local = _local(options, call, scale)
    if not is_tracing() and local.plan.world_size > 1:  # graphs have ops that do this
        attends_in(local.layout, local.plan.query_length, local.plan.key_length)
    kernel_options = with_order(kernel_options, call.query.device)
    if local.rings and _in_base_two(kernel_options):
        results = ring.forward(local, FORWARD, score_mod, scale, kernel_options)
        return _wrapped(results, local)
    if local.is_grouped:
        results = grouped.forward(local, FORWARD, score_mod, scale, kernel_options)
        return _wrapped(results, local)
    key, value = local.keys(backward=False)
    # On every rank, because the other ranks gather captured tensors that are sharded from it.
    query, buffers = local_tensor(call.query), local.buffers()
    if local.is_empty:
        results = not_before(_outlines(call), key, *buffers[0], *buffers[1])
        keep_in_graph(results[0], (query,))
        return _wrapped(results, local)
    place = local.place
    mask = local.mask(place.mask_mod(call.mask.mask_mod))
    results = FORWARD(
        query, key, value, place.score_mod(score_mod), mask, scale, kernel_options, *buffers
    )  # fmt: skip
    return _wrapped(results, local)


def _wrapped(results, local: LocalFlex):
    if not is_tracing():
        recomputed.note(results[1], local.layout)
    return tuple(wrap(x, local.call.query) for x in results)


@torch.no_grad()
def backward(options, call: FlexCall, results, score_mod, joint_graph, scale, kernel_options):
    """dQ, dK, dV and the gradients of the tensors that ``score_mod`` captures, each placed like its
    tensor."""
    if _is_outside(call):
        buffers = tuple(zeros_for(x) for x in call.score_buffers)
        return *(nothing(x, 4) for x in call.tensors.values()), buffers
    local = _local(options, call, scale)
    kernel_options = with_order(kernel_options, call.query.device)
    out, logsumexp, grad_out, grad_logsumexp = results
    if not is_tracing():
        recomputed.check(local_tensor(logsumexp), local.layout)
    results = (
        local_tensor(out), local_tensor(logsumexp), _placed_like_query(grad_out, call.query),
        _placed_like_query(grad_logsumexp, call.query),
    )  # fmt: skip
    if local.rings and _in_base_two(kernel_options):
        grad_query, grad_key, grad_value, of_buffers = ring.backward(
            local, BACKWARD, results, score_mod, joint_graph, scale, kernel_options
        )
    elif local.is_grouped:
        grad_query, grad_key, grad_value, of_buffers = grouped.backward(
            local, BACKWARD, results, score_mod, joint_graph, scale, kernel_options
        )
    else:
        grad_query, *grads, of_buffers = _backward_of_all(
            local, results, score_mod, joint_graph, scale, kernel_options
        )
        grad_key, grad_value = local.key_gradients(*grads)
    keep_in_graph(grad_key, (call.query, call.key), backward=True)
    have = captured.have_gradients(joint_graph, len(call.score_buffers))
    return (
        wrap(grad_query, call.query),
        _key_gradient(grad_key, call.key, local),
        _key_gradient(grad_value, call.value, local),
        tuple(
            captured.gradient(grad, buffer, call.query, local.plan, local.part, options.of_shards)
            if has
            else None
            for grad, buffer, has in zip(of_buffers, call.score_buffers, have, strict=False)
        ),
    )


def _backward_of_all(local: LocalFlex, results, score_mod, joint_graph, scale, kernel_options):
    """dQ, dK and dV of all keys, and gradients of captured tensors, from this rank's rows."""
    key, value = local.keys(backward=True, waited=results[2:])
    query, buffers = local_tensor(local.call.query), local.buffers()
    if local.is_empty:
        grads, of_buffers = no_gradients(
            (query, key, value), buffers[0], key, *buffers[0], *buffers[1]
        )
        return *grads, of_buffers
    place = local.place
    return BACKWARD(
        query, key, value, *results, place.score_mod(score_mod),
        None if joint_graph is None else place.joint_graph(joint_graph),
        local.mask(place.mask_mod(local.call.mask.mask_mod)), scale, kernel_options, *buffers,
    )  # fmt: skip


def _in_base_two(kernel_options: dict) -> bool:
    """Whether the logsumexp is in base 2, which a ring needs; one of torch's kernels differs."""
    return kernel_options.get("BACKEND") != "FLASH"


def _local(options, call: FlexCall, scale: float) -> LocalFlex:
    if debug_is_on():
        check_flex_agreement(options, call, scale)
    plan = make_plan(options, call)
    if plan.handler == "refused":
        raise plan.error()
    local = LocalFlex(call, plan)
    if is_tracing():
        warn_of_no_rows(call.tensors.values())
        local.note_trace(options)
        for x in call.tensors.values():
            int(local_tensor(x).shape[2])  # a guard that holds; one on a DTensor's length may not
    if plan.world_size > 1:  # of the keys, the ops check it
        rows = int(local_tensor(call.query).shape[2])
        check_length("query rows", rows, local.queries, local.rank)
    return local


def _is_outside(call: FlexCall) -> bool:
    """Whether this rank is not in the mesh, so that it takes no part."""
    mesh = getattr(call.query, "device_mesh", None)
    return mesh is not None and mesh.get_coordinate() is None


def _is_dynamos_look(query) -> bool:
    """Whether this is dynamo's first call, which only asks for shapes, before there is a graph."""
    return isinstance(query, DTensor) and is_fake(local_tensor(query))


def _check_block(plain_context) -> None:
    """Refuse a graph that inductor does not compile inside a block, because of its local call."""
    if not is_tracing() or compiles_for_inductor():
        return
    note_trace("the block of context_parallel", plain_context)
    if plain_context() is not None:
        raise ContextParallelError(
            "flex_attention on DTensors is refused inside context_parallel in graphs that inductor "
            "does not compile: the block would take the graph's own call for one on plain shards; "
            'use the backend "inductor", or call it outside the block'
        )


def _outlines(call: FlexCall) -> tuple[Tensor, Tensor, Tensor]:
    return outlines(local_tensor(call.query), call.value.shape[3])


def _placed_like_query(grad, query: DTensor) -> Tensor | None:
    if grad is None or not isinstance(grad, DTensor):
        return grad
    if grad.placements != query.placements:
        grad = grad.redistribute(placements=query.placements)
    return local_tensor(grad)


def _key_gradient(grad: Tensor, like: DTensor, local: LocalFlex) -> DTensor:
    if not local.key_shares:
        return wrap(grad, like)
    shares = [Partial() if i in local.plan.mesh_dims else p for i, p in enumerate(like.placements)]
    wide = wrap(grad.to(wide_dtype(grad.dtype)), like, shares)
    return wide.redistribute(placements=like.placements).to(grad.dtype)
