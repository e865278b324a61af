"""Every reason to refuse a call, each with what to do instead.

The checks look at what all ranks share, so all ranks refuse alike and before any communication.
Each function returns all the reasons that it finds, not the first.
"""

from __future__ import annotations

import math

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from cp_dispatch._compat import disable_current_modes
from cp_dispatch.call import Call, sharded_dims
from cp_dispatch.sharding import SEQUENCE_DIM, sequence_kinds


def context_dims(tensor: DTensor) -> tuple[int, ...]:
    """Mesh dims over which the sequence (dim -2) is sharded, in any way."""
    return sharded_dims(tensor, tensor.ndim - 2)


def form_refusals(call: Call) -> list[str]:
    """Arguments that are not DTensors of one mesh and dtype."""
    reasons = []
    for name, tensor in call.tensors.items():
        if not isinstance(tensor, DTensor):
            reasons.append(
                f"{name} is a {type(tensor).__name__} beside DTensors; make it a DTensor with "
                "distribute_tensor or DTensor.from_local"
            )
    if reasons:
        return reasons
    query = call.query
    for name in ("key", "value"):
        tensor = getattr(call, name)
        if tensor.device_mesh != query.device_mesh:
            reasons.append(
                f"{name} is on {tensor.device_mesh}, query on {query.device_mesh}; "
                "put all on one mesh"
            )
        if tensor.dtype != query.dtype:
            reasons.append(f"{name} is {tensor.dtype}, query {query.dtype}; cast to one dtype")
    return reasons


def unsharded_refusals(call: Call) -> list[str]:
    """Calls without a sharded sequence on CPU, where stock DTensor has no rule to fall back on."""
    return [
        *_feature_refusals(call),
        *_shape_refusals(call),
        *_placement_refusals(call),
    ]


def ring_refusals(call: Call) -> list[str]:
    """Calls with the sequence of some argument sharded."""
    reasons = [*_feature_refusals(call), *_shape_refusals(call)]
    if _other_dims(call):
        return reasons  # placements would be those of other dims
    kinds = sequence_kinds(*(x.placements for x in call.tensors.values()))
    if len(set(kinds.values())) > 1:
        reasons.append(
            "the sequences are sharded over several mesh dims in different ways, "
            f"{ {label(call.query, dim): kind for dim, kind in kinds.items()} }; place key and "
            "value like the query"
        )
    reasons += order_refusals(call.query.device_mesh, tuple(kinds))
    return [*reasons, *_placement_refusals(call)]


def _feature_refusals(call: Call) -> list[str]:
    reasons = []
    if not 0.0 <= call.dropout_p <= 1.0:
        reasons.append(f"dropout_p must be in [0, 1], got {call.dropout_p}")
    for name, tensor in call.tensors.items():
        # What a kernel says of 8 bits comes after keys have moved.
        if tensor.is_complex() or not tensor.is_floating_point() or tensor.dtype.itemsize < 2:
            reasons.append(
                f"{name} is {tensor.dtype}; cast to a real floating dtype of 16 bits or more"
            )
    if call.attn_mask is not None:
        reasons += _mask_refusals(call)
    return reasons


def _mask_refusals(call: Call) -> list[str]:
    mask, query, key = call.attn_mask, call.query, call.key
    reasons = []
    if call.is_causal:
        reasons.append("attn_mask and is_causal are both given; put the causal part in the mask")
    if not isinstance(mask, torch.Tensor):
        return [*reasons, f"attn_mask is a {type(mask).__name__}; pass a tensor"]
    if mask.layout is not torch.strided:
        return [*reasons, f"attn_mask is {mask.layout}; pass a dense tensor"]
    if mask.dtype not in (torch.bool, torch.float32, query.dtype):
        reasons.append(
            f"attn_mask is {mask.dtype}; as on one device it must be bool, float32 or the query's "
            f"{query.dtype}"
        )
    scores = (*query.shape[:-1], key.shape[-2])
    # Where query keeps other dims than four, for a reason of its own, so does the mask.
    if not 1 <= mask.ndim <= query.ndim or any(
        size not in (1, full) for size, full in zip(mask.shape[::-1], scores[::-1], strict=False)
    ):
        reasons.append(
            f"attn_mask {list(mask.shape)} does not broadcast to the scores {list(scores)}, dim "
            "by dim; beside DTensors a plain mask is that of the whole sequence, a mask of this "
            "rank's part a sharded DTensor, and a padding mask [B, S] goes as [B, 1, 1, S]"
        )
    if not isinstance(mask, DTensor):
        if mask.requires_grad and torch.is_grad_enabled():
            reasons.append(
                "attn_mask is a plain tensor that needs a gradient; make it a replicated DTensor"
            )
    elif mask.device_mesh != query.device_mesh:
        reasons.append(f"attn_mask is on {mask.device_mesh}, query on {query.device_mesh}")
    elif not all(map(_is_known, mask.placements)) or (
        mask.dtype is torch.bool and any(isinstance(p, Partial) for p in mask.placements)
    ):
        reasons.append(
            f"attn_mask is placed {mask.placements}; supported are Shard(dim), Replicate() and, "
            "for a bias, Partial()"
        )
    else:
        reasons += [
            f"attn_mask is {placed} on {label(mask, dim)}, whose ranks do not ascend, so that "
            "DTensor would put it together in another order; replicate it, or use a mesh with "
            "ascending ranks"
            for dim, placed in enumerate(mask.placements)
            if isinstance(placed, Shard)
            and placed != query.placements[dim]
            and not ascends(mask.device_mesh, (dim,))
        ]
    return reasons


def _other_dims(call: Call) -> bool:
    """Whether some argument could not be brought to four dims."""
    return any(x.ndim != 4 for x in call.tensors.values())


def _shape_refusals(call: Call) -> list[str]:
    query, key, value = call.query, call.key, call.value
    if _other_dims(call):
        return [
            f"{name} must have shape [B, H, S, D] like the others, or batch dims that DTensor can "
            f"flatten into one, got {list(x.shape)} placed {x.placements}"
            for name, x in call.tensors.items()
            if x.ndim != 4
        ]
    reasons = []
    if not query.shape[0] == key.shape[0] == value.shape[0]:
        reasons.append(
            f"batch sizes differ: query {query.shape[0]}, key {key.shape[0]}, value "
            f"{value.shape[0]}; expand them to one"
        )
    if key.shape[1] != value.shape[1] or key.shape[2] != value.shape[2]:
        reasons.append(
            f"key and value must agree in heads and length, got {list(key.shape)} and "
            f"{list(value.shape)}"
        )
    if query.shape[3] != key.shape[3]:
        reasons.append(f"head dims differ: query {query.shape[3]}, key {key.shape[3]}")
    elif query.shape[3] == 0:
        reasons.append(
            "the head dim of query and key is 0, so that there are no scores; give them one"
        )
    heads, key_heads = query.shape[1], key.shape[1]
    if heads != key_heads and key_heads != 1 and not call.enable_gqa:
        reasons.append(
            f"query has {heads} heads, key {key_heads}, and enable_gqa is False; pass "
            "enable_gqa=True"
        )
    elif key_heads == 0 or heads % key_heads:
        reasons.append(f"query's {heads} heads are no multiple of key's {key_heads}")
    return reasons


def _placement_refusals(call: Call) -> list[str]:
    """Placements that the rule in :mod:`cp_dispatch.sharding` would have to move data for."""
    reasons = []
    query, mesh = call.query, call.query.device_mesh
    if _other_dims(call):
        return reasons
    if call.key.device_mesh != mesh or call.value.device_mesh != mesh:
        return reasons
    grouped = query.shape[1] != call.key.shape[1]
    for dim, wanted in enumerate(query.placements):
        name_of_dim = label(query, dim)
        if not _is_known(wanted) or getattr(wanted, "dim", 0) > SEQUENCE_DIM:
            reasons.append(
                f"query is {wanted} on {name_of_dim}; supported are Shard(0), Shard(1), Shard(2), "
                "Replicate() and Partial()"
            )
            continue
        target = wanted if isinstance(wanted, Shard) else Replicate()
        sequence = Shard(SEQUENCE_DIM)
        for name in ("key", "value"):
            placement = getattr(call, name).placements[dim]
            fits = placement == target or isinstance(placement, (Replicate, Partial))
            if not fits and not (placement == sequence and target == Replicate()):
                reasons.append(
                    f"{name} is {placement} on {name_of_dim} where query is {wanted}; "
                    f"redistribute it to {target} or Replicate()"
                )
    ranks = math.prod(
        size for size, p in zip(mesh.shape, query.placements, strict=True) if p == Shard(1)
    )
    return reasons + (grouped_heads_refusals(call, ranks) if grouped else [])


def grouped_heads_refusals(call, ranks: int) -> list[str]:
    """Heads of a query that has more of them than its key, among ``ranks`` ranks; ``call`` is one
    of any kind of attention."""
    return [
        f"{name}'s {x.shape[1]} heads do not divide over the {ranks} ranks that share heads, "
        "which grouped heads need; use fewer ranks for heads"
        for name, x in (("query", call.query), ("key", call.key))
        if x.shape[1] % ranks
    ]


def order_refusals(mesh, dims: tuple[int, ...]) -> list[str]:
    """A ring over these mesh dims whose order would not be that of the shards."""
    ranks = _first_not_ascending(mesh, dims) if dims else None
    if ranks is None:
        return []
    return [
        f"the ranks that share the sequence do not ascend, {ranks}; use a mesh with ascending ranks"
    ]


def label(tensor: DTensor, dim: int) -> str:
    """A mesh dim's name, for messages."""
    names = tensor.device_mesh.mesh_dim_names
    return names[dim] if names else f"mesh dim {dim}"


def ascends(mesh, dims: tuple[int, ...]) -> bool:
    """Whether the ranks that differ in these mesh dims alone ascend."""
    return _first_not_ascending(mesh, dims) is None


def _first_not_ascending(mesh, dims: tuple[int, ...]) -> list[int] | None:
    """Ranks that differ in these mesh dims alone and do not ascend, if any."""
    # A process group keeps its ranks sorted, and the ring's order must be the shards'.
    with disable_current_modes():
        rings = mesh.mesh.movedim(dims, tuple(range(-len(dims), 0)))
        rings = rings.reshape(-1, math.prod(mesh.mesh.shape[dim] for dim in dims))
        others = rings[(rings.diff(dim=1) <= 0).any(dim=1)]
        return others[0].tolist() if len(others) else None


def _is_known(placement) -> bool:
    # By exact type: a subclass such as _StridedShard orders rows in another way.
    return type(placement) in (Shard, Replicate, Partial)
