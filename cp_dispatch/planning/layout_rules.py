"""Rules for calls in a layout: which arguments are in the layout's order, and what is refused.

While a layout is set, a sharded sequence is in the layout's order; one that is whole on every rank,
or a plain tensor, is in natural order. In the same way a mask's dim of rows or of keys is in the
layout's order if it is sharded, and indexed by the original positions if not.
"""

from __future__ import annotations

import math

import torch
from torch.distributed.tensor import DTensor, Shard

from cp_dispatch.call import Call
from cp_dispatch.layouts import Balancer, chunk_spans


def mask_order(call: Call) -> str:
    """The dims of the mask that are in the order of the shards: ``"rows"``, ``"keys"``,
    ``"rows,keys"`` or ``""``."""
    mask = call.attn_mask
    if not isinstance(mask, DTensor):
        return ""
    names = {2: "rows", 3: "keys"}
    return ",".join(name for dim, name in names.items() if Shard(dim) in mask.placements)


#: The alternative for a call that does not match a layout.
IF_NATURAL = "if it is in natural order, call it under `with cp_dispatch.enabled(layout=None)`"


def named(layout: Balancer) -> str:
    """A layout in words, for messages."""
    return f"{type(layout).__name__} of {layout.seq_len} positions on {layout.world_size} ranks"


def ranks_refusals(layout: Balancer, ring_shape: tuple[int, ...]) -> list[str]:
    """Refuse a layout for a different number of ranks."""
    ranks = math.prod(ring_shape)
    if ranks == layout.world_size:
        return []
    return [
        f"{ranks} ranks share the sequence, but the layout is {named(layout)}; make one for "
        f"{ranks} ranks"
    ]


def shares_refusals(layout: Balancer, ring_shape: tuple[int, ...]) -> list[str]:
    """Refuse a layout whose shards differ in length from DTensor's over these mesh dims."""
    spans = chunk_spans(layout.seq_len, ring_shape)
    lengths = tuple(sum(span.length for span in own) for own in spans)
    if lengths == layout.shard_lengths:
        return []
    return [
        f"sharding over mesh dims of sizes {list(ring_shape)} gives the ranks {lengths} positions, "
        f"but the layout gives them {layout.shard_lengths}; use a length that is a multiple of the "
        "number of ranks"
    ]


def _is(name: str) -> str:
    return "are" if " and " in name else "is"


def length_refusals(layout: Balancer, lengths: dict[str, int]) -> list[str]:
    """Refuse sharded sequences, by name, whose length is not the layout's."""
    return [
        f"{name} of length {length} {_is(name)} sharded, but the layout is {named(layout)}; "
        f"{IF_NATURAL} (or was the DTensor made from uneven shards without its global shape and "
        "stride?)"
        for name, length in lengths.items()
        if length != layout.seq_len
    ]


def layout_refusals(layout: Balancer, call: Call, schedule: str, ring_shape: tuple) -> list[str]:
    """Every reason why a call with 4-D arguments does not match the layout.

    ``schedule`` is the one that the placements imply, ``"local"`` for a whole sequence.
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
                f"the batch has {call.query.shape[0]} rows, but the layout is for {layout.rows}, "
                "each with its own order"
            )
    if sharded["key and value"]:
        reasons += _pair_refusals(call, layout)
    for name, length in lengths.items():
        if sharded[name]:
            reasons += length_refusals(layout, {name: length})
        elif length == layout.seq_len and _order_matters(call, name):
            reasons.append(
                f"{name} of length {length} {_is(name)} whole on every rank, so it is ambiguous "
                f"whether in natural order or in that of {named(layout)}; shard it, or "
                f"{IF_NATURAL}"
            )
    order = mask_order(call)
    for word, name in (("rows", "query"), ("keys", "key and value")):
        if word in order and not sharded[name]:
            reasons.append(
                f"attn_mask is sharded along its {word}, but {name} {_is(name)} whole; replicate it"
            )
    if order and layout.rows > 1 and call.attn_mask.shape[0] == 1:
        reasons.append(
            f"attn_mask {list(call.attn_mask.shape)} is sharded along its {order}, but is a single "
            "batch row, and in this layout each batch row has its own order; replicate it, in "
            "natural order"
        )
    return reasons


def _pair_refusals(call: Call, layout: Balancer) -> list[str]:
    """Refuse unsharded tensors, which would be cut in natural order, beside shards in a layout."""
    sequence = Shard(2)
    tensors = {"query": call.query, "key": call.key, "value": call.value}
    dims = [
        dim
        for dim in range(call.query.device_mesh.ndim)
        if any(x.placements[dim] == sequence for x in tensors.values())
    ]
    whole = {
        name: tuple(map(call.as_given, x.placements))
        for name, x in tensors.items()
        if name != "query" and any(x.placements[dim] != sequence for dim in dims)
    }
    # A tensor that is sharded over one of several mesh dims is in the layout's order too.
    laid_out = {sequence in x.placements for x in (call.key, call.value)}
    order_matters = (
        _order_matters(call, "key and value") or call.dropout_p > 0.0 or len(laid_out) > 1
    )
    if not whole or (len(whole) == 2 and not order_matters):
        return []
    return [
        f"{name} has placements {placements} but the other shards are in the layout, "
        f"{named(layout)}; shard it along the sequence too, in the layout's order"
        for name, placements in whole.items()
    ]


def _order_matters(call: Call, name: str) -> bool:
    if call.is_causal:
        return True
    mask, dim = call.attn_mask, 2 if name == "query" else 3
    # A mask that could not be reshaped to four dims is refused elsewhere.
    return isinstance(mask, torch.Tensor) and mask.ndim == 4 and mask.shape[dim] > 1
