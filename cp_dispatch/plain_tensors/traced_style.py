"""The style ``ContextParallel`` inside graphs of torch.compile.

Note [Styles in graphs]
~~~~~~~~~~~~~~~~~~~~~~~
In eager mode the style runs the module in a block. A trace cannot: a block changes state of this
process, and inside a checkpoint dynamo allows no such change. In a trace the module's inputs are
marked instead, as tensors of a subclass that only dynamo sees. The subclass replaces a call of
``scaled_dot_product_attention`` by ``attend_shards``, an op that carries the number of the block
that eager mode would have entered. Further tracing replaces that op by the ring op. The graph is
guarded by everything that determines the block.

In places dynamo loses the mark, for example in ``torch.cat`` of a tuple. A module in which no call
of attention was seen, or one on unmarked tensors, therefore raises; without ``fullgraph=True`` it
then runs in eager mode. A module with a graph break inside runs in eager mode too, because marked
tensors cannot be inputs of a graph.
"""

from __future__ import annotations

import dataclasses
import hashlib
import weakref
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor

from cp_dispatch._compat import count_traced, skip_code, without_subclass
from cp_dispatch.errors import ContextParallelError
from cp_dispatch.graphs import guards as graph_guards
from cp_dispatch.ops import NAMESPACE
from cp_dispatch.plain_tensors.context import PlainContext
from cp_dispatch.plain_tensors.local_call import attend_plain

_ATEN = torch.ops.aten.scaled_dot_product_attention
_SDPA = F.scaled_dot_product_attention, _ATEN, _ATEN.default
_LOCAL = *_SDPA, torch.ops.higher_order.flex_attention  # a graph would run these on a shard alone
_contexts: dict[int, PlainContext] = {}
# By the names of the classes of marked tensors. Dynamo would make numbers dynamic as soon as it
# sees a second one in a module that FSDP2 shards.
# Weak references to functions that return the context of a class's block in effect: they refer to
# the style, which has process groups. The forward of its modules holds them.
_decide: dict[str, weakref.ref] = {}
_attended: dict[str, int] = {}  # how many calls of attention were traced

library = torch.library.Library(NAMESPACE, "FRAGMENT")
library.define(
    "attend_shards(Tensor query, Tensor key, Tensor value, Tensor? attn_mask, float dropout_p, "
    "bool is_causal, float? scale, bool enable_gqa, int context) -> Tensor"
)


def _attend_shards(query, key, value, mask, dropout_p, is_causal, scale, enable_gqa, context):
    arguments = query, key, value, mask, dropout_p, is_causal, scale, enable_gqa
    if context not in _contexts:
        raise ContextParallelError(
            "this graph was made in another process, for a ContextParallel style with a mesh or an "
            "order that this process has not traced; export or compile the module in this process"
        )
    result = attend_plain(_contexts[context], *arguments)
    if result is NotImplemented:
        return F.scaled_dot_product_attention(
            query, key, value, mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    return result


library.impl("attend_shards", _attend_shards, "CompositeImplicitAutograd")


class Marked(torch.Tensor):
    """A shard in a trace. Every style has its own subclass."""

    style: str

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in _SDPA:
            with without_subclass():
                return _attend(cls.style, *args, **kwargs).as_subclass(cls)
        return super().__torch_function__(func, types, args, kwargs)

    # Methods that torch implements in Python, which dynamo does not trace on a subclass.

    def split(self, split_size, dim=0):
        return torch.split(self, split_size, dim)

    def unflatten(self, dim, sizes):
        return torch.unflatten(self, dim, sizes)

    def norm(self, p="fro", dim=None, keepdim=False, dtype=None):
        return torch.norm(self, p, dim, keepdim, dtype=dtype)


def _attend(
    style, query, key, value,
    attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False,
):  # fmt: skip
    return torch.ops.cp_dispatch.attend_shards(
        query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, _number_of(style)
    )


@torch.compiler.assume_constant_result
def _number_of(style: str) -> int:
    """The number of the block in effect, guarded by the block."""
    decide = _decide[style]()
    graph_guards.note_trace(f"the block of ContextParallel, {style}", decide)
    _attended[style] += 1
    return number_for(decide(), _contexts)


def number_for(value, known: dict) -> int:
    """A number that represents a value in graphs and is its key in ``known`` from now on. It is the
    same in every process, because graphs are cached on disk and exported."""
    number = int(hashlib.sha256(repr(value).encode()).hexdigest()[:15], 16)
    while known.get(number, value) != value:  # meshes of different ranks may have the same repr
        number += 1
    known[number] = value
    return number


@torch.compiler.assume_constant_result
def _attention_so_far(style: str) -> tuple[int, int]:
    """How many calls of attention have been traced so far: on marked tensors, and on others."""
    return _attended[style], count_traced(_LOCAL)


def traced_forward(decide, run, own=None):
    """A forward for modules in a style.

    Args:
        decide: returns the context of the style's block in effect.
        run: ``run(module, forward, args, kwargs)`` calls the forward in eager mode.
        own: the forward that a module has in place of its class's, as a function of the module.
    """
    style = f"Marked{len(_decide)}"
    _decide[style] = weakref.ref(decide)
    _attended[style] = 0
    cls = type(style, (Marked,), {"style": style})

    def original(self, *args, **kwargs):
        return (own or type(self).forward)(self, *args, **kwargs)

    def traced(self, *args, **kwargs):
        if torch.compiler.is_dynamo_compiling():
            return original(self, *args, **kwargs)
        # Called in eager mode, so there was a graph break inside.
        args, kwargs = _all_unmarked((args, kwargs))
        return run(self, original, args, kwargs)

    skip_code(traced)

    def forward(self, *args, **kwargs):
        # DTensors need a block, also when compiling, which is a graph break.
        if not torch.compiler.is_dynamo_compiling() or has_dtensor((args, kwargs)):
            if torch.compiler.is_exporting():
                raise ContextParallelError(
                    "without dynamo, a module in ContextParallel would be exported with local "
                    "attention; use torch.export.export(..., strict=True), and plain inputs"
                )
            return run(self, original, args, kwargs)
        _refuse_containers("takes", (args, kwargs))
        args, kwargs = map_tensors(lambda x: x.as_subclass(cls), (args, kwargs))
        before, local_before = _attention_so_far(style)
        output = traced(self, *args, **kwargs)
        if torch.compiler.is_dynamo_compiling():
            attended, local = _attention_so_far(style)
            if attended == before or local > local_before:
                raise ContextParallelError(
                    "attention in a compiled module in ContextParallel would be local: the module "
                    "calls no scaled_dot_product_attention; or calls flex_attention, which needs "
                    "attention_type='flex'; or dynamo lost track of the module's inputs, as in "
                    "torch.cat of a tuple (use a list). Otherwise do not compile the module"
                )
        _refuse_containers("returns", output)
        return map_tensors(_unmarked, output)

    forward.decide = decide  # to hold it
    return forward


def _unmarked(tensor: torch.Tensor) -> torch.Tensor:
    if not isinstance(tensor, Marked):
        return tensor
    with without_subclass():
        return torch.ops.aten.alias(tensor)


@torch.compiler.disable
def _all_unmarked(value):
    return map_tensors(_unmarked, value)


def _refuse_containers(verb: str, value) -> None:
    """Refuse containers whose tensors :func:`map_tensors` does not see, since their attention would
    be local."""
    if value is None or isinstance(value, torch.Tensor):
        return  # dynamo of torch 2.11 cannot run the other checks on these
    if isinstance(value, (tuple, list)):
        for x in value:
            _refuse_containers(verb, x)
    elif type(value) is dict:
        for x in value.values():
            _refuse_containers(verb, x)
    elif isinstance(value, Mapping) or dataclasses.is_dataclass(value):
        raise ContextParallelError(
            f"a compiled module in ContextParallel {verb} a {type(value).__name__}; use tensors, "
            "tuples, lists and dicts, or do not compile the module"
        )


def has_dtensor(value) -> bool:
    """Whether nested tuples, lists and dicts contain a DTensor."""
    if isinstance(value, (tuple, list)):
        return any(has_dtensor(x) for x in value)
    if type(value) is dict:
        return any(has_dtensor(x) for x in value.values())
    return isinstance(value, DTensor)


def map_tensors(function, value):
    """Apply ``function`` to every tensor in nested tuples, lists and dicts."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*[map_tensors(function, x) for x in value])
    if type(value) is list or isinstance(value, tuple):  # or torch.Size, torch.return_types.max
        return type(value)([map_tensors(function, x) for x in value])
    if type(value) is dict:
        return {key: map_tensors(function, x) for key, x in value.items()}
    return value
