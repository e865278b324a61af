"""Torch's flash attention for CPU."""

import torch
from torch.nn.attention import SDPBackend

from cp_dispatch.backends.base import Backend

aten = torch.ops.aten


class CpuFlash(Backend):
    name = "cpu_flash"
    sdp_backend = SDPBackend.FLASH_ATTENTION
    devices = ("cpu",)

    def _forward(self, query, key, value, causal, scale):
        return aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, causal, scale=scale
        )

    def _backward(self, grad_output, query, key, value, output, logsumexp, causal, scale):
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad_output, query, key, value, output, logsumexp, 0.0, causal, scale=scale
        )
