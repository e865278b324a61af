"""cuDNN attention, on CUDA."""

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend

from cp_dispatch._compat import cudnn_logsumexp_ndim
from cp_dispatch.backends import packed_heads
from cp_dispatch.backends.base import CUDA_GRID, Backend, aligned
from cp_dispatch.backends.no_coins import no_coins

aten = torch.ops.aten


class Cudnn(Backend):
    name = "cudnn"
    sdp_backend = SDPBackend.CUDNN_ATTENTION
    devices = ("cuda",)
    largest_grid = CUDA_GRID
    largest_workspace = 2**29

    def _forward(self, query, key, value, bias, causal, scale):
        single = _single_pair(query, key)
        if single:
            query, causal = _twice(query), False
        out = aten._scaled_dot_product_cudnn_attention.default(
            query, key, value, _whole(bias, key), True, 0.0, causal, False, scale=scale
        )
        output, logsumexp = out[0], out[1]
        logsumexp = logsumexp.squeeze(-1) if logsumexp.dim() == 4 else logsumexp
        return (output[:, :, :1], logsumexp[:, :, :1]) if single else (output, logsumexp)

    def _backward(self, grad_output, query, key, value, output, logsumexp, bias, causal, scale):
        may_pack = bias is None and not causal
        if may_pack and packed_heads.saved_bytes(query, key, value) >= packed_heads.LEAST_SAVED:
            rows = grad_output, query, output, logsumexp
            go, q, out, lse = packed_heads.packed(rows, key.size(1))
            dq, dk, dv = self._backward(go, q, key, value, out, lse, None, False, scale)
            return packed_heads.unpacked(dq, query.size(1)), dk, dv
        single = _single_pair(query, key)
        if single:
            # A second row without a gradient has no share in anything.
            grad_output, causal = F.pad(grad_output, (0, 0, 0, 1)), False
            query, output, logsumexp = map(_twice, (query, output, logsumexp))
        # The kernel takes them for contiguous.
        logsumexp = logsumexp.contiguous()
        if cudnn_logsumexp_ndim() == 4:
            logsumexp = logsumexp.unsqueeze(-1)
        _, unused = no_coins(query.device, torch.int64)
        dq, dk, dv = aten._scaled_dot_product_cudnn_attention_backward.default(
            grad_output, query, key, value, output, logsumexp, unused, unused,
            _whole(bias, key), None, None, query.size(2), key.size(2), 0.0, causal,
            scale=scale,
        )  # fmt: skip
        return dq[:, :, :1] if single else dq, dk, dv


def _single_pair(query, key) -> bool:
    """One row and one key, the only lengths that cuDNN refuses."""
    return query.size(2) == 1 and key.size(2) == 1


def _twice(tensor):
    return torch.cat((tensor, tensor), dim=2)


def _whole(bias, key):
    """The bias with all columns and in one piece, as the kernel takes it."""
    if bias is None:
        return None
    return aligned(bias.expand(*bias.shape[:-1], key.size(2)).contiguous())
