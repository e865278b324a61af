"""Runs the ops on one rank: turns their arguments into a job and runs its schedule."""

from __future__ import annotations

import contextlib
import math
import weakref

import torch
from torch import Tensor

from cp_dispatch._compat import profiler_is_on, resolve_group
from cp_dispatch.bounded import keep
from cp_dispatch.dropout import Dropout
from cp_dispatch.errors import ContextParallelError
from cp_dispatch.graphs import recomputed
from cp_dispatch.graphs.checkpoints import attends_in
from cp_dispatch.layouts import from_text
from cp_dispatch.native.merge import plain_batch, token_major
from cp_dispatch.schedules import SCHEDULES, flags_alone, of_direction
from cp_dispatch.schedules.comm import Ring
from cp_dispatch.schedules.job import Job

_jobs: dict[tuple, tuple] = {}  # jobs without tensors, and the groups, weakly, of each
_MAX_JOBS = 256


def job_of(
    backend, query, attn_mask, dropout_seed, dropout_p, origin,
    is_causal, scale, query_length, key_length, schedule, ring_shape, group_name,
    layout, mask_order, backward=False,
):  # fmt: skip
    """The job that an op's arguments describe, and its schedule."""
    schedule = of_direction(schedule, backward)
    kind = None if attn_mask is None else attn_mask.dtype
    if kind not in (None, torch.bool) and not kind.is_floating_point:
        # Inductor's kernels for CPU turn a boolean mask that a collective moves into integers.
        attn_mask = attn_mask != 0
    if attn_mask is not None or dropout_seed is not None:
        group = resolve_group(group_name) if group_name else None
        dropout = None
        if dropout_seed is not None:
            dropout = Dropout(dropout_p, dropout_seed, *origin, query_length)
        job = _job(
            backend, query, group, attn_mask, dropout, origin, is_causal, scale,
            query_length, key_length, schedule, ring_shape, layout, mask_order,
        )  # fmt: skip
        return job, SCHEDULES[schedule]
    key = (
        backend.name, query.device, query.size(-1), tuple(origin), is_causal, scale,
        query_length, key_length, schedule, tuple(ring_shape), group_name, layout,
    )  # fmt: skip
    known = _jobs.get(key)
    group = resolve_group(group_name) if group_name else None
    # Names of groups repeat after destroy_process_group, and if ranks are threads.
    if known is None or known[0]() is not group:
        job = _job(
            backend, query, group, None, None, origin, is_causal, scale,
            query_length, key_length, schedule, ring_shape, layout, mask_order,
        )  # fmt: skip
        known = _weakly(group), job
        keep(_jobs, key, known, _MAX_JOBS)
    return known[1], SCHEDULES[schedule]


def _weakly(group):
    """What gives the group, as long as it is there."""
    return (lambda: None) if group is None else weakref.ref(group)


def _job(
    backend, query, group, mask, dropout, origin,
    is_causal, scale, query_length, key_length, schedule, ring_shape, layout, mask_order,
) -> Job:  # fmt: skip
    ring = Ring.of(group, query.device) if group is not None else None
    if ring is not None and ring.world_size == 1:
        ring = None
    scale, sign = _positive(1 / math.sqrt(max(1, query.size(-1))) if scale is None else scale)
    return Job(
        backend,
        SCHEDULES[schedule].geometry(
            query_length, key_length, ring_shape, is_causal, from_text(layout) if layout else None
        ),
        scale,
        ring,
        mask=mask,
        own_rows=not layout or "rows" in mask_order,
        keys_in_place="keys" in mask_order,
        batch_start=origin[0] if origin else 0,
        dropout=dropout,
        layout=layout,
        sign=sign,
    )


def _positive(scale: float) -> tuple[float, float]:
    """A positive scale for the kernels, and a factor for the query that corrects it to the given
    one.

    Flash kernels scale masked scores: -inf times 0 is NaN, and times a negative number +inf.
    """
    if scale > 0 or math.isnan(scale):
        return scale, 1.0
    return (-scale, -1.0) if scale else (1.0, 0.0)


def run_forward(job: Job, schedule, query: Tensor, key: Tensor, value: Tensor):
    """Output and logsumexp of this rank's shards."""
    _check_shards(job, query, key)
    if job.ring is not None:
        job.ring.steps.clear()
    try:
        padded = (job.backend.pad(plain_batch(x)) for x in (_signed(job, query), key, value))
        output, logsumexp = schedule.forward(job, *padded)
    except BaseException:
        flags_alone.finish(job, schedule.forward, (query, key, value))
        raise
    recomputed.note(logsumexp, job.layout)
    return _unpad(output, value.size(-1)), logsumexp


def run_backward(
    job: Job, schedule, grad_output, query, key, value, output, logsumexp, key_grad, mask_grad
):
    """Gradients of this rank's query, key, value and mask."""
    _check_shards(job, query, key)
    recomputed.check(logsumexp, job.layout)
    if job.ring is not None:
        job.ring.steps.clear()
    inputs = grad_output, query, key, value, output
    try:
        signed = grad_output, _signed(job, query), key, value, output
        padded = (job.backend.pad(plain_batch(x)) for x in signed)
        dq, dk, dv, dmask = schedule.backward(job, *padded, logsumexp, key_grad, mask_grad)
    except BaseException:
        flags_alone.finish(job, schedule.backward, (*inputs, logsumexp), key_grad, mask_grad)
        raise
    return (
        _signed(job, _unpad(dq, query.size(-1))),
        _unpad(dk, key.size(-1)) if key_grad else placeholder(key),
        _unpad(dv, value.size(-1)) if key_grad else placeholder(value),
        dmask if mask_grad else no_mask_grad(job.mask, query),
    )


def _signed(job: Job, tensor: Tensor) -> Tensor:
    return tensor if job.sign == 1.0 else tensor * job.sign


def order_of(
    attn_mask, dropout_seed, dropout_p, origin, is_causal, scale, query_length, key_length,
    schedule, ring_shape, group_name, layout, mask_order,
) -> tuple | None:  # fmt: skip
    """The layout and the lengths of an op's call, None if the order of the sequence does not
    matter."""
    matters = is_causal or attn_mask is not None or dropout_seed is not None
    return (layout, query_length, key_length) if matters and group_name else None


class Repeated:
    """A kind of call without mask and dropout that is repeated, on one device and with one head
    dim. Its job is looked up once, and a schedule may run it with fewer ops
    (:mod:`cp_dispatch.schedules.known_call`).

    Args:
        backend: the kernel.
        arguments: of the op, after the tensors.
    """

    def __init__(self, backend, arguments: tuple):
        self._backend, self._arguments = backend, arguments
        *_, self._group_name, self._layout, _ = arguments
        self._group = self._known = None
        self._order = order_of(*arguments)
        #: Job and schedule of a forward and of a backward.
        self._ways: list[tuple] = []

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """As :func:`run_forward`."""
        if self._order is not None:
            attends_in(*self._order)
        known, job, schedule = self._find(query, backward=False)
        if known is None:
            return run_forward(job, schedule, query, key, value)
        tensors = query, key, value
        job.ring.steps.clear()
        try:
            results = known.forward(*tensors)
        except BaseException:
            flags_alone.finish(job, schedule.forward, tensors)
            raise
        if results is None:
            results = run_forward(job, schedule, *tensors)
            known.learn_forward(*tensors)
        else:
            recomputed.note(results[1], self._layout)
        return results

    def backward(self, grad_output, query, key, value, output, logsumexp, key_grad: bool):
        """As :func:`run_backward`, without a mask's gradient."""
        known, job, schedule = self._find(query, backward=True)
        if not key_grad:
            known = None
        tensors = grad_output, query, key, value, output, logsumexp
        if known is not None:
            recomputed.check(logsumexp, self._layout)
            job.ring.steps.clear()
            try:
                grads = known.backward(*tensors)
            except BaseException:
                flags_alone.finish(job, schedule.backward, tensors, True, False)
                raise
            if grads is not None:
                return grads
        grads = run_backward(job, schedule, *tensors, key_grad, False)[:3]
        if known is not None:
            known.learn_backward(*tensors)
        return grads

    def _find(self, query: Tensor, backward: bool) -> tuple:
        """The schedule's known calls, None while a profiler should see its parts; the job and the
        schedule."""
        group = resolve_group(self._group_name) if self._group_name else None
        # Names repeat after destroy_process_group, and in threads.
        if not self._ways or group is not self._group:
            ways = [
                job_of(self._backend, query, *self._arguments, backward=x) for x in (False, True)
            ]
            (job, schedule), (_, other) = ways
            make = getattr(schedule, "KnownCalls", None)
            knows = make is not None and job.ring and job.sign == 1.0 and other is schedule
            self._known = make(job) if knows else None
            self._ways = ways
            self._group = group  # last: another thread, or a call after an error, looks at it
        return (None if profiler_is_on() else self._known, *self._ways[backward])


def _check_shards(job: Job, query: Tensor, key: Tensor) -> None:
    """Refuse shards of other lengths, for example in a graph compiled for a different length."""
    wanted = job.geometry.query_length(job.rank), job.geometry.key_length(job.rank)
    if (query.size(2), key.size(2)) != wanted:
        raise ContextParallelError(
            f"rank {job.rank} of {job.geometry.world_size} holds {query.size(2)} query rows and "
            f"{key.size(2)} keys, but by lengths and layout it should hold {wanted[0]} and "
            f"{wanted[1]}. Were the DTensors made from uneven shards without their global shape? "
            "Or was the call compiled for a different length or layout? Then recompile it after "
            "torch._dynamo.reset()."
        )


def _unpad(tensor: Tensor, dim: int) -> Tensor:
    if tensor.size(-1) == dim:
        return tensor
    return token_major(*tensor.shape[:3], dim, like=tensor).copy_(tensor[..., :dim])


def without_autocast(tensor: Tensor):
    """Within it, products and sums of a backward keep their dtypes even if autocast is on.

    A forward needs no such scope: it runs below autocast, which has cast its inputs, or in a graph
    that is guarded on autocast.
    """
    device = tensor.device.type
    if torch.is_autocast_enabled(device):
        return torch.autocast(device, enabled=False)
    return contextlib.nullcontext()


def placeholder(like: Tensor) -> Tensor:
    """A tensor of the right shape that holds one element; a zero, so that two runs agree."""
    return like.new_zeros(1).expand(like.shape)


def no_mask_grad(attn_mask: Tensor | None, query: Tensor) -> Tensor:
    """The placeholder for the gradient of a mask that needs none."""
    return placeholder(attn_mask) if attn_mask is not None else query.new_empty(0)
