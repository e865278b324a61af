"""The custom ops ``torch.ops.cp_dispatch.varlen_attention`` and its backward.

On plain tensors they take this rank's shards and communicate over ``group_name``. On DTensors they
follow the rules in :mod:`cp_dispatch.varlen.rule`. The documents are data: the ops read them on the
host, once for each version of the tensors, so different documents need no recompilation.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from cp_dispatch._compat import below_autograd, resolve_group, run_uncompiled
from cp_dispatch.backends import wide_dtype
from cp_dispatch.errors import ContextParallelError
from cp_dispatch.graphs import recomputed
from cp_dispatch.graphs.checkpoints import attends_in
from cp_dispatch.ops import NAMESPACE, needs_autograd, refuse_local_tensor_mode
from cp_dispatch.schedules.comm import Ring
from cp_dispatch.schedules.ranges import part
from cp_dispatch.varlen.job import VarlenJob, job_of

library = torch.library.Library(NAMESPACE, "FRAGMENT")

# Shapes, for a rank with T of query_length rows and M of key_length keys:
#   query, grad_output, output    (T, H, D)
#   key, value                    (M, Hkv, D)
#   cu_seq_q, cu_seq_k            (documents + 1,), int32 or int64, of the whole sequence
#   logsumexp                     (H, T), natural log, inf for a row without keys; float32, float64
#                                 for float64
# window is [left, right], -1 for all; scale None is 1 / sqrt(D). covered: refuse documents that end
# before the sequence. num_splits is for the forward's kernel: 1, or None for its own choice. This
# rank is ring_rank among the ranks of ring_shape, whose group is group_name; [], 0 and "" mean that
# it holds all of the sequence. layout is the text of a balancer, "" for natural order. key_grad
# False: dK and dV are empty.
_OPTIONS = (
    "Tensor cu_seq_q, Tensor cu_seq_k, int[] window, float? scale, SymInt query_length, "
    "SymInt key_length, bool covered, int? num_splits, int[] ring_shape, int ring_rank, "
    "str group_name, str layout"
)
SCHEMAS = (
    f"varlen_attention(Tensor query, Tensor key, Tensor value, {_OPTIONS})"
    " -> (Tensor output, Tensor logsumexp)",
    "varlen_attention_backward(Tensor grad_output, Tensor query, Tensor key, Tensor value, "
    f"Tensor output, Tensor logsumexp, {_OPTIONS}, bool key_grad)"
    " -> (Tensor grad_query, Tensor grad_key, Tensor grad_value)",
    "varlen_starts(Tensor cu_seq) -> Tensor",
)


@run_uncompiled
def _forward(query: Tensor, key: Tensor, value: Tensor, *options) -> tuple[Tensor, Tensor]:
    queries, keys, _, _, ring_shape, _, _, layout = options[4:]
    if ring_shape:
        attends_in(layout, queries, keys)
    job, ring, scale = _prepared(query, key, *options)
    with part("varlen"):
        if 0 in (query.size(1), key.size(1)):
            return _outlines(query)
        with job.exchange.transfers(ring, key, value) as moved:
            query, key, value = map(_dense, (query, key, value))
            out, lse = job.forward(query, moved.bring(key, value), scale)
    recomputed.note(lse, options[-1])
    return out.contiguous(), lse


@run_uncompiled
def _backward(
    grad_output: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor,
    logsumexp: Tensor, *options,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    *options, key_grad = options
    recomputed.check(logsumexp, options[-1])
    job, ring, scale = _prepared(query, key, *options)
    with part("varlen_backward"):
        if 0 in (query.size(1), key.size(1)):
            grads = [torch.zeros_like(x) for x in (query, key, value)]
            return tuple(grads) if key_grad else (grads[0], *(_nothing(x) for x in (key, value)))
        dtype = job.share_dtype(key.dtype) if key_grad else None
        with job.exchange.transfers(ring, key, value, dtype) as moved:
            query, key, value = map(_dense, (query, key, value))
            grad_query, *shares = job.backward(
                grad_output, query, moved.bring(key, value), output, logsumexp, scale
            )
            if not key_grad:
                return grad_query.contiguous(), _nothing(key), _nothing(value)
            grads, are_ordered = shares
            grads = moved.bring_back(grads, (key, value), are_ordered)
        return grad_query.contiguous(), *grads


@run_uncompiled
def _starts(cu_seq: Tensor) -> Tensor:
    """A copy. Compilers remove torch's own copy op if the copy is not written to."""
    return cu_seq.clone()


def _prepared(
    query: Tensor, key: Tensor, cu_seq_q, cu_seq_k, window, scale, query_length, key_length,
    covered, num_splits, ring_shape, ring_rank, group_name, layout,
) -> tuple[VarlenJob, Ring | None, float]:  # fmt: skip
    """The job, its ring (None if the sequence is whole), and the scale."""
    job = job_of(
        query.device, cu_seq_q, cu_seq_k, window, query_length, key_length, covered, num_splits,
        ring_shape, ring_rank, layout,
    )  # fmt: skip
    if (query.size(0), key.size(0)) != (job.rows, job.key_rows):
        raise ContextParallelError(
            f"varlen_attn: rank {ring_rank} of {math.prod(ring_shape)} holds {query.size(0)} "
            f"queries and {key.size(0)} keys, but by lengths and layout it should hold {job.rows} "
            f"and {job.key_rows}. Were the DTensors made from uneven shards without their global "
            "shape?"
        )
    ring = Ring.of(resolve_group(group_name), query.device) if group_name else None
    return job, ring, 1 / math.sqrt(query.size(2)) if scale is None else scale


def _dense(x: Tensor) -> Tensor:
    """The tensor with heads in a memory layout that the kernel accepts."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _outlines(query: Tensor) -> tuple[Tensor, Tensor]:
    lse = query.new_empty((query.size(1), query.size(0)), dtype=wide_dtype(query.dtype))
    return query.new_empty(query.shape), lse


def _nothing(like: Tensor) -> Tensor:
    return like.new_empty((0, *like.shape[1:]))


def _forward_fake(query: Tensor, key: Tensor, value: Tensor, *options) -> tuple[Tensor, Tensor]:
    return _outlines(query)


def _backward_fake(grad_output, query, key, value, output, logsumexp, *options):
    keys = (x.new_empty(x.shape) if options[-1] else _nothing(x) for x in (key, value))
    return query.new_empty(query.shape), *keys


class VarlenAttention(torch.autograd.Function):
    """Autograd for DTensors and for plain tensors."""

    @staticmethod
    @run_uncompiled
    def forward(ctx, query, key, value, cu_seq_q, cu_seq_k, *options):
        tensors = query, key, value
        with below_autograd():
            output, logsumexp = FORWARD(*tensors, cu_seq_q, cu_seq_k, *options)
        ctx.save_for_backward(*tensors, output, logsumexp, cu_seq_q, cu_seq_k)
        ctx.options = options
        ctx.mark_non_differentiable(logsumexp)
        ctx.set_materialize_grads(False)
        return output, logsumexp

    @staticmethod
    @run_uncompiled
    def backward(ctx, grad_output, _):
        rest = (None,) * (2 + len(ctx.options))
        if grad_output is None:
            return (None,) * 3 + rest
        needs = ctx.needs_input_grad[:3]
        # Read them only once: a checkpoint recomputes at the first access and refuses a second one.
        saved = ctx.saved_tensors
        grads = BACKWARD(grad_output, *saved, *ctx.options, needs[1] or needs[2])
        return *(g if need else None for g, need in zip(grads, needs, strict=True)), *rest


class VarlenAttentionBackward(torch.autograd.Function):
    """Refuses second derivatives."""

    @staticmethod
    @run_uncompiled
    def forward(ctx, *args):
        with below_autograd():
            return BACKWARD(*args)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        raise ContextParallelError(
            "cp_dispatch::varlen_attention has no second derivative. Given: a backward through the "
            "gradients of attention (create_graph=True). Supported: first derivatives."
        )


def _autograd(function, op):
    @run_uncompiled
    def autograd_kernel(*args):
        if needs_autograd(args):
            return function.apply(*args)
        with below_autograd():
            return op()(*args)

    return autograd_kernel


for _schema, _kernel, _fake in zip(
    SCHEMAS,
    (_forward, _backward, _starts),
    (_forward_fake, _backward_fake, torch.empty_like),
    strict=True,
):
    _name = _schema.split("(")[0]
    # They wait for the host where documents are new.
    library.define(_schema, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.cudagraph_unsafe))
    for _device in ("CPU", "CUDA"):
        library.impl(_name, _kernel, _device)
    torch.library.register_fake(f"{NAMESPACE}::{_name}", _fake, lib=library)
    refuse_local_tensor_mode(_name)
FORWARD = torch.ops.cp_dispatch.varlen_attention.default
BACKWARD = torch.ops.cp_dispatch.varlen_attention_backward.default
STARTS = torch.ops.cp_dispatch.varlen_starts.default
library.impl("varlen_attention", _autograd(VarlenAttention, lambda: FORWARD), "Autograd")
library.impl(
    "varlen_attention_backward", _autograd(VarlenAttentionBackward, lambda: BACKWARD), "Autograd"
)
