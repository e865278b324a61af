"""Makes one kernel call for each group of heads, while the next group's keys are in transit.

See Note [Groups of heads].
"""

from __future__ import annotations

import torch
from torch import Tensor

from cp_dispatch._compat import local_tensor
from cp_dispatch.backends import wide_dtype
from cp_dispatch.flex.groups import spans
from cp_dispatch.flex.local import LocalFlex
from cp_dispatch.flex.results import no_gradients, not_before, outlines, placed_strides
from cp_dispatch.flex.ring import plus
from cp_dispatch.flex.rows import apart, split_rows
from cp_dispatch.graphs.order import keep_in_graph, stay_in_backward
from cp_dispatch.layouts import Span

_OPS = torch.ops.cp_dispatch


def forward(local: LocalFlex, op, score_mod, scale, kernel_options) -> tuple[Tensor, ...]:
    """Output, logsumexp and maximum of this rank's rows, as one kernel of all heads would return
    them."""
    query = local_tensor(local.call.query)
    buffers = local.buffers()
    mask_mod = local.call.mask.mask_mod
    token, done = _start(local, backward=False), None
    joined = [_Joined(local.call.query) for _ in range(3)]
    for group, heads in enumerate(spans(query.shape[1], local.plan.groups)):
        key, value = _arrive(local, token, group, done)
        (part,) = apart([query.narrow(1, *heads)])
        if local.is_empty:
            results = not_before(outlines(part, value.shape[3]), key, *buffers[0], *buffers[1])
            keep_in_graph(results[0], (part,))
        else:
            place = local.place_of(heads)
            mask = local.mask(place.mask_mod(mask_mod), heads=heads)
            results = op(
                part, key, value, place.score_mod(score_mod), mask, scale, kernel_options, *buffers
            )
        # Inductor's kernel for CPU has no logsumexp.
        done = results[1] if query.device.type == "cuda" else results[0]
        for whole, x in zip(joined, results, strict=True):
            whole.put(x)
    return tuple(whole.take() for whole in joined)


def backward(local: LocalFlex, op, results, score_mod, joint_graph, scale, kernel_options):
    """dQ, dK and dV of this rank's rows, and its share of the gradients of captured tensors."""
    query, key, value = (local_tensor(x) for x in local.call.tensors.values())
    buffers = local.buffers()
    mask_mod = local.call.mask.mask_mod
    token, given = _start(local, backward=True, waited=results[2:]), None
    of_queries = _Joined(local.call.query)
    of_buffers: list[Tensor | None] | None = None
    for group, heads in enumerate(spans(query.shape[1], local.plan.groups)):
        keys = _arrive(local, token, group, given)
        part = query.narrow(1, *heads)
        results_part = [_part(x, heads) for x in results]
        if local.is_empty:
            (grad_query, *grads), captured = no_gradients(
                (part, *keys), buffers[0], keys[0], *buffers[0], *buffers[1]
            )
        else:
            place = local.place_of(heads)
            grad_query, *grads, captured = op(
                part, *keys, *results_part, place.score_mod(score_mod),
                None if joint_graph is None else place.joint_graph(joint_graph),
                local.mask(place.mask_mod(mask_mod), heads=heads), scale, kernel_options, *buffers,
            )  # fmt: skip
        of_queries.put(grad_query)
        given = _OPS.flex_give(
            given, *grads, key, value, *local.mask_arguments, local.plan.groups, group
        )
        wide = [x if x is None else x.to(wide_dtype(x.dtype)) for x in captured]
        if of_buffers is None:
            of_buffers = wide
        else:
            of_buffers = [plus(a, b) for a, b in zip(of_buffers, wide, strict=True)]
    grads = _OPS.flex_collect(given, key, value, *local.mask_arguments, local.plan.groups)
    return of_queries.take(), *grads, of_buffers


def _start(local: LocalFlex, backward: bool, waited=()) -> Tensor:
    key, value = local.own_keys(waited)
    token = _OPS.flex_start(
        key, value, *local.mask_arguments, local.plan.groups, local.must_fill, backward
    )
    if backward:
        stay_in_backward(_OPS.flex_start.default)
    return token


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
    # Kernels use the strides of the outputs, and assume that tensors with one number per row are
    # dense.
    return part if part.ndim > 3 else part.contiguous()


class _Joined:
    """The results of all groups of heads, with the strides that one kernel of all heads would have:
    the memory order of ``like``. So each is written only once."""

    def __init__(self, like):
        self._like, self._whole, self._first = like, None, 0

    def put(self, part: Tensor) -> None:
        if self._whole is None:
            shape = (part.shape[0], local_tensor(self._like).shape[1], *part.shape[2:])
            order = self._like.stride() if part.ndim > 3 else range(part.ndim, 0, -1)
            self._whole = part.new_empty_strided(shape, placed_strides(shape, order))
        _OPS.flex_put(self._whole, part, self._first)
        self._first += part.shape[1]

    def take(self) -> Tensor:
        return self._whole
