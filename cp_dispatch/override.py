"""Overrides torch's kernels of ``scaled_dot_product_attention`` while cp_dispatch is on.

Note [The override]
~~~~~~~~~~~~~~~~~~~
``aten::scaled_dot_product_attention`` is composite: torch runs one kernel for every dispatch
key. While enabled, a Python kernel is registered in front of it at the CPU and CUDA keys and at
their autograd keys, so it sees each call once, however the function was imported. A call without
DTensors is passed on to torch's kernel, which was fetched before. In inference mode autograd keys
are off and a DTensor's Python key comes first, so a ``register_torch_dispatch`` rule catches those
calls. Both registrations belong to one ``torch.library.Library``, which is destroyed with the last
user of the override.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable

import torch
from torch.distributed.tensor import DTensor

from cp_dispatch import fused_modules
from cp_dispatch._compat import (
    composite_kernel,
    dynamo_traces,
    run_uncompiled,
    torch_context_parallel_is_on,
)
from cp_dispatch.call import Call
from cp_dispatch.dispatch import attend, involves_dtensor
from cp_dispatch.errors import ContextParallelError
from cp_dispatch.graphs import guards as graph_guards
from cp_dispatch.graphs.checkpoints import attended
from cp_dispatch.options import Options, OptionStack
from cp_dispatch.plain_tensors.context import PlainContext
from cp_dispatch.plain_tensors.local_call import attend_plain, check_transforms
from cp_dispatch.transforms import hidden_mesh, refuse_transforms

SDPA = torch.ops.aten.scaled_dot_product_attention.default
_KEYS = ("CPU", "CUDA", "AutogradCPU", "AutogradCUDA")
_VMAP_KEY = "FuncTorchVmapMode"  # where vmap decomposes the function, before any of the others

CurrentOptions = Callable[[], Options | None]

_warned: list[bool] = []  # not empty: torch has issued its warning of an earlier kernel


def install(
    library: torch.library.Library,
    stack: OptionStack,
    contexts: OptionStack,
    plain_context: Callable[[], PlainContext | None],
) -> None:
    """Register everything with a library, whose destruction removes it.

    ``stack`` has the options for calls on DTensors, ``contexts`` the blocks for calls without;
    ``plain_context`` returns the block in effect.
    """
    # All are fetched first: a kernel at one key changes what torch computes for the others.
    kernels = {key: composite_kernel(key) for key in _KEYS}
    under_vmap = composite_kernel(_VMAP_KEY)
    options = _noted(stack)
    how = {"with_keyset": True, "allow_override": True}
    for key, kernel in kernels.items():
        # A kernel that another library has registered stays; ours passes calls on to it.
        own = _override(kernel, options, contexts, plain_context)
        library.impl("scaled_dot_product_attention", own, key, **how)
    refusal = _refusal_of_vmap(under_vmap, stack, contexts, plain_context)
    with _no_warning_of_an_earlier_kernel():
        library.impl("scaled_dot_product_attention", refusal, _VMAP_KEY, **how)
    torch.library.register_torch_dispatch(
        "aten::scaled_dot_product_attention", DTensor, _inference_rule(options), lib=library
    )
    for name, rule in fused_modules.RULES.items():
        torch.library.register_torch_dispatch(name, DTensor, _while_on(rule, options), lib=library)


@contextlib.contextmanager
def _no_warning_of_an_earlier_kernel():
    """Torch up to 2.13 warns, once in a process, that a kernel was registered before; ours passes
    calls on to it. The filters are changed only where it may warn: after any change, Python shows
    every warning again that it had shown once, which in a training loop would be at every step."""
    if _warned and not torch.is_warn_always_enabled():
        yield
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    _warned.append(True)


def _noted(stack: OptionStack) -> CurrentOptions:
    """The options in effect, with a guard on them for the graph that is being traced, if any."""

    def options() -> Options | None:
        if dynamo_traces() is not None:
            graph_guards.note_trace("options of cp_dispatch", stack.current)
        return stack.current()

    return options


def _noted_block(contexts: OptionStack, plain_context) -> PlainContext | None:
    """The block that holds for plain tensors, noted in the same way."""
    tracing = dynamo_traces() is not None
    if tracing:
        graph_guards.note_trace("the block of context_parallel", plain_context, attended)
    return plain_context() if tracing or contexts.in_use else None


def _override(kernel, options: CurrentOptions, contexts: OptionStack, plain_context):
    """The kernel in front of torch's ``kernel``. See Note [The override]."""

    @run_uncompiled
    def scaled_dot_product_attention(
        keyset, query, key, value,
        attn_mask=None, dropout_p=0.0, is_causal=False, *, scale=None, enable_gqa=False,
    ):  # fmt: skip
        if involves_dtensor(query, key, value, attn_mask):
            found = options()
            if found is not None:
                refuse_beside_torchs()
                result = attend(
                    found, query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa
                )
                if result is not NotImplemented:
                    return result
        else:
            context = _noted_block(contexts, plain_context)
            if context is not None:
                result = attend_plain(
                    context, query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa
                )
                if result is not NotImplemented:
                    return result
        return kernel.call_boxed(
            keyset, query, key, value, attn_mask, dropout_p, is_causal,
            scale=scale, enable_gqa=enable_gqa,
        )  # fmt: skip

    return scaled_dot_product_attention


def refuse_beside_torchs() -> None:
    """Refuse to run beside torch's context parallel, whose DTensors do not say the order of their
    shards."""
    if torch_context_parallel_is_on():
        raise ContextParallelError(
            "torch's own context-parallel dispatcher is on and would handle the same calls. Leave "
            "torch.distributed.tensor.experimental.context_parallel, or call "
            "_disable_context_parallel_dispatcher() of torch.distributed.tensor.experimental."
            "_context_parallel._attention, before cp_dispatch.enable(); or use "
            "cp_dispatch.context_parallel, which takes the same arguments."
        )


def _refusal_of_vmap(kernel, stack: OptionStack, contexts: OptionStack, plain_context):
    """The kernel in front of vmap's. Under that, plain shards would silently stay local, and calls
    on DTensors would go to DTensor's own kernels even if vmap maps over none of the tensors. Those
    would take the order of the shards for that of the sequence in a layout, and on CPU search for a
    rule for minutes."""

    def scaled_dot_product_attention(keyset, query, key, value, attn_mask=None, *args, **kwargs):
        tensors = query, key, value, attn_mask
        if hidden_mesh(tensors) is None:
            context = _noted_block(contexts, plain_context)
            if context is not None:
                check_transforms(context, Call(*tensors))
        elif stack.current() is not None:
            refuse_transforms(tensors, "scaled_dot_product_attention", wrapped=True)
        return kernel.call_boxed(keyset, query, key, value, attn_mask, *args, **kwargs)

    return scaled_dot_product_attention


def _inference_rule(options: CurrentOptions):
    @run_uncompiled
    def rule(cls, func, types, args=(), kwargs=None):
        found = options()
        if found is None:
            return NotImplemented
        refuse_beside_torchs()
        return _attend_from_aten(found, *args, **(kwargs or {}))

    return rule


def _while_on(rule, options: CurrentOptions):
    @run_uncompiled
    def rule_while_on(cls, func, types, args=(), kwargs=None):
        return NotImplemented if options() is None else rule(*args, **(kwargs or {}))

    return rule_while_on


def _attend_from_aten(
    options, query, key, value,
    attn_mask=None, dropout_p=0.0, is_causal=False, *, scale=None, enable_gqa=False,
):  # fmt: skip
    return attend(options, query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
