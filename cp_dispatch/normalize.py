"""Reshapes calls with any number of dims to the 4-D calls that the ops take."""

from __future__ import annotations

import dataclasses
import math

import torch
from torch.distributed.tensor import DTensor, Shard
from torch.nn.attention.bias import CausalBias, CausalVariant

from cp_dispatch.call import Call, sharded_dims


def four_dims(call: Call) -> Call:
    """The same call with ``(B, H, S, D)`` tensors and a mask of four dims.

    Three dims are ``(B, S, D)``, or ``(H, S, D)`` if query's first dim is larger than key's. Two
    dims are ``(S, D)``, without heads. More than four have several batch dims. A call that cannot
    be reshaped is returned unchanged, and is refused later for its shapes.
    """
    if not all(isinstance(x, torch.Tensor) for x in call.tensors.values()):
        return call  # explain() may get arguments that torch would refuse
    ndim = call.query.ndim
    if call.key.ndim != ndim or call.value.ndim != ndim or ndim < 2:
        return call
    mask = call.attn_mask
    if mask is not None and not (isinstance(mask, torch.Tensor) and mask.layout is torch.strided):
        return call
    if ndim == 4 and (mask is None or mask.ndim == 4):
        return call
    if mask is not None:
        mask = _mask_four_dims(mask, call)
        if mask is None:
            return call
    if ndim == 4:
        return dataclasses.replace(call, attn_mask=mask)
    query, key, value = (_four(x, _heads_first(call)) for x in (call.query, call.key, call.value))
    if query is None or key is None or value is None:
        return call
    if any(_has_strided_shards(x) for x in (query, key, value)):
        return call
    return dataclasses.replace(
        call, query=query, key=key, value=value, attn_mask=mask, given_dims=ndim
    )


def without_four_dims(call: Call) -> dict[str, torch.Tensor]:
    """Of a call that :func:`four_dims` could not reshape, the tensors that are the cause, by name:
    those whose batch dims cannot be flattened, or without four dims if their numbers differ."""
    tensors, mask = call.tensors, call.attn_mask
    if len({x.ndim for x in tensors.values()}) > 1 or call.query.ndim < 2:
        return {name: x for name, x in tensors.items() if x.ndim != 4}
    flat = {name: _four(x, _heads_first(call)) for name, x in tensors.items()}
    causes = {n: tensors[n] for n, x in flat.items() if x is None or _has_strided_shards(x)}
    if isinstance(mask, DTensor) and _mask_four_dims(mask, call) is None:
        causes["attn_mask"] = mask
    return causes or tensors


def like_query(output: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """The output of a 4-D call with the dims of the original query."""
    if query.ndim == 4:
        return output
    if query.ndim == 3:
        return output.squeeze(1 if output.shape[1] == 1 else 0)
    if query.ndim == 2:
        return output.squeeze(0).squeeze(0)
    return output.view(*query.shape[:-3], *output.shape[1:])


def _heads_first(call: Call) -> bool:
    """Whether the first of three dims is heads, which may be grouped, and not a batch."""
    return call.query.ndim == 3 and call.query.shape[0] != call.key.shape[0]


def _four(tensor: torch.Tensor, heads_first: bool) -> torch.Tensor | None:
    if tensor.ndim == 2:
        return tensor.unsqueeze(0).unsqueeze(0)
    if tensor.ndim == 3:
        return tensor.unsqueeze(0 if heads_first else 1)
    return _one_batch_dim(tensor)


def _has_strided_shards(tensor: torch.Tensor) -> bool:
    """Whether there are ``_StridedShard`` placements, which torch may create when it flattens dims
    even if the user has given none."""
    return isinstance(tensor, DTensor) and any(
        hasattr(p, "dim") and type(p) is not Shard for p in tensor.placements
    )


def _one_batch_dim(tensor: torch.Tensor) -> torch.Tensor | None:
    """The tensor with its batch dims flattened; None if it is sharded on one that is not
    preserved."""
    if isinstance(tensor, DTensor) and _has_uneven_batches(tensor):
        return None
    try:
        if torch.is_inference_mode_enabled():
            # There DTensor is given flatten itself, and would rather gather than refuse.
            return tensor.contiguous().view(math.prod(tensor.shape[:-3]), *tensor.shape[-3:])
        return tensor.flatten(0, -4)
    except torch.OutOfMemoryError:  # where it has to be copied
        raise
    except RuntimeError:
        return None


def _has_uneven_batches(tensor: DTensor) -> bool:
    """Whether some batch dim, other than the last one, is sharded unevenly. Torch does not see that
    if several mesh dims shard it, and raises only on ranks whose shards do not fit."""
    batches = tensor.shape[:-3]
    for dim, size in enumerate(batches):
        ranks = math.prod(tensor.device_mesh.size(i) for i in sharded_dims(tensor, dim))
        if ranks > 1 and math.prod(batches[dim + 1 :]) > 1 and size % ranks:
            return True
    return False


def _mask_four_dims(mask: torch.Tensor, call: Call) -> torch.Tensor | None:
    """The mask in four dims; None if it does not broadcast, or is sharded on a batch dim that is
    not preserved."""
    query = call.query
    if not 1 <= mask.ndim <= max(query.ndim, 2):
        return None
    if query.ndim == 3 and mask.ndim == 3:
        return mask.unsqueeze(0 if _heads_first(call) else 1)
    if query.ndim > 4 and mask.ndim >= 4 and set(mask.shape[:-3]) != {1}:
        try:
            mask = mask.expand(*query.shape[:-3], *mask.shape[-3:])
        except RuntimeError:
            return None
        return _one_batch_dim(mask)
    if mask.ndim > 4:
        return _one_batch_dim(mask)
    while mask.ndim < 4:
        mask = mask.unsqueeze(0)
    return mask


def without_causal_bias(call: Call) -> Call:
    """The call without a ``CausalBias``: ``causal_upper_left`` becomes is_causal,
    ``causal_lower_right`` the equivalent boolean mask."""
    bias = call.attn_mask
    if not isinstance(bias, CausalBias):
        return call
    if bias.variant is CausalVariant.UPPER_LEFT or bias.seq_len_q == bias.seq_len_kv:
        return dataclasses.replace(call, attn_mask=None, is_causal=True)
    rows, keys = bias.seq_len_q, bias.seq_len_kv
    mask = torch.ones(rows, keys, dtype=torch.bool, device=call.query.device).tril(keys - rows)
    return dataclasses.replace(call, attn_mask=mask)


def autocast(tensor):
    """The tensor as autocast passes it to attention."""
    if not isinstance(tensor, torch.Tensor) or isinstance(tensor, CausalBias):
        return tensor
    if not tensor.is_floating_point():
        return tensor
    device = tensor.device.type
    if not torch.amp.is_autocast_available(device) or not torch.is_autocast_enabled(device):
        return tensor
    if tensor.dtype is torch.float64:
        return tensor
    return tensor.to(torch.get_autocast_dtype(device))
