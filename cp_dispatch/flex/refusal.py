"""Collects every reason to refuse a ``flex_attention`` call, each with what to do instead.

As in :mod:`cp_dispatch.planning.refusal`, the checks use only what all ranks know, so all refuse in
the same way.
"""

from __future__ import annotations

import math

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from cp_dispatch.call import sharded_dims
from cp_dispatch.flex.call import FlexCall, global_shape
from cp_dispatch.layouts import Balancer, chunk_spans
from cp_dispatch.planning.layout_rules import (
    length_refusals,
    named,
    ranks_refusals,
    shares_refusals,
)
from cp_dispatch.planning.refusal import (
    ascends,
    form_refusals,
    grouped_heads_refusals,
    label,
    order_refusals,
)

SEQUENCE = Shard(2)


def refusals(call: FlexCall, layout: Balancer | None) -> list[str]:
    """All reasons why the call is not supported; empty if it is."""
    reasons = form_refusals(call)
    if reasons:
        return reasons
    reasons = [*_placement_refusals(call), *_shape_refusals(call), *_mask_refusals(call)]
    reasons += [r for name, x in call.captured.items() for r in _captured_refusals(call, name, x)]
    ring = sharded_dims(call.query, 2)
    reasons += order_refusals(call.query.device_mesh, ring)
    if layout is not None and not reasons:
        reasons = _layout_refusals(call, layout, ring)
    return reasons


def _placement_refusals(call: FlexCall) -> list[str]:
    reasons = []
    query, mesh = call.query, call.query.device_mesh
    for dim, wanted in enumerate(query.placements):
        where = label(query, dim)
        if type(wanted) not in (Shard, Replicate) or getattr(wanted, "dim", 0) > 2:
            reasons.append(
                f"query is {wanted} on {where}; supported are Shard(0), Shard(1), Shard(2) and "
                "Replicate()"
            )
            continue
        for name in ("key", "value"):
            placement = getattr(call, name).placements[dim]
            if placement == wanted or (wanted == SEQUENCE and placement == Replicate()):
                continue
            also = " or Replicate()" if wanted == SEQUENCE else ""
            reasons.append(
                f"{name} is {placement} on {where}, where query is {wanted}; redistribute it to "
                f"{wanted}{also}"
            )
        if call.key.placements[dim] != call.value.placements[dim]:
            reasons.append(
                f"key is {call.key.placements[dim]} on {where}, value is "
                f"{call.value.placements[dim]}; give them the same placement"
            )
    kinds = {call.key.placements[dim] == SEQUENCE for dim in sharded_dims(query, 2)}
    if len(kinds) > 1:
        reasons.append(
            "key is sharded along the sequence on only some of the mesh dims on which query is, "
            f"{call.key.placements} and {query.placements}; place key and value like the query"
        )
    if call.query.shape[1] != call.key.shape[1]:
        ranks = math.prod(mesh.size(dim) for dim in sharded_dims(query, 1))
        reasons += grouped_heads_refusals(call, ranks)
    return reasons


def _shape_refusals(call: FlexCall) -> list[str]:
    reasons = []
    query, key, value = (global_shape(x) for x in call.tensors.values())
    if key[:3] != value[:3]:
        reasons.append(f"key and value must agree in all but the last dim, got {key} and {value}")
    if query[0] != key[0] and sharded_dims(call.query, 0):
        reasons.append(
            f"query has {query[0]} batch rows, key {key[0]}, and the batch is sharded; expand key "
            "and value to the query's"
        )
    return reasons


def _mask_refusals(call: FlexCall) -> list[str]:
    tensors = [x for x in call.mask.lists if x is not None]
    if any(isinstance(x, DTensor) for x in tensors):
        return [
            "block_mask holds DTensors; make it from plain tensors that are the same on every rank "
            "(create_block_mask, called without DTensors), or with cp_dispatch.create_cp_block_mask"
        ]
    reasons = []
    batch, heads = call.query.shape[:2]
    given = tuple(call.mask.lists.kv_num.shape[:2])
    if given[0] not in (1, batch) or given[1] not in (1, heads):
        reasons.append(
            f"block_mask is for {given[0]} batch rows and {given[1]} heads, but query has {batch} "
            f"and {heads} over all ranks; make it for these numbers, or for 1 (None)"
        )
    return reasons


def _captured_refusals(call: FlexCall, name: str, x: torch.Tensor) -> list[str]:
    if not isinstance(x, DTensor):
        return []
    reasons = []
    if x.device_mesh != call.query.device_mesh:
        reasons.append(
            f"{name} is on {x.device_mesh}, query on {call.query.device_mesh}; put both on the "
            "same mesh"
        )
    if not all(type(p) in (Shard, Replicate, Partial) for p in x.placements):
        reasons.append(
            f"{name} has placements {x.placements}; supported are Shard(dim), Replicate() and "
            "Partial()"
        )
    reasons += [
        f"{name} is {placed} on {label(x, dim)}, whose ranks are not in ascending order, so "
        "DTensor would assemble it in a different order; replicate it, or use a mesh with "
        "ascending ranks"
        for dim, placed in enumerate(x.placements)
        if isinstance(placed, Shard) and not ascends(x.device_mesh, (dim,))
    ]
    return reasons


def _layout_refusals(call: FlexCall, layout: Balancer, ring: tuple[int, ...]) -> list[str]:
    shape = tuple(map(call.query.device_mesh.size, ring))
    if not ring or layout.world_size == 1 == math.prod(shape):
        return []
    reasons = ranks_refusals(layout, shape)
    if reasons:
        return reasons
    lengths = {"query": call.query.shape[2]}
    if SEQUENCE in call.key.placements:
        lengths["key and value"] = call.key.shape[2]
    reasons = length_refusals(layout, lengths) or shares_refusals(layout, shape)
    if layout.rows > 1 and not call.query.shape[0] == call.key.shape[0] == layout.rows:
        reasons.append(
            f"query and key have {call.query.shape[0]} and {call.key.shape[0]} batch rows, but the "
            f"layout is for {layout.rows}, each with its own order"
        )
    for name, x in call.captured.items():
        reasons += _order_refusals(name, x, layout, ring)
    return reasons


def _order_refusals(name, x, layout: Balancer, ring: tuple[int, ...]) -> list[str]:
    """Refuse a captured tensor that is sharded like the sequence but cannot be in the layout."""
    if not isinstance(x, DTensor):
        return []
    dims = {p.dim for i, p in enumerate(x.placements) if i in ring and isinstance(p, Shard)}
    if not dims:
        return []
    fits = all(x.shape[dim] == layout.seq_len for dim in dims) and len(dims) == 1
    own_rows = layout.rows == 1 or (0 not in dims and x.shape[0] == layout.rows)
    if fits and own_rows and _even(x, dims, layout):
        return []
    return [
        f"{name}, {list(x.shape)} with placements {x.placements}, is sharded over the ranks that "
        f"share the sequence, so it should be in the layout, {named(layout)}, but it cannot be; "
        "replicate it, in natural order"
    ]


def _even(x: DTensor, dims, layout: Balancer) -> bool:
    shape = [
        x.device_mesh.size(i)
        for i, p in enumerate(x.placements)
        if isinstance(p, Shard) and p.dim in dims
    ]
    spans = chunk_spans(layout.seq_len, tuple(shape))
    return tuple(sum(s.length for s in own) for own in spans) == layout.shard_lengths
