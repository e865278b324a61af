"""``Backend``, the interface between schedules and kernels, and helpers that kernels share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend

from cp_dispatch.backends.parts import cut, few_heads, parts_of
from cp_dispatch.native.merge import token_major
from cp_dispatch.native.parts import wide_dtype

#: The largest number of blocks of a CUDA grid in its second and third dim.
CUDA_GRID = 65535


class Backend:
    """One attention kernel on one block of queries and keys.

    Blocks are ``(B, H, S, D)`` with any strides. A causal block is square (see Note [Tiles] in
    ``layouts/tiles.py``). The logsumexp is always ``(B, H, S)``, natural log, in
    :meth:`logsumexp_dtype`, -inf for a row without keys. A backend corrects what its kernel does
    differently.
    """

    #: Key in ``BACKENDS`` and part of the op's name, ``ring_<name>_attention``.
    name: ClassVar[str]
    #: Its name in ``torch.nn.attention.sdpa_kernel``.
    sdp_backend: ClassVar[SDPBackend]
    #: Device types on which torch may choose it.
    devices: ClassVar[tuple[str, ...]]
    #: The head dim is padded with zeros to a multiple of this, as torch does for the kernel.
    head_dim_multiple: ClassVar[int] = 1
    #: Whether the kernel supports dropout factors, and computes the gradient of a bias.
    takes_dropout: ClassVar[bool] = False
    mask_gradient: ClassVar[bool] = False
    #: Whether it takes a bias of another dtype than the query's.
    takes_any_bias: ClassVar[bool] = False
    #: Whether values must have the query's head dim. (For CUDA kernels torch's own check says so.)
    one_head_dim: ClassVar[bool] = False
    #: Whether a call holds the scores of its whole block.
    holds_scores: ClassVar[bool] = False
    #: Whether the kernel takes fewer key/value heads than query heads.
    grouped_heads: ClassVar[bool] = True
    #: Whether it has :meth:`prefix_forward`: a causal mask that ends at the bottom right.
    takes_prefixes: ClassVar[bool] = False
    #: The largest batch size, and the largest number of heads, of one kernel call (a CUDA grid).
    largest_grid: ClassVar[int | None] = None
    #: The most bytes that a backward kernel of grouped heads may take for itself: dK and dV of each
    #: query head, before they are added up, and dQ in float32. It is called for some key heads at a
    #: time where it would take more; half as much where each call is long enough.
    largest_workspace: ClassVar[int | None] = None

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        causal: bool,
        scale: float,
        dropout: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """One block: partial output ``(B, H, Sq, Dv)`` and its logsumexp ``(B, H, Sq)``.

        ``mask`` is boolean (True takes part) or a bias added to the scaled scores, and
        broadcasts to ``(B, H, Sq, Sk)``. Never together with ``causal``. ``dropout`` holds the
        factors ``(B, H, Sq, Sk)`` of the probabilities, for backends that take them.
        """
        parts = parts_of(self, query, key)
        if parts is not None:
            results = [
                self.forward(*cut(part, query, key, value, mask), causal, scale) for part in parts
            ]
            return tuple(torch.cat(x, parts[0].dim) for x in zip(*results, strict=True))
        bias = None if mask is None else self._bias(mask, query.dtype)
        if not self.grouped_heads:
            key, value = self._wide_heads(query, key), self._wide_heads(query, value)
        extra = (dropout,) if self.takes_dropout else ()
        out, lse = self._forward(query, key, value, bias, causal, scale, *extra)
        if mask is not None:
            # Kernels differ on rows that see no key; the merge expects 0 and -inf.
            blind = ~_visible(mask)
            out = out.masked_fill(blind, 0.0)
            lse = lse.masked_fill(blind.squeeze(-1), -torch.inf)
        return out, lse

    def backward(
        self,
        grad_output: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        output: Tensor,
        logsumexp: Tensor,
        mask: Tensor | None,
        causal: bool,
        scale: float,
        dropout: Tensor | None = None,
        mask_grad: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """One block's share of dQ, dK, dV and, if asked for, of the bias.

        ``output`` and ``logsumexp`` are those of the rows over *all* keys, which makes every
        block's share exact on its own. The share of the bias is ``(B, H, Sq, Sk)``.
        """
        parts = parts_of(self, query, key) or few_heads(self, query, key, value)
        if parts is not None:
            results = None
            for part in parts:
                *rest, part_mask = cut(
                    part, query, key, value, grad_output, output, logsumexp, mask
                )
                q, k, v, go, out, lse = rest
                grads = self.backward(go, q, k, v, out, lse, part_mask, causal, scale)[:3]
                if results is None:  # their dtype is the kernel's affair
                    results = [
                        token_major(*like.shape, like=like, dtype=grad.dtype)
                        for like, grad in zip((query, key, value), grads, strict=True)
                    ]
                groups = part.groups, 1, 1
                for result, grad, times in zip(results, grads, groups, strict=True):
                    result.narrow(part.dim, part.start * times, grad.size(part.dim)).copy_(grad)
                del grads  # or the next part's would come beside them
            return *results, None
        bias = None if mask is None else self._bias(mask, query.dtype)
        if mask is not None:
            # exp(score - inf) is 0 for the rows that see no key at all; score + inf would be NaN.
            logsumexp = logsumexp.masked_fill(logsumexp == -torch.inf, torch.inf)
        groups = 1
        if not self.grouped_heads:
            groups = query.size(1) // key.size(1)
            key, value = self._wide_heads(query, key), self._wide_heads(query, value)
        extra = (dropout,) if self.takes_dropout else ()
        dq, dk, dv, *rest = self._backward(
            grad_output, query, key, value, output, logsumexp, bias, causal, scale, *extra
        )
        if groups > 1:
            dk, dv = sum_heads(dk, groups), sum_heads(dv, groups)
        return dq, dk, dv, rest[0] if mask_grad else None

    def prefix_lengths(self, batch: int, prefixes: Sequence[tuple[int, int]], device: torch.device):
        """What calls of :meth:`prefix_forward` and its backward on one stream can share, for the
        same number of batch rows; None if there is nothing to share."""
        return None

    def prefix_forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        prefixes: Sequence[tuple[int, int]],
        scale: float,
        lengths=None,
    ) -> tuple[Tensor, Tensor]:
        """Output and logsumexp of runs of rows, each with its own keys.

        ``prefixes`` has ``(rows, keys)`` of each run; the query has the rows of all runs one after
        the other, and so has the key. A run's causal mask ends at the bottom right: its last row
        sees all its keys. ``lengths`` is the result of :meth:`prefix_lengths`. Only for backends
        with ``takes_prefixes``.
        """
        raise NotImplementedError

    def prefix_backward(
        self,
        grad_output: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        output: Tensor,
        logsumexp: Tensor,
        prefixes: Sequence[tuple[int, int]],
        scale: float,
        lengths=None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dQ, dK and dV of :meth:`prefix_forward`."""
        raise NotImplementedError

    def _wide_heads(self, query: Tensor, tensor: Tensor) -> Tensor:
        return repeat_heads(tensor, query.size(1) // tensor.size(1))

    def _bias(self, mask: Tensor, dtype: torch.dtype) -> Tensor:
        if mask.dtype is not torch.bool:
            return mask
        return torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, -torch.inf)

    def output_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Dtype of the op's output for inputs of ``dtype``.

        That of the inputs, unless rounding the output before the backward would lose accuracy that
        the kernel has on one device. Then the caller casts, after autograd has saved the output.
        """
        return dtype

    def logsumexp_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Dtype of the logsumexp for inputs of ``dtype``."""
        return wide_dtype(dtype)

    def gradient_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Dtype of the shares of gradients for inputs of ``dtype``."""
        return dtype

    def pad(self, tensor: Tensor) -> Tensor:
        """The tensor as kernels take it: head dim with stride 1, and zeros after it up to the
        kernel's multiple. The tensor itself if it is so already."""
        missing = -tensor.size(-1) % self.head_dim_multiple
        if missing:
            return F.pad(tensor, (0, missing))
        return tensor if tensor.stride(-1) == 1 else tensor.contiguous()

    def _forward(self, query, key, value, bias, causal, scale):
        raise NotImplementedError

    def _backward(self, grad_output, query, key, value, output, logsumexp, bias, causal, scale):
        raise NotImplementedError


def _visible(mask: Tensor) -> Tensor:
    """Rows that see at least one key of the block, with a last dim of 1."""
    seen = mask if mask.dtype is torch.bool else mask != -torch.inf
    return seen.any(-1, keepdim=True)


def aligned(tensor: Tensor) -> Tensor:
    """The tensor, copied if its start is not aligned to 16 bytes, as that of a contiguous tile of a
    larger tensor may be. Kernels read 16 bytes at a time."""
    return tensor.clone() if tensor.data_ptr() % 16 else tensor


def repeat_heads(tensor: Tensor, groups: int) -> Tensor:
    """Repeat every key/value head for each of its query heads, ``(B, Hkv * groups, S, D)``."""
    return tensor.repeat_interleave(groups, dim=1) if groups > 1 else tensor


def sum_heads(gradient: Tensor, groups: int) -> Tensor:
    """The adjoint of :func:`repeat_heads`."""
    return gradient.unflatten(1, (-1, groups)).sum(2) if groups > 1 else gradient
