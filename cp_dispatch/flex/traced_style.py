"""``ContextParallel(attention_type="flex")`` inside graphs of torch.compile.

Note [Flex styles in graphs]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~
In eager mode the style runs the module on DTensors with its options enabled. In a trace, dynamo
makes the DTensors, from equal shards, and the finished graph does not contain them; the enabled
options cannot change there (see Note [Styles in graphs]). Instead the options are identified by a
number that the graph holds and is guarded by. At dynamo's first look at a call of the op they are
recorded for the rules of the op, which run when the graph is traced further
(:mod:`cp_dispatch.flex.traced_calls`). The number is an argument of ``flex_shard``, an op that
further tracing removes. If it does run, the graph was not traced further, and the rules would use
the enabled options, so it raises.
"""

from __future__ import annotations

import weakref

import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from cp_dispatch._compat import count_traced, dynamo_traces, skip_code
from cp_dispatch.errors import ContextParallelError
from cp_dispatch.flex import traced_calls
from cp_dispatch.flex.plain import no_order
from cp_dispatch.flex.style import find_inputs, lengths_of_masks, value_at, with_inputs
from cp_dispatch.graphs import guards as graph_guards
from cp_dispatch.ops import NAMESPACE
from cp_dispatch.options import Options
from cp_dispatch.plain_tensors.context import PlainContext
from cp_dispatch.plain_tensors.traced_style import has_dtensor, map_tensors, number_for
from cp_dispatch.toggle import flex_rules_for_trace

_EXPORTED = "a module in ContextParallel(attention_type='flex') cannot be exported"
_UNEVEN = (
    "flex_attention on plain shards is refused: inside torch.compile ranks cannot exchange their "
    "lengths; use a length that is a multiple of the number of ranks, or do not compile the module"
)
_ATEN = torch.ops.aten.scaled_dot_product_attention
_SDPA = F.scaled_dot_product_attention, _ATEN, _ATEN.default
# A weak reference to the function that returns the block in effect (see
# :mod:`cp_dispatch.plain_tensors.traced_style`), and the sequence dim.
_styles: dict[str, tuple[weakref.ref, int]] = {}
_entered: dict[int, tuple[PlainContext, int]] = {}

library = torch.library.Library(NAMESPACE, "FRAGMENT")
library.define("flex_shard(Tensor query, Tensor key, int style) -> Tensor")


def _flex_shard(query, key, style):
    if dynamo_traces() is None or style not in _entered:
        raise ContextParallelError(
            "this graph has a module in ContextParallel(attention_type='flex'), but its backend "
            "runs the graph as is, or it was made in another process; use a backend that traces "
            'the graph, such as "inductor" or "aot_eager", in this process'
        )
    context, dim = _entered[style]
    # A graph is for one length.
    queries, keys = (int(x.shape[dim]) * context.world_size for x in (query, key))
    if reason := no_order(context, queries, keys):
        raise ContextParallelError(f"flex_attention on plain shards is refused: {reason}")
    traced_calls.know(style, Options(context.schedule, context.layout(queries), True))
    return torch.ops.aten.alias(query)


library.impl("flex_shard", _flex_shard, "CompositeImplicitAutograd")


@torch.compiler.assume_constant_result
def _enter(style: str) -> tuple[int, str]:
    """The number of the block in effect, guarded by the block, and why the module cannot be traced,
    or ""."""
    reference, dim = _styles[style]
    decide = reference()
    graph_guards.note_trace(f"the block of ContextParallel, {style}", decide)
    context = decide()
    number = number_for((context, dim), _entered)
    if torch.compiler.is_exporting():  # in dynamo of torch 2.11 it always is
        return number, _EXPORTED
    if reason := context.unknown_order():
        return number, reason
    if context.uneven:
        return number, _UNEVEN
    flex_rules_for_trace()
    traced_calls.enter(number)
    return number, ""


@torch.compiler.assume_constant_result
def _sdpa_so_far(style: str) -> int:
    return count_traced(_SDPA)


@torch.compiler.assume_constant_result
def _leave(style: str) -> str:
    """Why the traced calls must not run, or ""."""
    return traced_calls.leave()


def traced_forward(names: list[str], seq_dim: int, mesh: DeviceMesh, decide, run, own=None):
    """A forward for modules in the style.

    Args:
        names: the argument names of the module's forward.
        seq_dim: the sequence dim of query, key and value.
        mesh: the mesh of the ranks that share the sequence.
        decide: returns the context of the style's block in effect.
        run: ``run(module, forward, args, kwargs)`` calls the forward in eager mode.
        own: the forward that a module has in place of its class's, as a function of the module.
    """
    style = f"flex{len(_styles)}"
    _styles[style] = weakref.ref(decide), seq_dim
    ranks = mesh.size()

    def original(self, *args, **kwargs):
        return (own or type(self).forward)(self, *args, **kwargs)

    def traced(self, *args, **kwargs):
        if torch.compiler.is_dynamo_compiling():
            return original(self, *args, **kwargs)
        # This runs in eager mode, so there was a graph break inside.
        return run(self, original, args, kwargs)

    skip_code(traced)

    def forward(self, *args, **kwargs):
        if not torch.compiler.is_dynamo_compiling():
            if torch.compiler.is_exporting():
                raise ContextParallelError(_EXPORTED)
            return run(self, original, args, kwargs)
        if has_dtensor((args, kwargs)):
            return run(self, original, args, kwargs)  # a graph break, because they need a block
        places = find_inputs(type(self).__name__, names, args, kwargs)
        number, reason = _enter(style)
        if reason:
            raise ContextParallelError(reason)
        if any(length % ranks for length in lengths_of_masks(args, kwargs)):
            raise ContextParallelError(_UNEVEN)
        given = [value_at(place, args, kwargs) for place in places]
        given[0] = torch.ops.cp_dispatch.flex_shard(given[0], given[1], number)
        given = [
            DTensor.from_local(x, mesh, [Shard(seq_dim % x.ndim)], run_check=False) for x in given
        ]
        args, kwargs = with_inputs(places, given, args, kwargs)
        before = _sdpa_so_far(style)
        output = traced(self, *args, **kwargs)
        if torch.compiler.is_dynamo_compiling():
            if reason := _leave(style):
                raise ContextParallelError(reason)
            if _sdpa_so_far(style) > before:
                raise ContextParallelError(
                    "a compiled module in ContextParallel(attention_type='flex') calls "
                    "scaled_dot_product_attention too. Do not compile the module"
                )
        return map_tensors(plain, output)

    forward.decide = decide  # to hold it
    return forward


def plain(x: torch.Tensor) -> torch.Tensor:
    return x.to_local() if isinstance(x, DTensor) else x
