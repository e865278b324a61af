"""Turns cp_dispatch on and off.

The override (:mod:`cp_dispatch.override`) is removed when its last user ends, together with the
rules of ``flex_attention``, the wrapper around torch's causal biases, and
:mod:`cp_dispatch.graphs.results`. Three things stay longer:

- the kernels in front of ``varlen_attn``, until :func:`disable`; after a block they pass calls on
  to torch's;
- if tracing a ``ContextParallel`` module failed, the rules of ``flex_attention``, until another
  block ends or :func:`disable`;
- the rules of our own ops in DTensor's tables, which are registered at import.

What traces and new process groups replace in torch stays replaced (see ``docs/limits.md``).

While the override is installed, ``torch.compiler.config.cache_key_tag`` carries a suffix. Compiled
graphs are guarded, see Note [Guards].

``context_parallel`` blocks install the same override, and decide about calls without DTensors. A
block belongs to the thread that entered it, because plain tensors of another thread need not be
shards. Autograd's threads for GPUs, which recompute checkpoints, see the block entered last.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator

import torch

from cp_dispatch import causal_bias, override
from cp_dispatch._compat import (
    dynamo_traces,
    forget_resolved_kernels,
    in_backward,
    run_uncompiled,
    when_traced,
    withdraw,
)
from cp_dispatch.flex import install as flex
from cp_dispatch.graphs import checkpoints, compile_cache
from cp_dispatch.graphs import guards as graph_guards
from cp_dispatch.hugging_face import masks as hf_masks
from cp_dispatch.layouts import Balancer
from cp_dispatch.options import Options, OptionStack, Scope
from cp_dispatch.plain_tensors.context import PlainContext
from cp_dispatch.varlen import install as varlen

_lock = threading.RLock()
_stack = OptionStack()
_contexts = OptionStack()  # of PlainContext
_installed: list[torch.library.Library] = []


@run_uncompiled
def enable(schedule: str = "auto", layout: Balancer | None = None) -> None:
    """Make attention on sequence-sharded DTensors context-parallel, for the whole process.

    Applies to ``F.scaled_dot_product_attention``, ``flex_attention`` and ``varlen_attn``. Calling
    it again replaces the options. Inside ``with enabled(...)`` it takes effect until that block
    ends.

    Args:
        schedule: how ``F.scaled_dot_product_attention`` distributes the work. ``flex_attention``
            and ``varlen_attn`` support fewer schedules, see ``docs/`` in the package.

            - ``"auto"``: the fastest one, by prediction or by rules; :func:`cp_dispatch.explain`
              shows which and why.
            - ``"ring"``: keys and values travel from rank to rank. Causal work in natural order is
              balanced by exchanging half-shards with the mirror rank (rank ``W - 1 - r``) where
              that saves time. ``"natural_ring"`` never does so; ``"mirrored_ring"`` always does
              where the lengths allow it.
            - ``"gather"``: every rank gathers all keys and values. Needs keys that every rank owns
              in equally many spans of equal lengths; otherwise falls back to a ring.
            - ``"one_call"``: like ``"gather"``, but each rank makes a single kernel call. For short
              shards. With a mask, dropout or a kernel that cannot do this, falls back to a ring.
            - ``"ulysses"``: exchanges heads by all-to-all. Needs at least as many query heads as
              ranks and no mask that differs by row; otherwise falls back to a ring.
            - ``"hybrid"``: exchanges heads within groups of ranks, with a ring across the groups.
              The groups are the ranks of the last mesh dim that shares the sequence. If only one
              mesh dim does, they are part of it; ``"hybrid:4"`` makes groups of 4 consecutive
              ranks.
        layout: the order of every sharded sequence: None for natural order, or the balancer that
            permuted it (see :func:`cp_dispatch.shard`). With a balancer, causal masks,
            ``attn_mask`` and dropout refer to the original positions.

    Raises:
        ContextParallelError: if an option is unknown, or if torch's own context-parallel
            dispatcher is on.
    """
    options = _checked(schedule, layout)
    with _lock, _undone_on_error():
        _stack.set(options)
        _sync()


@run_uncompiled
def disable() -> None:
    """Restore torch's dispatch exactly as it was. Inside ``with enabled(...)``, until that block
    ends."""
    with _lock:
        _stack.set(None)
        _sync()
        if not _installed:
            flex.remove()
            varlen.remove()


def is_enabled() -> bool:
    """Whether cp_dispatch is enabled in this thread, by :func:`enable` or :func:`enabled`."""
    return _stack.current() is not None


@contextlib.contextmanager
def enabled(schedule: str = "auto", layout: Balancer | None = None) -> Iterator[None]:
    """:func:`enable` within a ``with`` block or, used as a decorator, within a function.

    Blocks nest: leaving the inner one, also by an exception, restores the options of the outer one.
    Each thread may have its own block. Arguments and errors are those of :func:`enable`.
    """
    scope = _enter(schedule, layout)
    try:
        yield
    finally:
        _leave(scope)


@contextlib.contextmanager
def enabled_for_shards(schedule: str, layout):
    """:func:`enabled` for DTensors that were made from a model's plain shards."""
    scope = _enter(schedule, layout, of_shards=True)
    try:
        yield
    finally:
        _leave(scope)


# Not in the generators: dynamo traces those when a block is inside a compiled function.


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
    """The options in effect in this thread, None when off."""
    return _stack.current()


@contextlib.contextmanager
def plain_shards(context: PlainContext):
    """Inside the block, treat this thread's plain tensors as this rank's shards."""
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
    """The ``context_parallel`` block in effect in this thread, None without one."""
    if not _contexts.in_use:
        return None
    own = _contexts.own()
    return _contexts.latest() if own is None and _on_a_thread_of_autograd() else own


def flex_rules_for_trace() -> None:
    """Let the graph that this thread is tracing contain ``flex_attention`` on DTensors, whether or
    not cp_dispatch is enabled. For modules in the style ``ContextParallel``."""
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
    # Autograd's threads are not started by Python.
    return in_backward() and isinstance(threading.current_thread(), threading._DummyThread)


def _checked(schedule: str, layout, of_shards: bool = False) -> Options:
    options = Options(schedule, layout, of_shards)
    override.refuse_beside_torchs()
    return options


@contextlib.contextmanager
def _undone_on_error(stack: OptionStack = _stack):
    """Restore the options and torch if the installation fails."""
    before = stack.snapshot()
    try:
        yield
    except BaseException:
        stack.restore(before)
        _sync()
        raise


def _sync() -> None:
    """Install the override if something uses it, remove it if nothing does."""
    in_use = _stack.in_use or _contexts.in_use
    if in_use and not _installed:
        graph_guards.override_comes(_is_off)
        library = torch.library.Library("aten", "IMPL")
        try:
            override.install(library, _stack, _contexts, plain_context)
            flex.install(current_options, plain_context, enabled_for_shards)
            varlen.install(current_options, plain_context)
            checkpoints.install(current_options, plain_context)
        except BaseException:
            withdraw(library)
            flex.remove()
            varlen.remove()
            checkpoints.remove()
            raise
        forget_resolved_kernels(override.SDPA)
        causal_bias.install(is_enabled, plain_context)
        _installed.append(library)
    elif _installed and not in_use:
        withdraw(_installed.pop())
        forget_resolved_kernels(override.SDPA)
        flex.remove()
        causal_bias.remove()
        checkpoints.remove()
        graph_guards.override_goes()
    if _contexts.in_use or any(options.order is not None for options in _stack.everywhere):
        hf_masks.install(plain_context, current_options)
    else:
        hf_masks.remove()
    state = (_stack.latest(), _contexts.latest()) if _contexts.in_use else _stack.latest()
    compile_cache.tag(state if _installed else None)


def _is_off() -> bool:
    return _stack.current() is None and plain_context() is None
