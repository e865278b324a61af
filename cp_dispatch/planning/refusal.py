"""Collects every reason to refuse a call, each with what to do instead.

The checks use only what all ranks know, so all ranks refuse in the same way, before any
communication. Each function returns all the reasons that it finds, not only the first.
"""

from __future__ import annotations

import math

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from cp_dispatch._compat import disable_current_modes, has_tangent
from cp_dispatch.call import Call, sharded_dims
from cp_dispatch.normalize import without_four_dims
from cp_dispatch.sharding import SEQUENCE_DIM, sequence_kinds


def context_dims(tensor: DTensor) -> tuple[int, ...]:
    """Mesh dims over which the sequence (dim -2) is sharded, with any kind of shard placement."""
    return sharded_dims(tensor, tensor.ndim - 2)


def form_refusals(call: Call) -> list[str]:
    """Refuse arguments that are not DTensors of one mesh and dtype."""
    reasons = []
    for name, tensor in call.tensors.items():
        if not isinstance(tensor, DTensor):
            reasons.append(
                f"{name} is a {type(tensor).__name__} but other arguments are DTensors; make it a "
                "DTensor with distribute_tensor or DTensor.from_local"
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
            reasons.append(f"{name} is {tensor.dtype}, query is {query.dtype}; cast to one dtype")
    return reasons


def unsharded_refusals(call: Call) -> list[str]:
    """Refuse calls on CPU without a sharded sequence; stock DTensor has no rule for them."""
    return [
        *_feature_refusals(call),
        *_shape_refusals(call),
        *_placement_refusals(call),
    ]


def ring_refusals(call: Call) -> list[str]:
    """Refuse calls in which the sequence of some argument is sharded."""
    reasons = [*_feature_refusals(call), *_shape_refusals(call)]
    if _other_dims(call):
        return reasons  # placements would refer to different dims
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
        # A kernel would refuse 8 bits only after keys have moved.
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
    # If the query could not be brought to four dims, neither was the mask.
    if not 1 <= mask.ndim <= query.ndim or any(
        size not in (1, full) for size, full in zip(mask.shape[::-1], scores[::-1], strict=False)
    ):
        reasons.append(
            f"attn_mask {list(mask.shape)} does not broadcast to the scores {list(scores)}, dim "
            "by dim; with DTensors, pass the mask of the whole sequence as a plain tensor or this "
            "rank's part as a sharded DTensor, and a padding mask [B, S] as [B, 1, 1, S]"
        )
    if not isinstance(mask, DTensor):
        if has_tangent(mask) or (mask.requires_grad and torch.is_grad_enabled()):
            reasons.append(
                "attn_mask is a plain tensor that needs a gradient; make it a replicated DTensor"
            )
    elif mask.device_mesh != query.device_mesh:
        reasons.append(
            f"attn_mask is on {mask.device_mesh}, query on {query.device_mesh}; put both on the "
            "same mesh"
        )
    elif not all(map(_is_known, mask.placements)) or (
        mask.dtype is torch.bool and any(isinstance(p, Partial) for p in mask.placements)
    ):
        # Flattened batch dims have placements that the user has not given.
        batch = "; of several batch dims only the first may be sharded" * (call.given_dims > 4)
        reasons.append(
            f"attn_mask has placements {mask.placements}; supported are Shard(dim), Replicate() "
            f"and, for a bias, Partial(){batch}"
        )
    else:
        reasons += [
            f"attn_mask is {placed} on {label(mask, dim)}, whose ranks are not in ascending order, "
            "so DTensor would assemble it in a different order; replicate it, or use a mesh with "
            "ascending ranks"
            for dim, placed in enumerate(mask.placements)
            if isinstance(placed, Shard)
            and placed != query.placements[dim]
            and not ascends(mask.device_mesh, (dim,))
        ]
    return reasons


def _other_dims(call: Call) -> bool:
    """Whether some argument could not be reshaped to four dims."""
    return any(x.ndim != 4 for x in call.tensors.values())


def _shape_refusals(call: Call) -> list[str]:
    query, key, value = call.query, call.key, call.value
    if _other_dims(call):
        return [
            f"{name} must have shape [B, H, S, D] like the others, or batch dims that DTensor can "
            f"flatten into one, got {list(x.shape)} with placements {x.placements}"
            for name, x in without_four_dims(call).items()
        ]
    reasons = []
    if not query.shape[0] == key.shape[0] == value.shape[0]:
        reasons.append(
            f"batch sizes differ: query {query.shape[0]}, key {key.shape[0]}, value "
            f"{value.shape[0]}; expand them to the same size"
        )
    if key.shape[1] != value.shape[1] or key.shape[2] != value.shape[2]:
        reasons.append(
            "key and value must have the same number of heads and the same length, got "
            f"{list(key.shape)} and {list(value.shape)}"
        )
    if query.shape[3] != key.shape[3]:
        reasons.append(f"head dims differ: query {query.shape[3]}, key {key.shape[3]}")
    elif query.shape[3] == 0:
        reasons.append(
            "the head dim of query and key is 0, so there are no scores; it must be at least 1"
        )
    heads, key_heads = query.shape[1], key.shape[1]
    if heads != key_heads and key_heads != 1 and not call.enable_gqa:
        reasons.append(
            f"query has {heads} heads, key {key_heads}, and enable_gqa is False; pass "
            "enable_gqa=True"
        )
    elif key_heads == 0 or heads % key_heads:
        reasons.append(f"query's {heads} heads are not a multiple of key's {key_heads}")
    return reasons


def _placement_refusals(call: Call) -> list[str]:
    """Refuse placements for which the rule in :mod:`cp_dispatch.sharding` has to move data."""
    reasons = []
    query, mesh, given = call.query, call.query.device_mesh, call.as_given
    if _other_dims(call):
        return reasons
    if call.key.device_mesh != mesh or call.value.device_mesh != mesh:
        return reasons
    grouped = query.shape[1] != call.key.shape[1]
    for dim, wanted in enumerate(query.placements):
        name_of_dim = label(query, dim)
        if not _is_known(wanted) or getattr(wanted, "dim", 0) > SEQUENCE_DIM:
            dims = {0, *(d for d in (call.given_dims - 3, call.given_dims - 2) if d > 0)}
            supported = ", ".join(f"Shard({d})" for d in sorted(dims))
            reasons.append(
                f"query is {given(wanted)} on {name_of_dim}; supported are {supported}, "
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
                    f"{name} is {given(placement)} on {name_of_dim}, where query is "
                    f"{given(wanted)}; redistribute it to {given(target)} or Replicate()"
                )
            elif isinstance(placement, Partial):
                reasons += scatter_refusals(name, call.key, dim, given(target))
    ranks = math.prod(
        size for size, p in zip(mesh.shape, query.placements, strict=True) if p == Shard(1)
    )
    return reasons + (grouped_heads_refusals(call, ranks) if grouped else [])


def grouped_heads_refusals(call, ranks: int) -> list[str]:
    """Refuse grouped heads that cannot be shared evenly by ``ranks`` ranks; ``call`` may be of any
    kind of attention."""
    return [
        f"{name}'s {x.shape[1]} heads are not a multiple of the {ranks} ranks that share the "
        "heads, as grouped heads require; shard the heads over fewer ranks"
        for name, x in (("query", call.query), ("key", call.key))
        if x.shape[1] % ranks
    ]


def scatter_refusals(name: str, tensor: DTensor, dim: int, target) -> list[str]:
    """Refuse sums over a mesh dim that DTensor would hand to other ranks than the shards'."""
    if not isinstance(target, Shard) or ascends(tensor.device_mesh, (dim,)):
        return []
    return [
        f"{name} is a sum yet to be made on {label(tensor, dim)}, whose ranks are not in ascending "
        f"order, so DTensor would give them the parts of {target} in a different order; "
        "redistribute it to Replicate(), or use a mesh with ascending ranks"
    ]


def order_refusals(mesh, dims: tuple[int, ...]) -> list[str]:
    """Refuse a ring over these mesh dims if its order would differ from that of the shards."""
    ranks = _first_not_ascending(mesh, dims) if dims else None
    if ranks is None:
        return []
    return [
        f"the ranks that share the sequence are not in ascending order, {ranks}; use a mesh with "
        "ascending ranks"
    ]


def label(tensor: DTensor, dim: int) -> str:
    """A mesh dim's name, for messages."""
    names = tensor.device_mesh.mesh_dim_names
    return names[dim] if names else f"mesh dim {dim}"


def ascends(mesh, dims: tuple[int, ...]) -> bool:
    """Whether the ranks that differ only in these mesh dims are in ascending order."""
    return _first_not_ascending(mesh, dims) is None


def _first_not_ascending(mesh, dims: tuple[int, ...]) -> list[int] | None:
    """Ranks that differ only in these mesh dims and are not in ascending order, if any."""
    # A process group sorts its ranks, and the ring's order must be that of the shards.
    with disable_current_modes():
        rings = mesh.mesh.movedim(dims, tuple(range(-len(dims), 0)))
        rings = rings.reshape(-1, math.prod(mesh.mesh.shape[dim] for dim in dims))
        others = rings[(rings.diff(dim=1) <= 0).any(dim=1)]
        return others[0].tolist() if len(others) else None


def _is_known(placement) -> bool:
    # By exact type: a subclass such as _StridedShard orders rows differently.
    return type(placement) in (Shard, Replicate, Partial)
