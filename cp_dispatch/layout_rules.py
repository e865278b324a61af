"""What a layout asks of a call: which arguments lie in it, and what cannot be told.

While a layout is set, a sequence that is sharded lies in the layout's order, and one that is whole
on every rank, or a plain tensor, is in true order. So a mask's dim of rows or of keys lies in the
layout if it is sharded, and goes by true positions if not.
"""

from __future__ import annotations

import math

from torch.distributed.tensor import DTensor, Shard

from cp_dispatch.call import Call
from cp_dispatch.layouts import Balancer, chunk_spans


def mask_order(call: Call) -> str:
    """Dims of the mask that lie as the shards do, ``"rows"``, ``"keys"``, both with a comma, or
    ``""``."""
    mask = call.attn_mask
    if not isinstance(mask, DTensor):
        return ""
    names = {2: "rows", 3: "keys"}
    return ",".join(name for dim, name in names.items() if Shard(dim) in mask.placements)


def layout_refusals(layout: Balancer, call: Call, schedule: str, ring_shape: tuple) -> list[str]:
    """Every reason why a call with 4-D arguments does not fit the layout.

    ``schedule`` is the one that the placements ask for, ``"local"`` for a whole sequence.
    """
    if layout.world_size == 1 == math.prod(ring_shape):
        return []
    lengths = {"query": call.query.shape[2], "key and value": call.key.shape[2]}
    sharded = {
        "query": schedule in ("ring", "replicated_keys"),
        "key and value": schedule in ("ring", "replicated_queries"),
    }
    named = f"{type(layout).__name__} of {layout.seq_len} positions on {layout.world_size} ranks"
    for_others = "call it under `with cp_dispatch.enabled(layout=None)` if it is in natural order"
    reasons = []
    if any(sharded.values()):
        reasons += _ring_refusals(layout, call, ring_shape, named)
    if sharded["key and value"]:
        reasons += _pair_refusals(call, named)
    for name, length in lengths.items():
        if sharded[name] and length != layout.seq_len:
            reasons.append(
                f"{name} of length {length} is sharded, the layout is {named}; {for_others} (or "
                "was the DTensor made of uneven shards without its global shape and stride?)"
            )
        if not sharded[name] and length == layout.seq_len and _order_matters(call, name):
            reasons.append(
                f"{name} of length {length} is whole on every rank, so there is no telling whether "
                f"it lies in the layout, {named}; shard it, or {for_others}"
            )
    order = mask_order(call)
    for word, name in (("rows", "query"), ("keys", "key and value")):
        if word in order and not sharded[name]:
            reasons.append(
                f"attn_mask is sharded on its {word} where {name} is whole; replicate it"
            )
    if order and layout.rows > 1 and call.attn_mask.shape[0] == 1:
        reasons.append(
            f"attn_mask {list(call.attn_mask.shape)} is sharded on its {order}, in an order that "
            "is that of a row of the batch of its own; replicate it, in true order"
        )
    return reasons


def _pair_refusals(call: Call, named: str) -> list[str]:
    """What is not sharded would be cut in true order beside shards in the layout's."""
    sequence = Shard(2)
    tensors = {"query": call.query, "key": call.key, "value": call.value}
    dims = [
        dim
        for dim in range(call.query.device_mesh.ndim)
        if any(x.placements[dim] == sequence for x in tensors.values())
    ]
    whole = {
        name: x.placements
        for name, x in tensors.items()
        if name != "query" and any(x.placements[dim] != sequence for dim in dims)
    }
    order_matters = _order_matters(call, "key and value") or call.dropout_p > 0.0
    if not whole or (len(whole) == 2 and not order_matters):
        return []
    return [
        f"{name} is placed {placements} beside shards that lie in the layout, {named}; shard it "
        "along the sequence like them, in the layout's order"
        for name, placements in whole.items()
    ]


def _ring_refusals(layout, call, ring_shape, named) -> list[str]:
    reasons = []
    ranks = math.prod(ring_shape)
    if ranks != layout.world_size:
        reasons.append(
            f"{ranks} ranks share the sequence, the layout is {named}; make one for {ranks}"
        )
    else:
        spans = chunk_spans(layout.seq_len, ring_shape)
        lengths = tuple(sum(span.length for span in own) for own in spans)
        if lengths != layout.shard_lengths:
            reasons.append(
                f"sharding over mesh dims of sizes {list(ring_shape)} gives the ranks {lengths} "
                f"positions, the layout {layout.shard_lengths}; use a length that they divide"
            )
    if layout.rows > 1 and call.query.shape[0] != layout.rows:
        reasons.append(
            f"the batch has {call.query.shape[0]} rows, the layout has a row of its own for each "
            f"of {layout.rows}"
        )
    return reasons


def _order_matters(call: Call, name: str) -> bool:
    if call.is_causal:
        return True
    dim = 2 if name == "query" else 3
    return call.attn_mask is not None and call.attn_mask.shape[dim] > 1
