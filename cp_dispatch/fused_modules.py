"""Handles the fused inference ops of ``nn.MultiheadAttention`` and ``nn.TransformerEncoderLayer``.

In eval mode without gradients both modules call a single op that includes the projections, and
never call scaled_dot_product_attention. DTensor has no rule for these ops. While enabled, we
decompose them on DTensors, and attention is ours. Where shards are plain tensors, the modules are
kept from using these ops.
"""

from __future__ import annotations

import contextlib
import threading

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from cp_dispatch._compat import run_uncompiled
from cp_dispatch.errors import ContextParallelError


def check_weights(module: nn.Module, args: tuple, kwargs: dict) -> None:
    """Refuse ``nn.MultiheadAttention`` with ``need_weights=True``, its default, which computes
    attention from matrix products and so would stay within a shard."""
    if type(module).forward is not nn.MultiheadAttention.forward:
        return
    if kwargs.get("need_weights", args[4] if len(args) > 4 else True):
        raise ContextParallelError(
            "nn.MultiheadAttention in ContextParallel would attend only within this rank's shard: "
            "with need_weights=True, the default, it calls no scaled_dot_product_attention; pass "
            "need_weights=False"
        )


def native_multi_head_attention(
    query, key, value, embed_dim, num_head, qkv_weight, qkv_bias, proj_weight, proj_bias,
    mask=None, need_weights=True, average_attn_weights=True, mask_type=None,
):  # fmt: skip
    """``aten::_native_multi_head_attention``."""
    weights = qkv_weight, qkv_bias, proj_weight, proj_bias
    output, weights = _attend(
        (query, key, value), num_head, *weights, mask, mask_type, need_weights
    )
    if not need_weights:
        return output, query.new_empty(0)
    return output, weights.mean(1) if average_attn_weights else weights


def transformer_encoder_layer_fwd(
    src, embed_dim, num_heads, qkv_weight, qkv_bias, proj_weight, proj_bias,
    use_gelu, norm_first, eps, norm_weight_1, norm_bias_1, norm_weight_2, norm_bias_2,
    ffn_weight_1, ffn_bias_1, ffn_weight_2, ffn_bias_2, mask=None, mask_type=None,
):  # fmt: skip
    """``aten::_transformer_encoder_layer_fwd``."""
    activation = F.gelu if use_gelu else F.relu

    def attention(x):
        weights = qkv_weight, qkv_bias, proj_weight, proj_bias
        return _attend((x, x, x), num_heads, *weights, mask, mask_type)[0]

    def feed_forward(x):
        return F.linear(activation(F.linear(x, ffn_weight_1, ffn_bias_1)), ffn_weight_2, ffn_bias_2)

    def norm(x, weight, bias):
        return F.layer_norm(x, (embed_dim,), weight, bias, eps)

    if norm_first:
        src = src + attention(norm(src, norm_weight_1, norm_bias_1))
        return src + feed_forward(norm(src, norm_weight_2, norm_bias_2))
    src = norm(src + attention(src), norm_weight_1, norm_bias_1)
    return norm(src + feed_forward(src), norm_weight_2, norm_bias_2)


RULES = {
    "aten::_native_multi_head_attention": native_multi_head_attention,
    "aten::_transformer_encoder_layer_fwd": transformer_encoder_layer_fwd,
}


def _attend(
    inputs, heads: int, qkv_weight, qkv_bias, proj_weight, proj_bias, mask, mask_type,
    need_weights=False,
):  # fmt: skip
    """Output, and weights ``(B, H, Sq, Sk)`` or None."""
    projections = zip(inputs, qkv_weight.chunk(3), qkv_bias.chunk(3), strict=True)
    query, key, value = (
        F.linear(x, weight, bias).unflatten(-1, (heads, -1)).transpose(1, 2)
        for x, weight, bias in projections
    )
    seen, weights = _seen(mask, mask_type), None
    if need_weights:
        output, weights = _with_weights(query, key, value, seen)
    else:
        output = F.scaled_dot_product_attention(query, key, value, seen)
    return F.linear(output.transpose(1, 2).flatten(2), proj_weight, proj_bias), weights


def _with_weights(query, key, value, seen):
    """Attention by DTensor's own ops, which move the keys to every rank, and its weights."""
    if seen is not None and not isinstance(seen, DTensor):
        everywhere = [Replicate()] * query.device_mesh.ndim
        seen = DTensor.from_local(seen, query.device_mesh, everywhere, run_check=False)
    scores = query @ key.transpose(-2, -1) * query.size(-1) ** -0.5
    weights = (scores if seen is None else scores.masked_fill(~seen, -torch.inf)).softmax(-1)
    return weights @ value, weights


def _seen(mask: Tensor | None, mask_type: int | None) -> Tensor | None:
    """The mask of visible pairs. In these ops True, or any other value than zero, means "not seen".
    Type 1 is a padding mask ``(B, S)``, type 0 is ``(S, S)``, and type 2 is a 4-D mask of both."""
    if mask is None:
        return None
    seen = ~mask.to(torch.bool)
    return seen[:, None, None, :] if mask_type == 1 else seen


_lock = threading.Lock()
_fast_paths: list[bool] = []  # what to go back to, once for each block


@contextlib.contextmanager
def no_fast_path():
    """Keep ``nn.MultiheadAttention`` and encoder layers from their fused inference kernels, which
    do not call ``F.scaled_dot_product_attention``."""
    _leave_fast_path()
    try:
        yield
    finally:
        _back_to_fast_path()


@run_uncompiled
def _leave_fast_path() -> None:
    mha = torch.backends.mha
    with _lock:
        _fast_paths.append(mha.get_fastpath_enabled())
        mha.set_fastpath_enabled(False)


@run_uncompiled
def _back_to_fast_path() -> None:
    with _lock:
        # The first block to enter saved the original state; the last one to leave restores it.
        before = _fast_paths[0]
        _fast_paths.pop()
        if not _fast_paths:
            torch.backends.mha.set_fastpath_enabled(before)
