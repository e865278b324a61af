"""The local kernel: FlashAttention for packed sequences on CUDA, plain torch on CPU."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from cp_dispatch.backends import wide_dtype
from cp_dispatch.varlen import dense
from cp_dispatch.varlen.documents import Window

aten = torch.ops.aten


class Kernel:
    """One call for pieces with the same window.

    Tensors are ``(T, H, D)``, ``(M, Hkv, D)``, and the logsumexp ``(H, T)``, float32 (float64 for
    float64), inf for a row without keys.
    """

    def __init__(
        self, sizes: Sequence[tuple[int, int]], window: Window, num_splits: int | None,
        device: torch.device,
    ):  # fmt: skip
        self.sizes, self.window = sizes, window
        # Torch 2.11 has no such argument.
        self._splits = {} if num_splits is None else {"num_splits": num_splits}
        self._starts = self._longest = None
        if device.type == "cuda":
            starts = [[0, *accumulate(x)] for x in zip(*sizes, strict=True)]
            self._starts = torch.tensor(starts, dtype=torch.int32).to(device).unbind()
            # At least two, because the kernel folds grouped heads into rows for documents of one
            # row.
            self._longest = [max(2, *x) for x in zip(*sizes, strict=True)]

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        if not key.size(0):
            lse = query.new_full((query.size(1), query.size(0)), torch.inf, dtype=torch.float32)
            return torch.zeros_like(query), lse.to(wide_dtype(query.dtype))
        if self._starts is None:
            return dense.forward(query, key, value, self.sizes, self.window, scale)
        out, lse, *_ = aten._flash_attention_forward(
            query, key, value, *self._starts, *self._longest, 0.0, self.window.is_causal, False,
            scale=scale, window_size_left=self.window.left, window_size_right=self.window.right,
            **self._splits,
        )  # fmt: skip
        return out, lse

    def backward(
        self, grad_output, query, key, value, output, logsumexp, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dQ, dK and dV; on CPU the last two are wide."""
        if not key.size(0):
            return tuple(torch.zeros_like(x) for x in (query, key, value))
        tensors = grad_output, query, key, value, output, logsumexp.contiguous()
        if self._starts is None:
            grads = dense.backward(*tensors, self.sizes, self.window, scale)
            return grads[0].to(query.dtype), *grads[1:]
        # Without dropout the kernel reads no random state.
        unused = query.new_empty(2, dtype=torch.uint64)
        return aten._flash_attention_backward(
            *tensors, *self._starts, *self._longest, 0.0, self.window.is_causal, unused, unused[0],
            scale=scale, window_size_left=self.window.left, window_size_right=self.window.right,
        )  # fmt: skip
