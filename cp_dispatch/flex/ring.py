"""The ring schedule: one kernel call for each owner of keys, merged by their logsumexp.

Holds one window of keys at a time. At each hop keys come directly from their owner, and gradients
go directly back. Hops at which no rank computes anything are left out in eager mode. A graph cannot
know them: there only their collectives are left out, and the kernels get empty lists of blocks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cp_dispatch._compat import is_tracing, local_tensor
from cp_dispatch.backends import wide_dtype
from cp_dispatch.flex.local import LocalFlex
from cp_dispatch.flex.mask_job import MaskJob
from cp_dispatch.flex.rows import apart, split_rows
from cp_dispatch.graphs.order import stay_in_backward

_OPS = torch.ops.cp_dispatch


def forward(local: LocalFlex, op, score_mod, scale, kernel_options) -> tuple[Tensor, ...]:
    """Output in the query's dtype, logsumexp and maximum, both in base 2, of this rank's rows."""
    query = local_tensor(local.call.query)
    # The logsumexp merges the hops, whether or not the caller needs it.
    kernel_options = kernel_options | {"OUTPUT_LOGSUMEXP": True}
    buffers, merged = local.buffers(), None
    for hop, (key, value) in _hops(local, backward=False):
        place = local.place_at(hop)
        mask = local.mask(place.mask_mod(local.call.mask.mask_mod), hop)
        part = op(
            query, key, value, place.score_mod(score_mod), mask, scale, kernel_options, *buffers
        )
        merged = part if merged is None else merge(merged, part)
    out, logsumexp, maximum = merged
    return out.to(query.dtype), logsumexp, maximum


def merge(a: tuple[Tensor, ...], b: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """Merges two partial results, the output wide. Like
    :func:`cp_dispatch.native.merge.merge_eager`, but in base 2 and without writing in place, for
    graphs."""
    (out_a, lse_a, max_a), (out_b, lse_b, max_b) = a, b
    top = torch.maximum(lse_a, lse_b)
    # If neither saw a key, any finite number will do.
    safe = torch.where(top == -torch.inf, torch.zeros_like(top), top)
    weight_a, weight_b = torch.exp2(lse_a - safe), torch.exp2(lse_b - safe)
    total = weight_a + weight_b
    logsumexp = safe + torch.log2(total)
    share = torch.where(total == 0, torch.ones_like(total), total)
    wide = wide_dtype(out_b.dtype)
    parts = (
        torch.where((w == 0).unsqueeze(-1), 0.0, (w / share).unsqueeze(-1) * out.to(wide))
        for out, w in ((out_a, weight_a), (out_b, weight_b))
    )
    return sum(parts), logsumexp, torch.maximum(max_a, max_b)


def backward(local: LocalFlex, op, results, score_mod, joint_graph, scale, kernel_options):
    """dQ, dK and dV of this rank's rows, and its share of the gradients of captured tensors."""
    query, key, value = (local_tensor(x) for x in local.call.tensors.values())
    buffers = local.buffers()
    sums: list[Tensor] | None = None
    of_buffers: list[Tensor | None] | None = None
    for hop, (window_key, window_value) in _hops(local, backward=True):
        place = local.place_at(hop)
        mask = local.mask(place.mask_mod(local.call.mask.mask_mod), hop)
        grad_query, *grads, captured = op(
            query, window_key, window_value, *results, place.score_mod(score_mod),
            None if joint_graph is None else place.joint_graph(joint_graph),
            mask, scale, kernel_options, *buffers,
        )  # fmt: skip
        shares = _OPS.flex_hop_back(*grads, key, value, *local.mask_arguments, hop)
        parts = [grad_query.to(wide_dtype(query.dtype)), *shares]
        sums = parts if sums is None else [a + b for a, b in zip(sums, parts, strict=True)]
        wide = [x if x is None else x.to(wide_dtype(x.dtype)) for x in captured]
        if of_buffers is None:
            of_buffers = wide
        else:
            of_buffers = [plus(a, b) for a, b in zip(of_buffers, wide, strict=True)]
    grad_query, grad_key, grad_value = sums
    (grad_key,), (grad_value,) = (split_rows(x, [x.size(4)]) for x in (grad_key, grad_value))
    return (
        grad_query.to(query.dtype), grad_key.to(key.dtype), grad_value.to(value.dtype), of_buffers
    )  # fmt: skip


def plus(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    """The sum, in which None is 0."""
    return a if b is None else b if a is None else a + b


def _hops(local: LocalFlex, backward: bool):
    """``(hop, (keys, values))`` for every hop at which there is, or may be, something to compute;
    the first hop is always among them."""
    key, value = (local_tensor(x) for x in (local.call.key, local.call.value))
    fill = local.must_fill
    job = None if is_tracing() else MaskJob(*local.mask_arguments)
    for hop in range(local.plan.world_size):
        if hop and job is not None and job.hop(hop, key.device).is_idle:
            continue
        # A block on a border has rows that the owner does not own: they are hidden, but multiplied
        # by zero.
        zeros = fill or not all(local.window(hop).own)
        buffer = _OPS.flex_hop(key, value, *local.mask_arguments, hop, zeros, backward)
        if backward:
            stay_in_backward(_OPS.flex_hop.default)
        yield hop, apart(split_rows(buffer, [key.shape[3], value.shape[3]]))
