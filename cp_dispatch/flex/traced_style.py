"""The style ``ContextParallel(attention_type="flex")`` inside graphs of torch.compile.

Note [Flex styles in graphs]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~
In eager mode the style runs the module on DTensors with its options enabled. In a trace the
DTensors are made by dynamo, of equal shards, and are gone when the graph is done; what is enabled
cannot change there (see Note [Styles in graphs]). The options follow from a number that the graph
holds and is guarded by; dynamo's looks at calls of the op hand them to the rules of the op, which
run when the graph is traced further (:mod:`cp_dispatch.flex.traced_calls`). The number is an
argument of :data:`flex_shard`, an op that is gone then: where it runs for real, nobody traced the
graph further, so that the rules would ask what is enabled.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from cp_dispatch import graph_guards
from cp_dispatch._compat import count_traced, dynamo_traces, skip_code
from cp_dispatch.errors import ContextParallelError
from cp_dispatch.flex import traced_calls
from cp_dispatch.flex.style import find_inputs, lengths_of_masks, value_at, with_inputs
from cp_dispatch.layouts import Balancer
from cp_dispatch.ops import NAMESPACE
from cp_dispatch.options import Options
from cp_dispatch.plain_context import PlainContext
from cp_dispatch.toggle import flex_rules_for_trace
from cp_dispatch.traced_style import has_dtensor, map_tensors, number_for

NO_ORDER = (
    "there is no telling in which order the shards lie, without buffers; pass "
    'balancer="head-tail", a balancer, or None for natural order'
)
_EXPORTED = "a module in ContextParallel(attention_type='flex') cannot be exported"
_UNEVEN = (
    "flex_attention on plain shards is refused: inside torch.compile ranks do not tell each other "
    "their lengths; use a length that the ranks divide, or do not compile the module"
)
_ATEN = torch.ops.aten.scaled_dot_product_attention
_SDPA = F.scaled_dot_product_attention, _ATEN, _ATEN.default
_styles: dict[str, tuple] = {}  # what gives the block here and now, and the sequence dim
_entered: dict[int, tuple[PlainContext, int]] = {}

library = torch.library.Library(NAMESPACE, "FRAGMENT")
library.define("flex_shard(Tensor query, int style) -> Tensor")


def _flex_shard(query, style):
    if dynamo_traces() is None or style not in _entered:
        raise ContextParallelError(
            "this graph holds a module in ContextParallel(attention_type='flex'), and its backend "
            "runs it as it is, or another process made it; use a backend that traces it, as "
            '"inductor" or "aot_eager", in this process'
        )
    context, dim = _entered[style]
    length = int(query.shape[dim]) * context.mesh.size()  # a graph is of one length
    traced_calls.know(style, Options(context.schedule, context.layout(length), True))
    return torch.ops.aten.alias(query)


library.impl("flex_shard", _flex_shard, "CompositeImplicitAutograd")


@torch.compiler.assume_constant_result
def _enter(style: str) -> tuple[int, str]:
    """The number of the block that holds here and now, with a guard that it goes on to, and why
    the module cannot be traced, if so."""
    decide, dim = _styles[style]
    graph_guards.note_trace(f"the block of ContextParallel, {style}", decide)
    context = decide()
    number = number_for((context, dim), _entered)
    if torch.compiler.is_exporting():  # to dynamo of torch 2.11 it is always
        return number, _EXPORTED
    if not context.order_is_known:
        return number, NO_ORDER
    whole = context.balancer.seq_len if isinstance(context.balancer, Balancer) else 0
    if context.uneven or whole % context.mesh.size():
        return number, _UNEVEN
    flex_rules_for_trace()
    traced_calls.enter(number)
    return number, ""


@torch.compiler.assume_constant_result
def _sdpa_so_far(style: str) -> int:
    return count_traced(_SDPA)


@torch.compiler.assume_constant_result
def _leave(style: str) -> str:
    """Why what was traced must not run, if so."""
    return traced_calls.leave()


def traced_forward(names: list[str], seq_dim: int, mesh: DeviceMesh, decide, run, own=None):
    """A forward for modules in the style.

    Args:
        names: of the arguments of the module's forward.
        seq_dim: the sequence dim of query, key and value.
        mesh: of the ranks that share the sequence.
        decide: gives the block that the style is, here and now.
        run: ``run(module, forward, args, kwargs)`` calls the forward in eager mode.
        own: the forward that a module has instead of its class's, as a function of the module.
    """
    style = f"flex{len(_styles)}"
    _styles[style] = decide, seq_dim
    ranks = mesh.size()

    def original(self, *args, **kwargs):
        return (own or type(self).forward)(self, *args, **kwargs)

    def traced(self, *args, **kwargs):
        if torch.compiler.is_dynamo_compiling():
            return original(self, *args, **kwargs)
        # Called for real, so there was a graph break inside.
        return run(self, original, args, kwargs)

    skip_code(traced)

    def forward(self, *args, **kwargs):
        if not torch.compiler.is_dynamo_compiling():
            if torch.compiler.is_exporting():
                raise ContextParallelError(_EXPORTED)
            return run(self, original, args, kwargs)
        if has_dtensor((args, kwargs)):
            return run(self, original, args, kwargs)  # a graph break, for they need a block
        places = find_inputs(type(self).__name__, names, args, kwargs)
        number, reason = _enter(style)
        if reason:
            raise ContextParallelError(reason)
        if any(length % ranks for length in lengths_of_masks(args, kwargs)):
            raise ContextParallelError(_UNEVEN)
        given = [value_at(place, args, kwargs) for place in places]
        given[0] = torch.ops.cp_dispatch.flex_shard(given[0], number)
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

    return forward


def plain(x: torch.Tensor) -> torch.Tensor:
    return x.to_local() if isinstance(x, DTensor) else x
