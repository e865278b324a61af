"""``flex_attention`` on plain tensors that are this rank's shards, inside ``context_parallel``.

Torch compares the lengths of a block mask with those of the query before it calls the op. So inside
a block a mask has this rank's lengths, this rank's rows of blocks and the columns of all keys;
``context_parallel`` turns each ``BlockMask`` among its buffers into such a mask. The kernels here
run before the op's plain ones and check for a block. A call on shards becomes a differentiable call
on DTensors, also in a trace, whose finished graph no longer contains the DTensors. The graph's own
call of the op, on local tensors, would come here again if the graph ran it as is, so inductor has
to compile the graph.
"""

from __future__ import annotations

import contextlib
import threading

import torch
from torch.distributed.tensor import DTensor
from torch.nn.attention.flex_attention import BlockMask

from cp_dispatch._compat import compiles_for_inductor, dynamo_traces, is_fake, is_tracing
from cp_dispatch.agreement import tell_refusal
from cp_dispatch.errors import ContextParallelError
from cp_dispatch.flex.mask_tuple import MaskTuple
from cp_dispatch.flex.style import as_dtensors, global_lengths
from cp_dispatch.graphs.checkpoints import attended
from cp_dispatch.graphs.compile_cache import note_group
from cp_dispatch.graphs.guards import note_trace
from cp_dispatch.groups import ring_group_name
from cp_dispatch.plain_tensors.context import PlainContext
from cp_dispatch.plain_tensors.sharded_buffers import overwritten_by_ddp

_thread = threading.local()


def before(kernel, op, plain_context, enabled):
    """A kernel of ``op`` that runs in front of torch's ``kernel`` and handles plain shards.

    ``plain_context()`` returns the block in effect, ``enabled`` is the scope of options.
    """

    def flex_attention(query, key, value, *arguments):
        tensors = query, key, value
        if any(isinstance(x, DTensor) for x in tensors) or is_inside():
            return kernel(*tensors, *arguments)
        traced = dynamo_traces() is not None
        if traced:
            note_trace("the block of context_parallel", plain_context, attended)
        context = plain_context()
        if context is None or context.world_size == 1:
            return kernel(*tensors, *arguments)
        if any(map(is_fake, tensors)):
            if traced:  # torch computes its cache keys next, and they must differ between ranks
                note_group(ring_group_name(context.mesh, (0,)), context)
            return kernel(*tensors, *arguments)
        return _attend(context, op, enabled, tensors, *arguments)

    return flex_attention


def _attend(
    context: PlainContext, op, enabled, tensors, score_mod, block_mask, scale, kernel_options, *rest
):
    attended(context, by_order=True)
    if is_tracing() and context.uneven:
        _refuse(
            context,
            "inside torch.compile ranks cannot exchange their lengths; use a length that is a "
            "multiple of the number of ranks",
        )
    if is_tracing() and not compiles_for_inductor():
        _refuse(
            context,
            "in a graph that inductor does not compile, running the graph would call it again; use "
            'the backend "inductor", or DTensors',
        )
    if reason := context.unknown_order() or overwritten_by_ddp(context.mesh):
        _refuse(context, reason)
    # Ints, also in a trace, because a graph is for one length.
    lengths = list(map(int, global_lengths(list(tensors), context.mesh, 2, context.uneven)))
    if reason := no_order(context, *lengths[:2]) or no_columns_of_all_keys(block_mask, lengths[1]):
        _refuse(context, reason)
    wrapped, block_mask, layout = on_dtensors(context, tensors, block_mask, lengths)
    with inside(), enabled(schedule=context.schedule, layout=layout):
        # A copy, because a trace's dict must not be written to (see remember.py).
        results = op(*wrapped, score_mod, block_mask, scale, dict(kernel_options), *rest)
    return tuple(x.to_local() for x in results)


def no_order(context: PlainContext, queries: int, keys: int) -> str | None:
    """Why queries and keys of these lengths are not known to be in one order, None if they are."""
    orders = [context.layout(length) for length in (queries, keys)]
    unknown = context.unknown_order(queries, keys)
    if unknown or orders[0] == orders[1] or context.mesh.size() == 1:
        return unknown
    named = ("natural" if order is None else repr(order) for order in orders)
    return (
        "the mask and the mods go by positions, but the {} queries are in the order {} and the {} "
        "keys in the order {}; shard both in natural order, with balancer=None"
    ).format(*(x for pair in zip((queries, keys), named, strict=True) for x in pair))


def no_columns_of_all_keys(block_mask: tuple, keys: int) -> str | None:
    """Why a mask cannot be this rank's rows of the whole mask, None if it can."""
    columns = -(-keys // int(block_mask[-2]))
    given = MaskTuple(block_mask).lists.kv_indices.shape[3]
    if given == columns:
        return None
    return (
        f"the block mask has {given} columns of blocks, but all {keys} keys make {columns}; pass "
        "the BlockMask of the whole sequence as one of the buffers of context_parallel"
    )


def on_dtensors(context: PlainContext, tensors, block_mask: tuple, lengths: list[int]):
    """The call on DTensors for a call on shards: query, key and value, mask, layout."""
    places = [(i, None) for i in range(3)]
    wrapped, _ = as_dtensors(places, tensors, {}, context.mesh, 2, lengths)
    return wrapped, (lengths[0], lengths[1], *block_mask[2:]), context.layout(lengths[0])


def is_inside() -> bool:
    """Whether this thread is in :func:`inside`."""
    return getattr(_thread, "inside", False)


@contextlib.contextmanager
def inside():
    """In this context, calls on plain tensors are local calls of the rules, not calls on shards."""
    before = is_inside()
    _thread.inside = True
    try:
        yield
    finally:
        _thread.inside = before


def _refuse(context: PlainContext, reason: str):
    error = ContextParallelError(
        f"flex_attention on plain shards inside context_parallel is refused: {reason}."
    )
    tell_refusal(context.mesh, error)
    raise error


def local_form(own: BlockMask, rows: int, keys: int) -> dict:
    """The fields of a rank's rows of a mask, for a query and keys of this rank's lengths."""
    return {**vars(own), "seq_lengths": (rows, keys)}


@torch.no_grad()
def swap(mask: BlockMask, fields: dict) -> dict:
    """Replace a mask's fields; returns the previous ones."""
    before = dict(vars(mask))
    vars(mask).clear()
    vars(mask).update(fields)
    return before
