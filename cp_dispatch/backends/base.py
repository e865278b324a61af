"""What a schedule asks of a kernel, and what kernels share."""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend


class Backend:
    """One attention kernel on one block of queries and keys.

    Blocks are ``(B, H, S, D)`` with any strides. A causal block is square (see Note [Tiles] in
    ``layouts/spans.py``). The logsumexp is always ``(B, H, S)``, natural log, float32 (float64
    for float64), -inf for a row without keys; what a kernel does otherwise is put right here.
    """

    #: Key in ``BACKENDS`` and part of the op's name, ``ring_<name>_attention``.
    name: ClassVar[str]
    #: What ``torch.nn.attention.sdpa_kernel`` calls it.
    sdp_backend: ClassVar[SDPBackend]
    #: Device types whose fused choice may name it.
    devices: ClassVar[tuple[str, ...]]
    #: The head dim is padded with zeros to a multiple of this, as torch does for the kernel.
    head_dim_multiple: ClassVar[int] = 1
    #: Whether the op's output is float32 for 16-bit inputs, see :meth:`output_dtype`.
    wide_output: ClassVar[bool] = False
    #: Whether the kernel takes fewer key/value heads than query heads.
    grouped_heads: ClassVar[bool] = True

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        """One block: partial output ``(B, H, Sq, Dv)`` and its logsumexp ``(B, H, Sq)``."""
        if self.grouped_heads:
            return self._forward(query, key, value, causal, scale)
        groups = query.size(1) // key.size(1)
        return self._forward(
            query, repeat_heads(key, groups), repeat_heads(value, groups), causal, scale
        )

    def backward(
        self,
        grad_output: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        output: Tensor,
        logsumexp: Tensor,
        causal: bool,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """One block's share of dQ, dK and dV.

        ``output`` and ``logsumexp`` are those of the rows over *all* keys, which makes every
        block's share exact on its own.
        """
        if self.grouped_heads:
            return self._backward(grad_output, query, key, value, output, logsumexp, causal, scale)
        groups = query.size(1) // key.size(1)
        wide_key, wide_value = repeat_heads(key, groups), repeat_heads(value, groups)
        dq, dk, dv = self._backward(
            grad_output, query, wide_key, wide_value, output, logsumexp, causal, scale
        )
        return dq, sum_heads(dk, groups), sum_heads(dv, groups)

    def output_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Dtype of the op's output for inputs of ``dtype``.

        Of the inputs, unless rounding the output before the backward would cost accuracy that
        the kernel has on one device; then the caller casts, after what autograd saves.
        """
        return wide_dtype(dtype) if self.wide_output else dtype

    def pad(self, tensor: Tensor) -> Tensor:
        """The tensor as kernels take it: head dim with stride 1, and zeros after it up to the
        kernel's multiple. The tensor itself if it is so already."""
        missing = -tensor.size(-1) % self.head_dim_multiple
        if missing:
            return F.pad(tensor, (0, missing))
        return tensor if tensor.stride(-1) == 1 else tensor.contiguous()

    def _forward(self, query, key, value, causal, scale):
        raise NotImplementedError

    def _backward(self, grad_output, query, key, value, output, logsumexp, causal, scale):
        raise NotImplementedError


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which sums over blocks are kept, and the logsumexp."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def repeat_heads(tensor: Tensor, groups: int) -> Tensor:
    """Every key/value head once for each of its query heads, ``(B, Hkv * groups, S, D)``."""
    return tensor.repeat_interleave(groups, dim=1) if groups > 1 else tensor


def sum_heads(gradient: Tensor, groups: int) -> Tensor:
    """The adjoint of :func:`repeat_heads`."""
    return gradient.unflatten(1, (-1, groups)).sum(2) if groups > 1 else gradient
