"""FlashAttention-2 as torch ships it, on CUDA."""

import torch
from torch.nn.attention import SDPBackend

from cp_dispatch.backends.base import CUDA_GRID, Backend

aten = torch.ops.aten


class Flash(Backend):
    name = "flash"
    sdp_backend = SDPBackend.FLASH_ATTENTION
    devices = ("cuda",)
    largest_grid = CUDA_GRID
    head_dim_multiple = 8

    def _forward(self, query, key, value, bias, causal, scale):
        out = aten._scaled_dot_product_flash_attention(
            query, key, value, 0.0, causal, False, scale=scale
        )
        return out[0], out[1]

    def _backward(self, grad_output, query, key, value, output, logsumexp, bias, causal, scale):
        # The kernel takes the logsumexp for contiguous, and reads no random state without dropout.
        unused = query.new_empty(2, dtype=torch.uint64)
        return aten._scaled_dot_product_flash_attention_backward(
            grad_output, query, key, value, output, logsumexp.contiguous(),
            None, None, query.size(2), key.size(2), 0.0, causal, unused, unused[0],
            scale=scale,
        )  # fmt: skip
