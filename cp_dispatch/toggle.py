"""Turning cp_dispatch on and off.

The override (:mod:`cp_dispatch.override`) goes with its last user, and with it the rules of
``flex_attention``, what stands before torch's causal biases, and :mod:`cp_dispatch.graph_results`.
Three things stay: the kernels before ``varlen_attn``, which pass calls on to torch's after a block,
until :func:`disable`; where the trace of a module in the style ``ContextParallel`` failed, the
rules of ``flex_attention``, until another block ends or :func:`disable`; and in DTensor's tables
the rules of our own ops, which are there from the import on. While enabled,
``torch.compiler.config.cache_key_tag`` carries a suffix, which goes with the override. Graphs that
torch.compile made are guarded, see Note [Guards].

``context_parallel`` blocks install the same override, and decide about calls without DTensors. A
block belongs to the thread that entered it, for another thread's plain tensors may be no shards;
autograd's threads for GPUs, which recompute checkpoints, see the block entered last.
"""

from __future__ import annotations

import contextlib
import threading
import weakref

import torch

from cp_dispatch import causal_bias, compile_cache, graph_guards, hf_masks, override, reentrant
from cp_dispatch._compat import (
    dynamo_traces,
    forget_resolved_kernels,
    in_backward,
    run_uncompiled,
    when_traced,
    withdraw,
)
from cp_dispatch.flex import install as flex
from cp_dispatch.options import Options, OptionStack, Scope
from cp_dispatch.plain_context import PlainContext
from cp_dispatch.varlen import install as varlen

_lock = threading.RLock()
_stack = OptionStack()
_contexts = OptionStack()  # of PlainContext
_installed: list[torch.library.Library] = []


@run_uncompiled
def enable(schedule: str = "auto", layout=None) -> None:
    """Run attention on sequence-sharded DTensors context-parallel, in the whole process:
    ``F.scaled_dot_product_attention``, ``flex_attention`` and ``varlen_attn``.

    Calling it again replaces the options. Inside ``with enabled(...)`` it holds until the end
    of that block.

    Args:
        schedule: of ``F.scaled_dot_product_attention``; ``flex_attention`` and ``varlen_attn`` have
            fewer to choose from, see ``docs/`` in the package.

            - ``"auto"``: the fastest by prediction or by rules; :func:`cp_dispatch.explain` tells.
            - ``"ring"``: keys travel. Causal work in natural order is balanced by exchanging
              half-shards with the mirror rank where that pays (``"natural_ring"``: never,
              ``"mirrored_ring"``: always, where the lengths allow it).
            - ``"gather"``: all keys on every rank, where their shards are alike, else a ring.
            - ``"one_call"``: the same for one kernel call on each rank, for short shards.
            - ``"ulysses"``: heads by all-to-all, with at least as many query heads as ranks and no
              mask that differs by row, else a ring.
            - ``"hybrid"``: heads among the ranks of the last mesh dim that shares the sequence, or
              of a part of the only one (``"hybrid:4"``: of 4 consecutive ranks), and a ring across.
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


@run_uncompiled
def disable() -> None:
    """Put torch back exactly as it was. Inside ``with enabled(...)``, until the block's end."""
    with _lock:
        _stack.set(None)
        _sync()
        if not _installed:
            flex.remove()
            varlen.remove()


def is_enabled() -> bool:
    """Whether a call made here and now would be handled."""
    return _stack.current() is not None


@contextlib.contextmanager
def enabled(schedule: str = "auto", layout=None):
    """:func:`enable` for the length of a ``with`` block or, as a decorator, of a function.

    Blocks nest: the end of the inner one restores the outer one's options, also when it raises.
    Several threads may each have their own block. Arguments and errors are those of
    :func:`enable`.
    """
    scope = _enter(schedule, layout)
    try:
        yield
    finally:
        _leave(scope)


@contextlib.contextmanager
def enabled_for_shards(schedule: str, layout):
    """:func:`enabled` around DTensors that are made of a model's plain shards."""
    scope = _enter(schedule, layout, of_shards=True)
    try:
        yield
    finally:
        _leave(scope)


# Not in the generators, which dynamo goes into: a block inside a compiled function.


@run_uncompiled
def _enter(schedule: str, layout, of_shards: bool = False) -> Scope:
    options = _checked(schedule, layout, of_shards)
    with _lock, _undone_on_error():
        scope = _stack.push(options)
        _sync()
    return scope


@run_uncompiled
def _leave(scope: Scope) -> None:
    with _lock:
        _stack.remove(scope)
        _sync()


def current_options() -> Options | None:
    """Options that hold here and now, None when off."""
    return _stack.current()


@contextlib.contextmanager
def plain_shards(context: PlainContext):
    """Take plain tensors for this rank's shards inside the block, in this thread."""
    scope = _enter_plain(context)
    try:
        yield
    finally:
        _leave_plain(scope)


@run_uncompiled
def _enter_plain(context: PlainContext) -> Scope:
    _checked(context.schedule, None)
    with _lock, _undone_on_error(_contexts):
        scope = _contexts.push(context)
        _sync()
    return scope


@run_uncompiled
def _leave_plain(scope: Scope) -> None:
    with _lock:
        _contexts.remove(scope)
        _sync()


def plain_context() -> PlainContext | None:
    """What holds here and now for plain tensors."""
    if not _contexts.in_use:
        return None
    own = _contexts.own()
    return _contexts.latest() if own is None and _on_a_thread_of_autograd() else own


def flex_rules_for_trace() -> None:
    """Let the graph that this thread traces hold ``flex_attention`` on DTensors, whatever is
    enabled: the style's."""
    override.refuse_beside_torchs()
    trace = weakref.ref(dynamo_traces())

    def done() -> None:
        ended = trace()
        with _lock:
            flex.trace_is_done(ended)

    with _lock:
        if flex.install_for_trace(current_options, plain_context):
            when_traced(done)


def _on_a_thread_of_autograd() -> bool:
    # One that Python did not start.
    return in_backward() and isinstance(threading.current_thread(), threading._DummyThread)


def _checked(schedule: str, layout, of_shards: bool = False) -> Options:
    options = Options(schedule, layout, of_shards)
    override.refuse_beside_torchs()
    return options


@contextlib.contextmanager
def _undone_on_error(stack: OptionStack = _stack):
    """An installation that fails leaves the options and torch as they were."""
    before = stack.snapshot()
    try:
        yield
    except BaseException:
        stack.restore(before)
        _sync()
        raise


def _sync() -> None:
    """Install or remove the override so that it is there exactly while somebody uses it."""
    in_use = _stack.in_use or _contexts.in_use
    if in_use and not _installed:
        graph_guards.override_comes(_is_off)
        library = torch.library.Library("aten", "IMPL")
        try:
            override.install(library, _stack, _contexts, plain_context)
            flex.install(current_options, plain_context, enabled_for_shards)
            varlen.install(current_options, plain_context)
        except BaseException:
            withdraw(library)
            flex.remove()
            varlen.remove()
            raise
        forget_resolved_kernels(override.SDPA)
        causal_bias.install(is_enabled, plain_context)
        _installed.append(library)
    elif _installed and not in_use:
        withdraw(_installed.pop())
        forget_resolved_kernels(override.SDPA)
        flex.remove()
        causal_bias.remove()
        graph_guards.override_goes()
    for part in (hf_masks, reentrant):  # of blocks
        if _contexts.in_use:
            part.install(plain_context)
        else:
            part.remove()
    state = (_stack.latest(), _contexts.latest()) if _contexts.in_use else _stack.latest()
    compile_cache.tag(state if _installed else None)


def _is_off() -> bool:
    return _stack.current() is None and plain_context() is None
