"""DTensor sharding rules of the ops: input and output placements.

One rule covers all ops and any mesh. Per mesh dim::

    query      key, value   runs with                      results
    Shard(0)   any          Shard(0), all of them          Shard(0)   batch, e.g. data parallel
    Shard(1)   any          Shard(1), all of them          Shard(1)   heads, e.g. tensor parallel
    Shard(2)   Replicate()  key, value Replicate()         as the inputs: each rank has all keys
    Shard(2)   other        Shard(2), all of them          Shard(2)   the ring
    other      Shard(2)     query Replicate()              as the inputs: decoding
    other      other        Replicate(), all of them       Replicate()

Output, logsumexp and their gradients have the placements of the query, dK and dV those of the key.
attn_mask follows the query on dims that do not broadcast, and has all its columns on every rank; in
a layout it may have all its rows too. Its gradient is a sum over the ranks of a mesh dim that
shards a dim which the mask broadcasts or has whole.

Inputs with other placements are redistributed by DTensor before the op runs (a replicated key
beside a sharded query is cut locally). :mod:`cp_dispatch.planning.decide` decides which calls reach
the ops; the rule only defines what they mean.
"""

from __future__ import annotations

import torch
from torch.distributed.tensor import Partial, Replicate, Shard

from cp_dispatch._compat import (
    DTensorSpec,
    OpSchema,
    OpSpec,
    OpStrategy,
    RuntimeSchemaInfo,
    argument_names,
    generate_redistribute_costs,
    register_op_strategy,
)
from cp_dispatch.backends import BACKENDS
from cp_dispatch.ops import backward_op, forward_op

SEQUENCE_DIM = 2


def target_placements(query, key, value) -> tuple[tuple, tuple]:
    """Placements, per mesh dim, of the query and of key and value while an op runs.

    The arguments are their present placements. The rule and the plan, and so the schedule, agree
    because they all use this function.
    """
    pairs = [_targets(*placements) for placements in zip(query, key, value, strict=True)]
    return tuple(q for q, _ in pairs), tuple(k for _, k in pairs)


def _targets(query, key, value):
    sequence = Shard(SEQUENCE_DIM)
    if query == sequence:
        whole = isinstance(key, Replicate) and isinstance(value, Replicate)
        return query, Replicate() if whole else sequence
    if type(query) is Shard and query.dim < SEQUENCE_DIM:
        return query, query
    return Replicate(), sequence if sequence in (key, value) else Replicate()


def sequence_kinds(query, key, value) -> dict[int, str]:
    """For each mesh dim over which some sequence is sharded, the schedule that it implies."""
    sequence = Shard(SEQUENCE_DIM)
    names = {
        (True, True): "ring",
        (True, False): "replicated_keys",
        (False, True): "replicated_queries",
    }
    targets = zip(*target_placements(query, key, value), strict=True)
    kinds = {dim: names.get((q == sequence, k == sequence)) for dim, (q, k) in enumerate(targets)}
    return {dim: kind for dim, kind in kinds.items() if kind is not None}


def mask_placements(query_target, mask_shape, whole_rows: bool = False) -> tuple:
    """The placement, per mesh dim, of a mask ``(B or 1, H or 1, Sq or 1, Sk or 1)``.

    With ``whole_rows`` every rank has all rows also where it owns only some of the query's.
    """
    return tuple(
        p if isinstance(p, Shard) and not _is_whole(p, mask_shape, whole_rows) else Replicate()
        for p in query_target
    )


def mask_grad_placements(query_target, key_target, mask_shape, whole_rows: bool = False) -> tuple:
    """The placement, per mesh dim, of the gradient of such a mask: a sum over ranks that share
    what it broadcasts or has whole, or, when they have all rows, its columns."""
    return tuple(
        Partial() if (q != k if q == Replicate() else _is_whole(q, mask_shape, whole_rows)) else q
        for q, k in zip(query_target, key_target, strict=True)
    )


def _is_whole(placement: Shard, mask_shape, whole_rows: bool) -> bool:
    return mask_shape[placement.dim] == 1 or (whole_rows and placement.dim == SEQUENCE_DIM)


def _strategy(query_index: int, mask_index: int, order_index: int, backward: bool):
    """The rule of an op whose query, mask and mask_order are its arguments of these indices; the
    seed of dropout, on every rank, follows the mask."""

    def strategy(op_schema: OpSchema) -> OpStrategy:
        args = [
            x.strategies[0].output_spec if isinstance(x, OpStrategy) else None
            for x in op_schema.args_schema
        ]
        query, mask = args[query_index], args[mask_index]
        key, value = args[query_index + 1], args[query_index + 2]
        target, key_target = target_placements(query.placements, key.placements, value.placements)
        mesh = query.mesh
        wanted = [target] * len(args)
        wanted[query_index + 1] = wanted[query_index + 2] = key_target
        results = [target, target]
        wanted[mask_index + 1] = (Replicate(),) * mesh.ndim
        whole_rows = "rows" not in op_schema.args_schema[order_index]
        if mask is not None:
            wanted[mask_index] = mask_placements(target, mask.shape, whole_rows)
        if backward:
            mask_grad = (
                (Replicate(),) * mesh.ndim
                if mask is None
                else mask_grad_placements(target, key_target, mask.shape, whole_rows)
            )
            results = [target, key_target, key_target, mask_grad]
        inputs = [
            DTensorSpec(mesh, placements, tensor_meta=given.tensor_meta)
            for given, placements in zip(args, wanted, strict=True)
            if given is not None
        ]
        costs = [
            generate_redistribute_costs(x, spec)
            for x, spec in zip(op_schema.args_strategy, inputs, strict=True)
        ]
        outputs = tuple(DTensorSpec(mesh, placements) for placements in results)
        return OpStrategy(
            [OpSpec(output_specs=outputs, input_specs=inputs, redistribute_cost=costs)]
        )

    return strategy


def _register(op: torch._ops.OpOverload, backward: bool) -> None:
    names = argument_names(op)
    query, mask, order = map(names.index, ("query", "attn_mask", "mask_order"))
    # Of the non-tensor arguments, the rule depends on the mask's order and those after it, not on
    # the layout: torch's cache drops nothing, and every step may bring a new layout.
    register_op_strategy(op, schema_info=RuntimeSchemaInfo(static_argnum=order))(
        _strategy(query, mask, order, backward)
    )


# Not the public register_sharding: its cache key holds only int arguments, and mask_order is a str.
for _name in BACKENDS:
    _register(forward_op(_name), False)
    _register(backward_op(_name), True)
