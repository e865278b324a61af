"""Runs groups of key heads one after the other, if the keys of all heads take too much memory.

Each group, with its query heads, is a separate call of the inner schedule, and its results are put
in their place. Only one group's gathered keys and shares of gradients are in memory.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from cp_dispatch.layouts import Geometry, Span
from cp_dispatch.native.merge import token_major
from cp_dispatch.schedules.gradients import mask_gradient
from cp_dispatch.schedules.home import mask_of, narrowed, of_heads
from cp_dispatch.schedules.job import Job


class HeadGroups:
    """``schedule`` for ``groups`` groups of key heads, equal ones on the rank with most heads."""

    def __init__(self, schedule, groups: int):
        self._schedule, self._groups = schedule, groups

    def geometry(
        self, query_length: int, key_length: int, ring_shape: tuple[int, ...], causal: bool, layout
    ) -> Geometry:
        return self._schedule.geometry(query_length, key_length, ring_shape, causal, layout)

    def forward(self, job: Job, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """As :func:`cp_dispatch.schedules.ring.forward`."""
        dtype, lse_dtype = (
            job.backend.output_dtype(query.dtype),
            job.backend.logsumexp_dtype(query.dtype),
        )
        output = token_major(*query.shape[:3], value.size(-1), like=query, dtype=dtype)
        logsumexp = query.new_empty(query.shape[:3], dtype=lse_dtype)
        for own, rows, keys in self._each(job, query, key):
            of_keys = (narrowed(x, keys) for x in (key, value))
            out, lse = self._schedule.forward(own, narrowed(query, rows), *of_keys)
            narrowed(output, rows).copy_(out)
            narrowed(logsumexp, rows).copy_(lse)
            del out, lse  # or the next group's would be allocated in addition
        return output, logsumexp

    def backward(
        self,
        job: Job,
        grad_output: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        output: Tensor,
        logsumexp: Tensor,
        key_grad: bool,
        mask_grad: bool,
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        """As :func:`cp_dispatch.schedules.ring.backward`."""
        dq = token_major(*query.shape, like=query)
        dk, dv = (token_major(*x.shape, like=x) if key_grad else None for x in (key, value))
        grad_mask = mask_gradient(job.mask, query.dtype) if mask_grad else None
        for own, rows, keys in self._each(job, query, key):
            go, q, out, lse = (narrowed(x, rows) for x in (grad_output, query, output, logsumexp))
            k, v = (narrowed(x, keys) for x in (key, value))
            grads = self._schedule.backward(own, go, q, k, v, out, lse, key_grad, mask_grad)
            narrowed(dq, rows).copy_(grads[0])
            if key_grad:
                narrowed(dk, keys).copy_(grads[1])
                narrowed(dv, keys).copy_(grads[2])
            if mask_grad:
                mask_of(grad_mask, rows).add_(grads[3])
            del grads
        return dq, dk, dv, grad_mask

    def _each(self, job: Job, query: Tensor, key: Tensor) -> Iterator[tuple[Job, Span, Span]]:
        """Each group's job, query heads and key heads."""
        key_heads = key.size(1)
        shared = query.size(1) // max(1, key_heads)
        for group in range(self._groups):
            # With tensor parallelism a rank may have fewer heads than the groups were made for; all
            # ranks that share its sequence have the same number.
            start, end = (x * key_heads // self._groups for x in (group, group + 1))
            if start == end:
                continue
            rows = Span(start * shared, (end - start) * shared)
            yield of_heads(job, rows), rows, Span(start, end - start)


def groups_for(key_heads: int, size: int, room: int) -> int:
    """The smallest number of equal groups of key heads such that each takes at most ``room`` of
    ``size`` bytes; the number of key heads if none is small enough."""
    return next(
        (n for n in range(1, key_heads) if key_heads % n == 0 and size <= n * room), key_heads
    )
