"""The style ``ContextParallel`` inside graphs of torch.compile.

Note [Styles in graphs]
~~~~~~~~~~~~~~~~~~~~~~~
In eager mode the style runs the module in a block. A trace cannot: what a block changes is state of
this process, and inside a checkpoint dynamo allows no such change. So there the module's inputs are
marked instead, as tensors of a subclass that only dynamo ever sees. It replaces a call
of ``scaled_dot_product_attention`` on them by :data:`attend_shards`, an op that carries the number
of the block that there would have been, and is gone once it has been traced: what is left is the
ring op. The graph is guarded by what decides about that block.

Dynamo loses the mark in places, such as ``torch.cat`` of a tuple; a module in which no call of
attention was seen, or one on tensors without a mark, therefore raises, which without
``fullgraph=True`` means that it runs in eager mode. So does a module with a graph break inside:
marked tensors are no input of a graph.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor

from cp_dispatch import graph_guards
from cp_dispatch._compat import count_traced, skip_code, without_subclass
from cp_dispatch.errors import ContextParallelError
from cp_dispatch.local_call import attend_plain
from cp_dispatch.ops import NAMESPACE
from cp_dispatch.plain_context import PlainContext

_ATEN = torch.ops.aten.scaled_dot_product_attention
_SDPA = F.scaled_dot_product_attention, _ATEN, _ATEN.default
_LOCAL = *_SDPA, torch.ops.higher_order.flex_attention  # what a graph would run on a shard alone
_contexts: dict[int, PlainContext] = {}
# By the names of classes of marked tensors: numbers of theirs would be dynamic to dynamo, once a
# second one is seen in a module that FSDP2 shards.
_decide: dict = {}  # what gives a class's block here and now
_attended: dict[str, int] = {}  # the calls of attention that were traced

library = torch.library.Library(NAMESPACE, "FRAGMENT")
library.define(
    "attend_shards(Tensor query, Tensor key, Tensor value, Tensor? attn_mask, float dropout_p, "
    "bool is_causal, float? scale, bool enable_gqa, int context) -> Tensor"
)


def _attend_shards(query, key, value, mask, dropout_p, is_causal, scale, enable_gqa, context):
    arguments = query, key, value, mask, dropout_p, is_causal, scale, enable_gqa
    if context not in _contexts:
        raise ContextParallelError(
            "this graph was made in another process, for a ContextParallel style on a mesh or in "
            "an order that this process has not traced; export or compile the module here"
        )
    result = attend_plain(_contexts[context], *arguments)
    if result is NotImplemented:
        return F.scaled_dot_product_attention(
            query, key, value, mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    return result


library.impl("attend_shards", _attend_shards, "CompositeImplicitAutograd")


class Marked(torch.Tensor):
    """A shard, in a trace. Every style on a module has a subclass of its own."""

    style: str

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in _SDPA:
            with without_subclass():
                return _attend(cls.style, *args, **kwargs).as_subclass(cls)
        return super().__torch_function__(func, types, args, kwargs)

    # Methods that torch writes in Python, which dynamo does not trace on a subclass.

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
    """The number of the block that holds here and now, with a guard that it goes on to."""
    decide = _decide[style]
    graph_guards.note_trace(f"the block of ContextParallel, {style}", decide)
    _attended[style] += 1
    return number_for(decide(), _contexts)


def number_for(value, known: dict) -> int:
    """A number that graphs hold for a value, under which it is ``known`` from now on: the same in
    every process, for graphs are cached on disk, and exported."""
    number = int(hashlib.sha256(repr(value).encode()).hexdigest()[:15], 16)
    while known.get(number, value) != value:  # meshes of other ranks are the same in words
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
        decide: gives the block that the style is, here and now.
        run: ``run(module, forward, args, kwargs)`` calls the forward in eager mode.
        own: the forward that a module has instead of its class's, as a function of the module.
    """
    style = f"Marked{len(_decide)}"
    _decide[style] = decide
    _attended[style] = 0
    cls = type(style, (Marked,), {"style": style})

    def original(self, *args, **kwargs):
        return (own or type(self).forward)(self, *args, **kwargs)

    def traced(self, *args, **kwargs):
        if torch.compiler.is_dynamo_compiling():
            return original(self, *args, **kwargs)
        # Called for real, so there was a graph break inside.
        args, kwargs = _all_unmarked((args, kwargs))
        return run(self, original, args, kwargs)

    skip_code(traced)

    def forward(self, *args, **kwargs):
        # DTensors need a block, also when compiling, which is a graph break.
        if not torch.compiler.is_dynamo_compiling() or has_dtensor((args, kwargs)):
            if torch.compiler.is_exporting():
                raise ContextParallelError(
                    "a module in ContextParallel is exported as local attention, unless dynamo "
                    "traces it; use torch.export.export(..., strict=True), and plain inputs"
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
                    "attention in a compiled module in ContextParallel would be local, for dynamo "
                    "lost sight of its inputs, as it does in torch.cat of a tuple (not in that of "
                    "a list), or the module calls none, or calls flex_attention, which takes "
                    "attention_type='flex'. Else do not compile the module"
                )
        _refuse_containers("returns", output)
        return map_tensors(_unmarked, output)

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
    """Raise where tensors may be that :func:`map_tensors` does not see, whose attention would be
    local."""
    if isinstance(value, torch.Tensor):
        return  # dynamo of torch 2.11 cannot ask what else it is
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
    """Whether a DTensor is in tuples, lists and dicts."""
    if isinstance(value, (tuple, list)):
        return any(has_dtensor(x) for x in value)
    if type(value) is dict:
        return any(has_dtensor(x) for x in value.values())
    return isinstance(value, DTensor)


def map_tensors(function, value):
    """``function`` of every tensor in tuples, lists and dicts."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if type(value) in (tuple, list):
        return type(value)([map_tensors(function, x) for x in value])
    if isinstance(value, tuple):  # a named one
        return type(value)(*[map_tensors(function, x) for x in value])
    if type(value) is dict:
        return {key: map_tensors(function, x) for key, x in value.items()}
    return value
