"""What a layout asks of a call: which arguments lie in it, and what cannot be told.

While a layout is set, a sequence that is sharded lies in the layout's order, and one that is whole
on every rank, or a plain tensor, is in true order. So a mask's dim of rows or of keys lies in the
layout if it is sharded, and goes by true positions if not.
"""

from __future__ import annotations

import math

import torch
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


#: What else may be meant by a call that does not fit a layout.
IF_NATURAL = "call it under `with cp_dispatch.enabled(layout=None)` if it is in natural order"


def named(layout: Balancer) -> str:
    """A layout in words, for messages."""
    return f"{type(layout).__name__} of {layout.seq_len} positions on {layout.world_size} ranks"


def ranks_refusals(layout: Balancer, ring_shape: tuple[int, ...]) -> list[str]:
    """A layout for another number of ranks."""
    ranks = math.prod(ring_shape)
    if ranks == layout.world_size:
        return []
    words = f"{ranks} ranks share the sequence, the layout is {named(layout)}; make one for {ranks}"
    return [words]


def shares_refusals(layout: Balancer, ring_shape: tuple[int, ...]) -> list[str]:
    """A layout whose shards are not as long as DTensor's over mesh dims of these sizes."""
    spans = chunk_spans(layout.seq_len, ring_shape)
    lengths = tuple(sum(span.length for span in own) for own in spans)
    if lengths == layout.shard_lengths:
        return []
    return [
        f"sharding over mesh dims of sizes {list(ring_shape)} gives the ranks {lengths} positions, "
        f"the layout {layout.shard_lengths}; use a length that they divide"
    ]


def _is(name: str) -> str:
    return "are" if " and " in name else "is"


def length_refusals(layout: Balancer, lengths: dict[str, int]) -> list[str]:
    """Sharded sequences, by name, of another length than the layout's."""
    return [
        f"{name} of length {length} {_is(name)} sharded, the layout is "
        f"{named(layout)}; {IF_NATURAL} (or "
        "was the DTensor made of uneven shards without its global shape and stride?)"
        for name, length in lengths.items()
        if length != layout.seq_len
    ]


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
    reasons = []
    if any(sharded.values()):
        reasons += ranks_refusals(layout, ring_shape) or shares_refusals(layout, ring_shape)
        if layout.rows > 1 and call.query.shape[0] != layout.rows:
            reasons.append(
                f"the batch has {call.query.shape[0]} rows, the layout has a row of its own for "
                f"each of {layout.rows}"
            )
    if sharded["key and value"]:
        reasons += _pair_refusals(call, layout)
    for name, length in lengths.items():
        if sharded[name]:
            reasons += length_refusals(layout, {name: length})
        elif length == layout.seq_len and _order_matters(call, name):
            reasons.append(
                f"{name} of length {length} {_is(name)} whole on every rank, so there is no "
                f"telling in which order, the natural one or that of {named(layout)}; shard it, or "
                f"{IF_NATURAL}"
            )
    order = mask_order(call)
    for word, name in (("rows", "query"), ("keys", "key and value")):
        if word in order and not sharded[name]:
            reasons.append(
                f"attn_mask is sharded on its {word} where {name} {_is(name)} whole; replicate it"
            )
    if order and layout.rows > 1 and call.attn_mask.shape[0] == 1:
        reasons.append(
            f"attn_mask {list(call.attn_mask.shape)} is sharded on its {order}, in an order that "
            "is that of a row of the batch of its own; replicate it, in true order"
        )
    return reasons


def _pair_refusals(call: Call, layout: Balancer) -> list[str]:
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
    # What is sharded over one of several mesh dims lies in the layout too.
    laid_out = {sequence in x.placements for x in (call.key, call.value)}
    order_matters = (
        _order_matters(call, "key and value") or call.dropout_p > 0.0 or len(laid_out) > 1
    )
    if not whole or (len(whole) == 2 and not order_matters):
        return []
    return [
        f"{name} is placed {placements} beside shards that lie in the layout, {named(layout)}; "
        "shard it along the sequence like them, in the layout's order"
        for name, placements in whole.items()
    ]


def _order_matters(call: Call, name: str) -> bool:
    if call.is_causal:
        return True
    mask, dim = call.attn_mask, 2 if name == "query" else 3
    # One that could not be brought to four dims is refused by itself.
    return isinstance(mask, torch.Tensor) and mask.ndim == 4 and mask.shape[dim] > 1
