"""Torch's flash attention for CPU."""

import torch
from torch.nn.attention import SDPBackend

from cp_dispatch.backends.base import Backend

aten = torch.ops.aten


class CpuFlash(Backend):
    name = "cpu_flash"
    sdp_backend = SDPBackend.FLASH_ATTENTION
    devices = ("cpu",)
    one_head_dim = True

    def _forward(self, query, key, value, bias, causal, scale):
        return aten._scaled_dot_product_flash_attention_for_cpu.default(
            query, key, value, 0.0, causal, attn_mask=_whole(bias, key), scale=scale
        )

    def _backward(self, grad_output, query, key, value, output, logsumexp, bias, causal, scale):
        if query.dtype.itemsize == 2 and query.size(2) < _SHORT:
            tensors = (x.float() for x in (grad_output, query, key, value, output))
            bias = None if bias is None else bias.float()
            grads = self._backward(*tensors, logsumexp, bias, causal, scale)
            return tuple(x.to(query.dtype) for x in grads)
        return aten._scaled_dot_product_flash_attention_for_cpu_backward.default(
            grad_output, query, key, value, output, logsumexp, 0.0, causal,
            attn_mask=_whole(bias, key), scale=scale,
        )  # fmt: skip


# The kernel sums dK and dV in the inputs' dtype over blocks of rows, which are smaller for fewer
# rows than this. A shard has fewer rows than one device, so its error would be larger.
_SHORT = 768


def _whole(bias, key):
    """The bias with all columns, as the kernel takes it."""
    return None if bias is None else bias.expand(*bias.shape[:-1], key.size(2)).contiguous()
