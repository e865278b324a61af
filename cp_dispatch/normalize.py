"""Calls of any rank as the 4-D calls that the ops take."""

from __future__ import annotations

import dataclasses

import torch
from torch.nn.attention.bias import CausalBias, CausalVariant

from cp_dispatch.call import Call


def four_dims(call: Call) -> Call:
    """The same call with ``(B, H, S, D)`` tensors and a mask of four dims.

    Three dims are ``(B, S, D)`` and two ``(S, D)``, without heads; more than four have several
    batch dims. A call that does not fit comes back as it is, and is refused for its shapes.
    """
    ndim = call.query.ndim
    if call.key.ndim != ndim or call.value.ndim != ndim or ndim < 2:
        return call
    mask = call.attn_mask
    if ndim == 4 and (mask is None or mask.ndim == 4):
        return call
    if mask is not None:
        mask = _mask_four_dims(mask, call)
        if mask is None:
            return call
    if ndim == 4:
        return dataclasses.replace(call, attn_mask=mask)
    query, key, value = (_four(x) for x in (call.query, call.key, call.value))
    return dataclasses.replace(call, query=query, key=key, value=value, attn_mask=mask)


def like_query(output: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """The output of a 4-D call in the rank of the query that was given."""
    if query.ndim == 4:
        return output
    if query.ndim == 3:
        return output.squeeze(1)
    if query.ndim == 2:
        return output.squeeze(0).squeeze(0)
    return output.unflatten(0, query.shape[:-3])


def _four(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.ndim == 2:
        return tensor.unsqueeze(0).unsqueeze(0)
    if tensor.ndim == 3:
        return tensor.unsqueeze(1)
    return tensor.flatten(0, -4)


def _mask_four_dims(mask: torch.Tensor, call: Call) -> torch.Tensor | None:
    """None where the mask cannot be seen in four dims without a copy."""
    query = call.query
    if not 2 <= mask.ndim <= max(query.ndim, 2):
        return None
    if query.ndim == 3 and mask.ndim == 3:
        return mask.unsqueeze(1)
    if mask.ndim > 4:
        batch, wanted = mask.shape[:-3], query.shape[:-3]
        return mask.flatten(0, -4) if batch == wanted or set(batch) == {1} else None
    if query.ndim > 4 and mask.ndim == 4 and mask.shape[0] != 1:
        return None
    while mask.ndim < 4:
        mask = mask.unsqueeze(0)
    return mask


# Why a call that cp_dispatch would take does not come by.
PAST_DISPATCH = (
    "causal_lower_right between different lengths goes from torch.nn.attention.bias straight to "
    "torch's CUDA kernels, past scaled_dot_product_attention; pass the mask as a boolean tensor "
    "to keep the sequence sharded"
)


def without_causal_bias(call: Call) -> Call:
    """What torch makes of ``causal_upper_left`` and ``causal_lower_right`` before it calls on."""
    bias = call.attn_mask
    if not isinstance(bias, CausalBias):
        return call
    if bias.variant is CausalVariant.UPPER_LEFT or bias.seq_len_q == bias.seq_len_kv:
        return dataclasses.replace(call, attn_mask=None, is_causal=True)
    rows, keys = bias.seq_len_q, bias.seq_len_kv
    mask = torch.ones(rows, keys, dtype=torch.bool).tril(keys - rows)
    return dataclasses.replace(call, attn_mask=mask)


def goes_past_dispatch(call: Call) -> bool:
    """Whether torch takes a ``causal_lower_right`` to its CUDA kernels by itself."""
    bias = call.attn_mask
    return (
        isinstance(bias, CausalBias)
        and call.query.is_cuda
        and without_causal_bias(call).attn_mask is not None
    )
