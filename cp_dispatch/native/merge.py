"""Merges partial attention outputs by their logsumexp.

Two kernels that saw disjoint keys give ``(out_a, lse_a)`` and ``(out_b, lse_b)``; attention over
the union is ``out = w_a * out_a + w_b * out_b`` with ``w_b = sigmoid(lse_b - lse_a)`` and
``lse = logaddexp(lse_a, lse_b)`` (the online softmax of Milakov & Gimelshein, arXiv:1805.02867,
as used in FlashAttention, arXiv:2205.14135, and Ring Attention, arXiv:2310.01889).

A side whose logsumexp is -inf saw no key and is ignored, whatever its rows contain. If both are
-inf, the output is 0 and the logsumexp -inf, like a fully masked row on one device.
"""

from __future__ import annotations

import functools
import importlib.util

import torch
from torch import Tensor

from cp_dispatch.extension import has_kernel

library = torch.library.Library("cp_dispatch", "FRAGMENT")
library.define(
    "merge_partials(Tensor out_a, Tensor lse_a, Tensor out_b, Tensor lse_b,"
    " Tensor(a!) out, Tensor(b!) lse) -> ()",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_op = torch.ops.cp_dispatch.merge_partials.default


def merge_partials(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor, out: Tensor, lse: Tensor
) -> None:
    """Merge two partial results into ``out`` and ``lse``, which may be ``out_a`` and ``lse_a``
    or ``out_b`` and ``lse_b``. Not differentiable.

    Args:
        out_a, out_b: partial outputs ``(B, H, S, D)``, any strides and floating dtypes.
        lse_a, lse_b: their logsumexp ``(B, H, S)``, natural log, float32 or float64.
        out: where the merged output is written, ``(B, H, S, D)``; its dtype is the cast.
        lse: where the merged logsumexp is written, ``(B, H, S)``.
    """
    same = lse_a.dtype is lse.dtype and lse_b.dtype is lse.dtype
    if same and has_kernel("merge_partials", out.device.type):
        _op(out_a, lse_a, out_b, lse_b, out, lse)
    else:
        _merge_in_python(out_a, lse_a, out_b, lse_b, out, lse)


def _merge_in_python(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor, out: Tensor, lse: Tensor
) -> None:
    if out.is_cuda and lse.dtype is torch.float32 and _triton_is_available():
        from cp_dispatch.native.merge_triton import merge_triton

        merge_triton(out_a, lse_a, out_b, lse_b, out, lse)
    else:
        merge_eager(out_a, lse_a, out_b, lse_b, out, lse)


# Used where the extension has no kernel.
library.impl("merge_partials", _merge_in_python, "CompositeExplicitAutograd")
torch.library.register_fake("cp_dispatch::merge_partials", lambda *tensors: None, lib=library)


@functools.cache
def _triton_is_available() -> bool:
    return importlib.util.find_spec("triton") is not None


def merge_eager(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor, out: Tensor, lse: Tensor
) -> None:
    """The specification of :func:`merge_partials`, in plain torch."""
    difference = lse_b - lse_a
    # inf - inf is the only NaN here that is not in the inputs; equal sides have equal weights.
    difference = torch.where(lse_a == lse_b, torch.zeros_like(difference), difference)
    weight_b = torch.sigmoid(difference).unsqueeze(-1)
    weight_a = torch.sigmoid(-difference).unsqueeze(-1)
    empty_a = (lse_a == -torch.inf).unsqueeze(-1)
    empty_b = (lse_b == -torch.inf).unsqueeze(-1)
    part_a = torch.where(empty_a, 0.0, weight_a * out_a.to(lse.dtype))
    part_b = torch.where(empty_b, 0.0, weight_b * out_b.to(lse.dtype))
    merged_lse = torch.maximum(lse_a, lse_b) + torch.log1p(torch.exp(-difference.abs()))
    out.copy_(part_a + part_b)
    lse.copy_(merged_lse)


def token_major(batch: int, heads: int, length: int, dim: int, like: Tensor, dtype=None) -> Tensor:
    """An empty ``(B, H, S, D)`` tensor with memory order ``(B, S, H, D)``, which models use next.

    Outputs and gradients of every op have exactly these strides, so a DTensor's metadata agrees
    with every shard, also if a batch of 1 makes strides ambiguous.
    """
    return like.new_empty((batch, length, heads, dim), dtype=dtype).transpose(1, 2)


def is_token_major(tensor: Tensor) -> bool:
    """Whether the strides are those of :func:`token_major`, even in dims of size 1."""
    _, heads, length, dim = tensor.shape
    return tensor.stride() == (length * heads * dim, dim, heads * dim, 1)


def to_token_major(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The tensor ``(B, H, S, D)`` in this dtype with the strides of :func:`token_major`; itself if
    it already has them."""
    if tensor.dtype is dtype and is_token_major(tensor):
        return tensor
    return token_major(*tensor.shape, like=tensor, dtype=dtype).copy_(tensor)


def plain_batch(tensor: Tensor) -> Tensor:
    """The tensor ``(B, H, S, D)``, with the stride for a batch of 1 that a larger batch would have.

    For a batch of 1 any stride is valid, and that of a view of a transposed tensor, such as
    ``DTensor.from_local`` makes, is small. Kernels would give it to their results, which would then
    have to be copied.
    """
    if tensor.size(0) != 1 or tensor.stride(0) >= tensor.numel():
        return tensor
    return tensor.as_strided(tensor.shape, (tensor.numel(), *tensor.stride()[1:]))
