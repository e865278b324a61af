"""cuDNN attention, on CUDA."""

import torch
from torch.nn.attention import SDPBackend

from cp_dispatch._compat import cudnn_logsumexp_ndim
from cp_dispatch.backends.base import Backend, aligned

aten = torch.ops.aten


class Cudnn(Backend):
    name = "cudnn"
    sdp_backend = SDPBackend.CUDNN_ATTENTION
    devices = ("cuda",)

    def _forward(self, query, key, value, bias, causal, scale):
        out = aten._scaled_dot_product_cudnn_attention(
            query, key, value, _whole(bias, key), True, 0.0, causal, False, scale=scale
        )
        logsumexp = out[1]
        return out[0], logsumexp.squeeze(-1) if logsumexp.dim() == 4 else logsumexp

    def _backward(self, grad_output, query, key, value, output, logsumexp, bias, causal, scale):
        if cudnn_logsumexp_ndim() == 4:
            logsumexp = logsumexp.unsqueeze(-1)
        # Dropout is off, so the kernel reads no random state.
        unused = query.new_empty((), dtype=torch.int64)
        return aten._scaled_dot_product_cudnn_attention_backward(
            grad_output, query, key, value, output, logsumexp, unused, unused,
            _whole(bias, key), None, None, query.size(2), key.size(2), 0.0, causal,
            scale=scale,
        )  # fmt: skip


def _whole(bias, key):
    """The bias with all columns and in one piece, as the kernel takes it."""
    if bias is None:
        return None
    return aligned(bias.expand(*bias.shape[:-1], key.size(2)).contiguous())
