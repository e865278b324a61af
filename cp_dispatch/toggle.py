"""Turning cp_dispatch on and off.

Note [The override]
~~~~~~~~~~~~~~~~~~~
``aten::scaled_dot_product_attention`` is composite: torch runs one kernel for every dispatch
key. While enabled, a Python kernel stands before it at the CPU and CUDA keys and at their
autograd keys, so it sees each call once, however the function was imported. A call without
DTensors goes on to torch's kernel, which was fetched before. In inference mode autograd keys are
off and a DTensor's Python key comes first, so a ``register_torch_dispatch`` rule catches those
calls. Both registrations belong to one ``torch.library.Library``, which is destroyed with the last
user of the override. The rest goes with it: the rules of ``flex_attention``, what stands before
torch's causal biases, and :mod:`cp_dispatch.graph_results`. Two things stay: the kernels before
``varlen_attn``, which pass calls on to torch's after a block, until :func:`disable`; and in
DTensor's tables the rules of our own ops, which are there from the import on. While enabled,
``torch.compiler.config.cache_key_tag`` carries a suffix, which goes with the override.
Graphs that torch.compile made are guarded, see Note [Guards].

``context_parallel`` blocks install the same override, and decide about calls without DTensors. A
block belongs to the thread that entered it, for another thread's plain tensors may be no shards;
autograd's threads for GPUs, which recompute checkpoints, see the block entered last.
"""

from __future__ import annotations

import contextlib
import threading
import warnings

import torch
from torch.distributed.tensor import DTensor

from cp_dispatch import causal_bias, compile_cache, fused_modules, graph_guards, hf_masks
from cp_dispatch._compat import (
    composite_kernel,
    dynamo_traces,
    forget_resolved_kernels,
    in_backward,
    torch_context_parallel_is_on,
    withdraw,
)
from cp_dispatch.dispatch import attend, involves_dtensor
from cp_dispatch.errors import ContextParallelError
from cp_dispatch.flex import install as flex
from cp_dispatch.local_call import attend_plain
from cp_dispatch.options import Options, OptionStack
from cp_dispatch.plain_context import PlainContext
from cp_dispatch.varlen import install as varlen

_SDPA = torch.ops.aten.scaled_dot_product_attention.default
_KEYS = ("CPU", "CUDA", "AutogradCPU", "AutogradCUDA")
_VMAP_KEY = "FuncTorchVmapMode"  # where vmap takes the function apart, before any of those

_lock = threading.RLock()
_stack = OptionStack()
_contexts = OptionStack()  # of PlainContext
_installed: list[torch.library.Library] = []


def enable(schedule: str = "auto", layout=None) -> None:
    """Run attention on sequence-sharded DTensors context-parallel, in the whole process:
    ``F.scaled_dot_product_attention``, ``flex_attention`` and ``varlen_attn``.

    Calling it again replaces the options. Inside ``with enabled(...)`` it holds until the end
    of that block.

    Args:
        schedule: of ``F.scaled_dot_product_attention``; the others have fewer to choose from, see
            the README. ``"ring"``: keys travel; causal work in natural order is balanced by
            exchanging half-shards with the mirror rank where that pays (``"natural_ring"``: never,
            ``"mirrored_ring"``: always, where the lengths allow it). ``"gather"``: all keys on
            every rank, where their shards are alike, else a ring. ``"one_call"``: the same for one
            kernel call on each rank, for short shards; else a ring. ``"ulysses"``: heads by
            all-to-all, with at least as many query heads as ranks and no mask that differs by row,
            else a ring. ``"hybrid"``: heads among the ranks of the last mesh dim that shares the
            sequence, or of a part of the only one (``"hybrid:4"``: of 4 consecutive ranks), and a
            ring across. ``"auto"``: what the plan finds faster. :func:`cp_dispatch.explain` tells.
        layout: None, sequences are in natural order; or a balancer, in whose order every sharded
            sequence lies (see :func:`cp_dispatch.shard`). Causal masks, ``attn_mask`` and dropout
            then go by true positions.

    Raises:
        ContextParallelError: an unknown option, or torch's own context-parallel dispatcher is on.
    """
    options = _checked(schedule, layout)
    with _lock, _undone_on_error():
        _stack.set(options)
        _sync()


def disable() -> None:
    """Put torch back exactly as it was. Inside ``with enabled(...)``, until the block's end."""
    with _lock:
        _stack.set(None)
        _sync()
        if not _installed:
            varlen.remove()


def is_enabled() -> bool:
    """Whether a call made here and now would be handled."""
    return _stack.current() is not None


@contextlib.contextmanager
def enabled(schedule: str = "auto", layout=None):
    """:func:`enable` for the length of a ``with`` block or, as a decorator, of a function.

    Blocks nest: the end of the inner one restores the outer one's options, also when it raises.
    Several threads may each have their own block.
    """
    options = _checked(schedule, layout)
    with _lock, _undone_on_error():
        scope = _stack.push(options)
        _sync()
    try:
        yield
    finally:
        with _lock:
            _stack.remove(scope)
            _sync()


def current_options() -> Options | None:
    """Options that hold here and now, None when off."""
    return _stack.current()


@contextlib.contextmanager
def plain_shards(context: PlainContext):
    """Take plain tensors for this rank's shards inside the block, in this thread."""
    _checked(context.schedule, None)
    with _lock, _undone_on_error(_contexts):
        scope = _contexts.push(context)
        hf_masks.install(plain_context)
        _sync()
    try:
        yield
    finally:
        with _lock:
            _contexts.remove(scope)
            if not _contexts.in_use:
                hf_masks.remove()
            _sync()


def plain_context() -> PlainContext | None:
    """What holds here and now for plain tensors."""
    if not _contexts.in_use:
        return None
    own = _contexts.own()
    return _contexts.latest() if own is None and _on_a_thread_of_autograd() else own


def _on_a_thread_of_autograd() -> bool:
    # One that Python did not start.
    return in_backward() and isinstance(threading.current_thread(), threading._DummyThread)


def _checked(schedule: str, layout) -> Options:
    options = Options(schedule, layout)
    if torch_context_parallel_is_on():
        raise ContextParallelError(
            "torch's own context-parallel dispatcher is on and would take the same calls. Leave "
            "torch.distributed.tensor.experimental.context_parallel, or call "
            "_disable_context_parallel_dispatcher() of torch.distributed.tensor.experimental."
            "_context_parallel._attention, before cp_dispatch.enable()."
        )
    return options


@contextlib.contextmanager
def _undone_on_error(stack: OptionStack = _stack):
    """An installation that fails leaves the options as they were."""
    before = stack.snapshot()
    try:
        yield
    except BaseException:
        stack.restore(before)
        raise


def _sync() -> None:
    """Install or remove the override so that it is there exactly while somebody uses it."""
    in_use = _stack.in_use or _contexts.in_use
    if in_use and not _installed:
        graph_guards.override_comes(_is_off)
        # All fetched first: a kernel at one key changes what torch computes for the others.
        kernels = {key: composite_kernel(key) for key in _KEYS}
        under_vmap = composite_kernel(_VMAP_KEY)
        library = torch.library.Library("aten", "IMPL")
        try:
            for key, kernel in kernels.items():
                # A kernel that somebody else put there stays, and is the one we call on to.
                library.impl(
                    "scaled_dot_product_attention",
                    _override(kernel),
                    key,
                    with_keyset=True,
                    allow_override=True,
                )
            with warnings.catch_warnings():
                # Torch up to 2.13 says that a kernel was there before, which is called on to.
                warnings.simplefilter("ignore")
                library.impl(
                    "scaled_dot_product_attention",
                    _refusal_of_vmap(under_vmap),
                    _VMAP_KEY,
                    with_keyset=True,
                    allow_override=True,
                )
            torch.library.register_torch_dispatch(
                "aten::scaled_dot_product_attention", DTensor, _inference_rule, lib=library
            )
            for name, rule in fused_modules.RULES.items():
                torch.library.register_torch_dispatch(name, DTensor, _while_on(rule), lib=library)
            flex.install(current_options, plain_context, enabled, library)
            varlen.install(current_options, plain_context)
        except BaseException:
            withdraw(library)
            flex.remove()
            raise
        forget_resolved_kernels(_SDPA)
        causal_bias.install(is_enabled, plain_context)
        _installed.append(library)
    elif _installed and not in_use:
        withdraw(_installed.pop())
        forget_resolved_kernels(_SDPA)
        flex.remove()
        causal_bias.remove()
        graph_guards.override_goes()
    state = (_stack.latest(), _contexts.latest()) if _contexts.in_use else _stack.latest()
    compile_cache.tag(state if _installed else None)


def _is_off() -> bool:
    return _stack.current() is None and plain_context() is None


def _options_now() -> Options | None:
    """:func:`current_options`, with a guard on them for the graph that is being traced, if any."""
    if dynamo_traces() is not None:
        graph_guards.note_trace("options of cp_dispatch", current_options)
    return _stack.current()


def _override(kernel):
    """The kernel that stands before torch's ``kernel``. See Note [The override]."""

    def scaled_dot_product_attention(
        keyset, query, key, value,
        attn_mask=None, dropout_p=0.0, is_causal=False, *, scale=None, enable_gqa=False,
    ):  # fmt: skip
        if involves_dtensor(query, key, value, attn_mask):
            options = _options_now()
            if options is not None:
                result = attend(
                    options, query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa
                )
                if result is not NotImplemented:
                    return result
        elif _contexts.in_use or dynamo_traces() is not None:
            if dynamo_traces() is not None:
                graph_guards.note_trace("the block of context_parallel", plain_context)
            context = plain_context()
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


def _refusal_of_vmap(kernel):
    """The kernel that stands before vmap's, which would go on to DTensor's own kernels: in a layout
    those take the order of the shards for that of the sequence."""

    def scaled_dot_product_attention(keyset, query, key, value, attn_mask=None, *args, **kwargs):
        if _stack.current() is not None:
            involves_dtensor(query, key, value, attn_mask)
        return kernel.call_boxed(keyset, query, key, value, attn_mask, *args, **kwargs)

    return scaled_dot_product_attention


def _inference_rule(cls, func, types, args=(), kwargs=None):
    options = _options_now()
    if options is None:
        return NotImplemented
    return _attend_from_aten(options, *args, **(kwargs or {}))


def _while_on(rule):
    def rule_while_on(cls, func, types, args=(), kwargs=None):
        return NotImplemented if _options_now() is None else rule(*args, **(kwargs or {}))

    return rule_while_on


def _attend_from_aten(
    options, query, key, value,
    attn_mask=None, dropout_p=0.0, is_causal=False, *, scale=None, enable_gqa=False,
):  # fmt: skip
    return attend(options, query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
