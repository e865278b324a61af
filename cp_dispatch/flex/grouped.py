"""One kernel call for each group of heads, while the next group's keys are on their way.

See Note [Groups of heads].
"""

from __future__ import annotations

import torch
from torch import Tensor

from cp_dispatch._compat import local_tensor
from cp_dispatch.backends import wide_dtype
from cp_dispatch.flex.groups import spans
from cp_dispatch.flex.local import LocalFlex, apart
from cp_dispatch.flex.results import outlines, zeros_for
from cp_dispatch.flex.ring import plus
from cp_dispatch.flex.rows import split_rows
from cp_dispatch.layouts import Span

_OPS = torch.ops.cp_dispatch


def forward(local: LocalFlex, op, score_mod, scale, kernel_options) -> tuple[Tensor, ...]:
    """Output, logsumexp and maximum of this rank's rows, as one kernel of all heads gives them."""
    query = local_tensor(local.call.query)
    buffers = local.buffers()
    mask_mod = local.call.mask.mask_mod
    token, done, parts = _start(local, backward=False), None, []
    for group, heads in enumerate(spans(query.shape[1], local.plan.groups)):
        key, value = _arrive(local, token, group, done)
        (part,) = apart([query.narrow(1, *heads)])
        if local.is_empty:
            parts.append(outlines(part, value.shape[3]))
            continue
        place = local.place_of(heads)
        mask = local.mask(place.mask_mod(mask_mod), heads=heads)
        parts.append(
            op(part, key, value, place.score_mod(score_mod), mask, scale, kernel_options, *buffers)
        )
        # Inductor's kernel for CPU has no logsumexp; there nothing overlaps anyway.
        done = parts[-1][1] if query.device.type == "cuda" else None
    return tuple(_join(x, local.call.query) for x in zip(*parts, strict=True))


def backward(local: LocalFlex, op, results, score_mod, joint_graph, scale, kernel_options):
    """dQ, dK and dV of this rank's rows, and its share of the gradients of captured tensors."""
    query, key, value = (local_tensor(x) for x in local.call.tensors.values())
    buffers = local.buffers()
    mask_mod = local.call.mask.mask_mod
    token, given, of_queries = _start(local, backward=True), None, []
    of_buffers: list[Tensor | None] | None = None
    for group, heads in enumerate(spans(query.shape[1], local.plan.groups)):
        keys = _arrive(local, token, group, given)
        part = query.narrow(1, *heads)
        results_part = [_part(x, heads) for x in results]
        if local.is_empty:
            grad_query, *grads = (torch.zeros_like(x) for x in (part, *keys))
            captured = [zeros_for(x) for x in buffers[0]]
        else:
            place = local.place_of(heads)
            grad_query, *grads, captured = op(
                part, *keys, *results_part, place.score_mod(score_mod),
                None if joint_graph is None else place.joint_graph(joint_graph),
                local.mask(place.mask_mod(mask_mod), heads=heads), scale, kernel_options, *buffers,
            )  # fmt: skip
        of_queries.append(grad_query)
        given = _OPS.flex_give(
            given, *grads, key, value, *local.mask_arguments, local.plan.groups, group
        )
        wide = [x if x is None else x.to(wide_dtype(x.dtype)) for x in captured]
        if of_buffers is None:
            of_buffers = wide
        else:
            of_buffers = [plus(a, b) for a, b in zip(of_buffers, wide, strict=True)]
    grads = _OPS.flex_collect(given, key, value, *local.mask_arguments, local.plan.groups)
    return _join(of_queries, local.call.query), *grads, of_buffers


def _start(local: LocalFlex, backward: bool) -> Tensor:
    key, value = (local_tensor(x) for x in (local.call.key, local.call.value))
    return _OPS.flex_start(
        key, value, *local.mask_arguments, local.plan.groups, local.must_fill, backward
    )


def _arrive(local: LocalFlex, token: Tensor, group: int, after) -> tuple[Tensor, Tensor]:
    key, value = (local_tensor(x) for x in (local.call.key, local.call.value))
    buffer = _OPS.flex_arrive(
        token, after, key, value, *local.mask_arguments, local.plan.groups, group, local.must_fill
    )
    return tuple(apart(split_rows(buffer, [key.shape[3], value.shape[3]])))


def _part(result: Tensor | None, heads: Span) -> Tensor | None:
    if result is None:
        return None
    part = result.narrow(1, *heads)
    # Kernels go by the strides of outputs, and take numbers by row to be dense.
    return part if part.ndim > 3 else part.contiguous()


def _join(parts, like: Tensor) -> Tensor:
    """Groups of heads side by side, in the order of memory that ``like`` has, so that results are
    written once."""
    if parts[0].ndim < 4:
        return torch.cat(list(parts), 1)
    order = [*sorted(range(3), key=lambda dim: (-like.stride(dim), dim)), 3]
    joined = torch.cat([x.permute(order) for x in parts], order.index(1))
    return joined.permute([order.index(dim) for dim in range(4)])
