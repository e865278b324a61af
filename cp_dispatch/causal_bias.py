"""Supports ``causal_lower_right`` on DTensors and on plain shards.

A call with a ``CausalBias`` goes to the bias's own dispatch in torch.nn.attention.bias. If the
lengths differ, that calls fused kernels directly on CUDA, bypassing scaled_dot_product_attention,
and some of those ops have no DTensor rule. While enabled, a call with DTensors, or with plain
shards inside context_parallel, is turned into the equivalent plain call; other calls are unchanged.
"""

from __future__ import annotations

import torch.nn.functional as F

from cp_dispatch._compat import CausalBiasDispatch
from cp_dispatch.call import Call
from cp_dispatch.dispatch import involves_dtensor
from cp_dispatch.normalize import without_causal_bias

_dispatch = CausalBiasDispatch()


def install(is_enabled, plain_context) -> None:
    """Replace torch's dispatch of causal biases. ``is_enabled()`` says whether to handle DTensors,
    ``plain_context()`` whether plain tensors are shards."""
    torchs = _dispatch.get()

    def dispatch(
        query, key, value, attn_mask, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False
    ):
        ours = is_enabled if involves_dtensor(query, key, value, None) else plain_context
        if is_causal or not ours():
            return torchs(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        plain = without_causal_bias(Call(query, key, value, attn_mask))
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=plain.attn_mask, dropout_p=dropout_p,
            is_causal=plain.is_causal, scale=scale, enable_gqa=enable_gqa,
        )  # fmt: skip

    _dispatch.put(dispatch)


def remove() -> None:
    """Put torch's dispatch back, unless it has been replaced by another one since."""
    _dispatch.restore()
