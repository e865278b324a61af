"""Installs the rules of ``flex_attention`` in torch's higher-order ops, and removes them.

Note [Indexing with DTensors]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Dynamo traces the mods with indices that it makes from the query; if that is a DTensor, they are
0-dim DTensors. A mod may index a plain captured tensor with them, ``documents[q_idx]``, and DTensor
refuses to mix the two. So while dynamo traces, and for 0-dim indices only, such an index is
replaced by its plain value, which is the same on every rank. The resulting graph is the same.
"""

from __future__ import annotations

import weakref

import torch
from torch.distributed.tensor import DTensor

from cp_dispatch._compat import (
    PLAIN_KEYS,
    add_subclass_rule,
    dynamo_traces,
    local_tensor,
    plain_kernel,
    remove_subclass_rule,
    set_plain_kernel,
    withdraw,
)
from cp_dispatch.flex import plain
from cp_dispatch.flex.remember import never_mind, when_none_is_left
from cp_dispatch.flex.rule import BACKWARD, FORWARD, rules
from cp_dispatch.graphs import results as graph_results

_replaced: list[tuple] = []  # kernels that ours run in front of
_rules_of_torch: list[torch.library.Library] = []  # with the rules of ordinary ops, while in use
_traces = weakref.WeakSet()  # traces that need the rules


def install(current_options, plain_context, enabled) -> None:
    """Add the rules.

    ``plain_context`` and ``enabled`` are for calls on plain shards, see
    :mod:`cp_dispatch.flex.plain`.
    """
    for key in PLAIN_KEYS:
        kernel = plain_kernel(FORWARD, key)
        _replaced.append((key, kernel))
        set_plain_kernel(FORWARD, key, plain.before(kernel, FORWARD, plain_context, enabled))
    _add_rules(current_options, plain_context)
    graph_results.install()


def install_for_trace(current_options, plain_context) -> bool:
    """Add only the rules, for this thread's trace, even if they are removed for others meanwhile.
    Returns whether this is new for the trace."""
    trace = dynamo_traces()
    if trace in _traces:
        return False
    _traces.add(trace)
    _add_rules(current_options, plain_context)
    return True


def trace_is_done(trace) -> None:
    """Undo :func:`install_for_trace` if nothing else needs the rules; None: the trace is gone."""
    if trace is not None:
        _traces.discard(trace)
    if not _replaced:
        _remove_rules()


def remove() -> None:
    """Remove the rules; the backward's rule is removed as soon as no forward needs it any more."""
    graph_results.remove()
    while _replaced:
        set_plain_kernel(FORWARD, *_replaced.pop())
    _remove_rules()


def _remove_rules() -> None:
    if _rules_of_torch and not len(_traces):
        withdraw(_rules_of_torch.pop())
        remove_subclass_rule(FORWARD, DTensor)
        when_none_is_left(lambda: remove_subclass_rule(BACKWARD, DTensor))


def _add_rules(current_options, plain_context) -> None:
    never_mind()
    if _rules_of_torch:
        return
    library = torch.library.Library("aten", "IMPL")
    _rules_of_torch.append(library)
    for op, rule in zip((FORWARD, BACKWARD), rules(current_options, plain_context), strict=True):
        add_subclass_rule(op, DTensor, rule)
    torch.library.register_torch_dispatch("aten::index.Tensor", DTensor, _index, lib=library)


def _index(cls, func, types, args=(), kwargs=None):
    """See Note [Indexing with DTensors]."""
    tensor, indices = args
    if (
        kwargs
        or isinstance(tensor, DTensor)
        or dynamo_traces() is None
        or not all(x is None or not isinstance(x, DTensor) or x.ndim == 0 for x in indices)
    ):
        return NotImplemented
    return func(tensor, [local_tensor(x) if isinstance(x, DTensor) else x for x in indices])
