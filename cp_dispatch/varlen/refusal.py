"""Collects every reason to refuse a ``varlen_attn`` call, each with what to do instead.

As in :mod:`cp_dispatch.planning.refusal`, the checks use only what all ranks know, so all refuse in
the same way. Errors in the documents themselves are found by :mod:`cp_dispatch.varlen.documents`,
also before any communication, because every rank reads the same lengths.
"""

from __future__ import annotations

import math

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from cp_dispatch.call import sharded_dims
from cp_dispatch.layouts import Balancer
from cp_dispatch.planning.layout_rules import (
    IF_NATURAL,
    length_refusals,
    named,
    ranks_refusals,
    shares_refusals,
)
from cp_dispatch.planning.refusal import (
    form_refusals,
    grouped_heads_refusals,
    label,
    order_refusals,
    scatter_refusals,
)
from cp_dispatch.varlen.call import VarlenCall

_INFERENCE_ONLY = {
    "seqused_k": "pass lengths as cu_seq_k",
    "block_table": "pass packed keys",
}
#: The dtypes that FlashAttention's kernel supports.
_CUDA_DTYPES = (torch.float16, torch.bfloat16)
_MOST_HEAD_DIM = 256


def refusals(call: VarlenCall, layout: Balancer | None) -> list[str]:
    """All reasons why the call is not supported; empty if it is."""
    reasons = [
        f"{name} is not supported across ranks; {instead}"
        for name, instead in _INFERENCE_ONLY.items()
        if getattr(call, name) is not None
    ]
    if call.num_splits not in (None, 1):
        reasons.append(f"num_splits is {call.num_splits}; pass 1 to split nothing, or leave it out")
    form = form_refusals(call)
    if form:
        return reasons + form
    reasons += [*_shape_refusals(call), *_starts_refusals(call)]
    if all(x.ndim == 3 for x in call.tensors.values()):
        reasons += _placement_refusals(call)
    ring = sharded_dims(call.query, 0)
    reasons += order_refusals(call.query.device_mesh, ring)
    if layout is not None and ring and not reasons:
        reasons = _layout_refusals(call, layout, ring)
    return reasons


def placements_of_keys(query_placements) -> tuple:
    """The placements of key and value while a call runs: those of the query."""
    return tuple(p if isinstance(p, Shard) else Replicate() for p in query_placements)


def _shape_refusals(call: VarlenCall) -> list[str]:
    reasons = [
        f"{name} must have shape [T, H, D], got {list(x.shape)}"
        for name, x in call.tensors.items()
        if x.ndim != 3
    ]
    if reasons:
        return reasons
    query, key, value = (tuple(map(int, x.shape)) for x in call.tensors.values())
    if key != value:
        reasons.append(f"key and value must have the same shape, got {list(key)} and {list(value)}")
    if query[2] != key[2]:
        reasons.append(f"head dims differ: query {query[2]}, key {key[2]}")
    if not key[1] or query[1] % key[1]:
        reasons.append(f"query's {query[1]} heads are not a multiple of key's {key[1]}")
    dtype = call.query.dtype
    if not dtype.is_floating_point:
        reasons.append(f"query is {dtype}; cast to a floating dtype")
    if call.query.device_mesh.device_type == "cuda":
        if dtype not in _CUDA_DTYPES:
            reasons.append(f"query is {dtype}; torch's kernel supports float16 and bfloat16")
        if query[2] % 8 or query[2] > _MOST_HEAD_DIM:
            reasons.append(
                f"the head dim is {query[2]}; torch's kernel supports multiples of 8 up to "
                f"{_MOST_HEAD_DIM}"
            )
    return reasons


def _starts_refusals(call: VarlenCall) -> list[str]:
    reasons = []
    for name, x in call.starts.items():
        if x is None:
            reasons.append(f"{name} is None; pass the cumulative lengths of all documents")
            continue
        if x.dtype is not torch.int32 or x.ndim != 1 or not x.numel():
            reasons.append(
                f"{name} must be int32 of shape [documents + 1], got {x.dtype} {list(x.shape)}"
            )
        if isinstance(x, DTensor) and not all(type(p) is Replicate for p in x.placements):
            reasons.append(
                f"{name} has placements {x.placements}; pass it whole, as a replicated DTensor or "
                "a plain tensor"
            )
    if call.window_size is not None and len(call.window_size) != 2:
        reasons.append(f"window_size must be (left, right), got {call.window_size}")
    return reasons


def _placement_refusals(call: VarlenCall) -> list[str]:
    reasons = []
    query, mesh = call.query, call.query.device_mesh
    for dim, wanted in enumerate(query.placements):
        where = label(query, dim)
        if type(wanted) not in (Shard, Replicate) or getattr(wanted, "dim", 0) > 1:
            reasons.append(
                f"query is {wanted} on {where}; supported are Shard(0) (the packed sequence), "
                "Shard(1) (heads) and Replicate()"
            )
            continue
        for name in ("key", "value"):
            placement = getattr(call, name).placements[dim]
            if placement != wanted and type(placement) not in (Replicate, Partial):
                reasons.append(
                    f"{name} is {placement} on {where}, where query is {wanted}; redistribute it "
                    f"to {wanted} or Replicate()"
                )
            elif isinstance(placement, Partial):
                reasons += scatter_refusals(name, call.key, dim, wanted)
    if call.query.shape[1] != call.key.shape[1]:
        ranks = math.prod(mesh.size(dim) for dim in sharded_dims(query, 1))
        reasons += grouped_heads_refusals(call, ranks)
    return reasons


def _layout_refusals(call: VarlenCall, layout: Balancer, ring: tuple[int, ...]) -> list[str]:
    shape = tuple(map(call.query.device_mesh.size, ring))
    if layout.world_size == 1 == math.prod(shape):
        return []
    reasons = ranks_refusals(layout, shape)
    if reasons:
        return reasons
    if layout.rows > 1:
        return [
            f"the layout is for {layout.rows} batch rows, each with its own order, but a packed "
            "sequence is a single row; make the layout for the packed sequence"
        ]
    reasons = length_refusals(layout, {name: x.shape[0] for name, x in call.tensors.items()})
    # They would be cut in natural order, but the other shards are in the layout's order.
    reasons += [
        f"{name} has placements {x.placements} but the other shards are in the layout, "
        f"{named(layout)}; shard it like the query, in the layout's order, or {IF_NATURAL}"
        for name, x in call.tensors.items()
        if any(x.placements[dim] != call.query.placements[dim] for dim in ring)
    ]
    return reasons or shares_refusals(layout, shape)
