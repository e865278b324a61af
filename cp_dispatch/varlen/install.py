"""Installs kernels in front of those of ``varlen_attn``.

Calls on DTensors go to :mod:`cp_dispatch.varlen.rule` while cp_dispatch is enabled. Calls on plain
tensors inside ``context_parallel`` are refused: they would attend only to the shards, and take the
cumulative lengths of the whole sequence for those of a shard.

The kernels stay from the first ``enable`` or block until ``disable``, because installing and
removing them would cost a millisecond at every block. While nothing is enabled they pass calls on
to torch's.
"""

from __future__ import annotations

import torch
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
from cp_dispatch.graphs.guards import note_trace
from cp_dispatch.transforms import refuse_transforms
from cp_dispatch.varlen.call import VarlenCall
from cp_dispatch.varlen.refusal import PLAIN_SHARDS
from cp_dispatch.varlen.rule import attend

_KEYS = ("CPU", "CUDA", "AutogradCPU", "AutogradCUDA")
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
    kernels = {
        (op, key): torch.library.get_kernel(f"torch_attn::{op}", key) for op in ops for key in _KEYS
    }
    library = torch.library.Library("torch_attn", "IMPL")
    _installed.append(library)
    for (op, key), kernel in kernels.items():
        before = _before(op, kernel, current_options, plain_context)
        library.impl(op, before, key, with_keyset=True, allow_override=True)
    for op in ops:
        # In inference mode a DTensor's Python key comes before all of these keys.
        rule = _inference_rule(op, current_options)
        torch.library.register_torch_dispatch(f"torch_attn::{op}", DTensor, rule, lib=library)
        forget_resolved_kernels(getattr(torch.ops.torch_attn, op).default)


def remove() -> None:
    """Restore torch's kernels."""
    if _installed:
        withdraw(_installed.pop())
        for op in varlen_ops():
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
        # A trace continues to torch's kernel, and its graph raises when it runs.
        elif not any(is_fake(x) for x in tensors) and (context := plain_context()) is not None:
            error = ContextParallelError(PLAIN_SHARDS)
            tell_refusal(context.mesh, error)
            raise error
        return kernel.call_boxed(keyset, *args, **kwargs)

    return varlen_attn


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
        error = ContextParallelError(
            "varlen_attn_out is not supported on DTensors, because it writes into a tensor of the "
            "caller; use varlen_attn, or cp_dispatch.disable()"
        )
        given = *args, *kwargs.values()
        tell_refusal(next(x for x in given if isinstance(x, DTensor)).device_mesh, error)
        raise error
    return attend(options, VarlenCall(*args, **kwargs))
