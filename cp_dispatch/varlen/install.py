"""Installs kernels in front of those of ``varlen_attn``.

Calls on DTensors go to :mod:`cp_dispatch.varlen.rule` while cp_dispatch is enabled, calls on plain
tensors inside ``context_parallel`` to :mod:`cp_dispatch.varlen.plain`. A graph of torch.compile
that contains torch's op is guarded on there being no block. Other graphs (``make_fx``) are not. In
a block their forward attends over all ranks, and their backward is refused.

The kernels stay from the first ``enable`` or block until ``disable``, because installing and
removing them would cost a millisecond at every block. While nothing is enabled they pass calls on
to torch's.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from cp_dispatch._compat import (
    dynamo_traces,
    forget_resolved_kernels,
    functorch_is_active,
    is_fake,
    run_uncompiled,
    varlen_ops,
    withdraw,
)
from cp_dispatch.agreement import tell_refusal
from cp_dispatch.errors import ContextParallelError
from cp_dispatch.graphs import recomputed
from cp_dispatch.graphs.checkpoints import attended
from cp_dispatch.graphs.compile_cache import note_group
from cp_dispatch.graphs.guards import note_trace
from cp_dispatch.groups import ring_group_name
from cp_dispatch.plain_tensors.context import PlainContext
from cp_dispatch.transforms import refuse_transforms
from cp_dispatch.varlen.call import VarlenCall
from cp_dispatch.varlen.plain import attend_plain
from cp_dispatch.varlen.rule import attend

_KEYS = ("CPU", "CUDA", "AutogradCPU", "AutogradCUDA")
_BACKWARD, _BACKWARD_KEYS = "_varlen_attn_backward", ("CPU", "CUDA")
_installed: list[torch.library.Library] = []


def install(current_options, plain_context) -> None:
    """Install kernels in front of torch's, until :func:`remove`.

    ``current_options()`` returns the options for DTensors or None, ``plain_context()`` says whether
    plain tensors are shards.
    """
    ops = [] if _installed else varlen_ops()
    if not ops:
        return
    # All are fetched first, because a kernel at one key changes what torch computes for the others.
    places = [*itertools.product(ops, _KEYS), *((_BACKWARD, key) for key in _BACKWARD_KEYS)]
    kernels = {(op, key): torch.library.get_kernel(f"torch_attn::{op}", key) for op, key in places}
    library = torch.library.Library("torch_attn", "IMPL")
    _installed.append(library)
    for (op, key), kernel in kernels.items():
        before = _before_backward(kernel)
        if op != _BACKWARD:
            before = _before(op, kernel, current_options, plain_context)
        library.impl(op, before, key, with_keyset=True, allow_override=True)
    for op in ops:
        # In inference mode a DTensor's Python key comes before all of these keys.
        rule = _inference_rule(op, current_options)
        torch.library.register_torch_dispatch(f"torch_attn::{op}", DTensor, rule, lib=library)
    _forget(ops)


def remove() -> None:
    """Restore torch's kernels."""
    if _installed:
        withdraw(_installed.pop())
        _forget(varlen_ops())


def _forget(ops: list[str]) -> None:
    for op in (*ops, _BACKWARD):
        forget_resolved_kernels(getattr(torch.ops.torch_attn, op).default)


def _before(op: str, kernel, current_options, plain_context):
    @run_uncompiled
    def varlen_attn(keyset, *args, **kwargs):
        tensors = *args, *kwargs.values()
        if functorch_is_active() and current_options() is not None:
            refuse_transforms(tensors, "varlen_attn")
        if any(isinstance(x, DTensor) for x in tensors):
            options = _options_now(current_options)
            if options is not None:
                return _attend(op, options, args, kwargs)
        elif (context := _block_now(plain_context, tensors)) is not None:
            return _attend_plain(op, context, args, kwargs)
        return kernel.call_boxed(keyset, *args, **kwargs)

    return varlen_attn


def _before_backward(kernel):
    @run_uncompiled
    def varlen_attn_backward(keyset, *args, **kwargs):
        if any(type(x) is Tensor and recomputed.is_ours(x) for x in args):
            raise ContextParallelError(
                "varlen_attn was run in a context_parallel block by a graph that was made outside, "
                "and whose backward would stay within this rank's shard. Make the graph inside the "
                "block, or with torch.compile"
            )
        return kernel.call_boxed(keyset, *args, **kwargs)

    return varlen_attn_backward


def _block_now(plain_context, tensors) -> PlainContext | None:
    """The block in which plain tensors are shards of several ranks, None without one."""
    traced = dynamo_traces() is not None
    if traced:
        note_trace("the block of context_parallel", plain_context, attended)
    context = plain_context()
    if context is None or context.world_size == 1:
        return None
    if any(is_fake(x) for x in tensors):  # dynamo looks for the shapes; a later trace is for the op
        if traced:
            note_group(ring_group_name(context.mesh, (0,)), context)
        return None
    return context


def _inference_rule(op: str, current_options):
    @run_uncompiled
    def rule(cls, func, types, args=(), kwargs=None):
        options = _options_now(current_options)
        return NotImplemented if options is None else _attend(op, options, args, kwargs or {})

    return rule


def _options_now(current_options):
    if dynamo_traces() is not None:
        note_trace("options of cp_dispatch", current_options)
    return current_options()


def _attend(op: str, options, args, kwargs):
    if op != "_varlen_attn":
        given = *args, *kwargs.values()
        _refuse_out(next(x for x in given if isinstance(x, DTensor)).device_mesh, "DTensors")
    return attend(options, VarlenCall(*args, **kwargs))


def _attend_plain(op: str, context: PlainContext, args, kwargs):
    if op != "_varlen_attn":
        _refuse_out(context.mesh, "shards")
    return attend_plain(context, VarlenCall(*args, **kwargs))


def _refuse_out(mesh, what: str):
    error = ContextParallelError(
        f"varlen_attn_out is not supported on {what}, because it writes into a tensor of the "
        "caller; use varlen_attn, or call it outside the block or after cp_dispatch.disable()"
    )
    tell_refusal(mesh, error)
    raise error
