"""Memory-efficient attention (CUTLASS, from xFormers) as torch ships it, on CUDA."""

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend

from cp_dispatch.backends.base import CUDA_GRID, Backend, aligned
from cp_dispatch.backends.no_coins import no_coins

aten = torch.ops.aten

# The kernel's logsumexp has rows padded to this multiple, with +inf.
_LOGSUMEXP_MULTIPLE = 32
_BIAS_MULTIPLE = 16


class Efficient(Backend):
    name = "efficient"
    sdp_backend = SDPBackend.EFFICIENT_ATTENTION
    devices = ("cuda",)
    largest_grid = CUDA_GRID
    grouped_heads = False

    def _forward(self, query, key, value, bias, causal, scale):
        out = aten._scaled_dot_product_efficient_attention.default(
            query,
            key,
            value,
            _aligned(bias, query, key),
            True,
            0.0,
            causal,
            scale=scale,
        )
        return out[0], out[1][:, :, : query.size(2)]

    def _backward(self, grad_output, query, key, value, output, logsumexp, bias, causal, scale):
        missing = -logsumexp.size(2) % _LOGSUMEXP_MULTIPLE
        if missing:
            logsumexp = F.pad(logsumexp, (0, missing), value=torch.inf)
        _, unused = no_coins(query.device, torch.int64)
        bias = _aligned(bias, query, key)
        output = _heads_side_by_side(output)
        grads = aten._scaled_dot_product_efficient_attention_backward.default(
            grad_output, query, key, value, bias, output, aligned(logsumexp.contiguous()),
            unused, unused, 0.0, [True, True, True, False], causal,
            scale=scale,
        )  # fmt: skip
        return grads[:3]


def _heads_side_by_side(output):
    """The output in the memory order that the kernel assumes: a row's heads one after the other."""
    rows = output.transpose(1, 2)
    return output if rows[0].is_contiguous() else rows.contiguous().transpose(1, 2)


def _aligned(bias, query, key):
    """The bias as the kernel takes it: whole, rows starting at multiples of 16 elements."""
    if bias is None:
        return None
    shape = query.size(0), query.size(1), query.size(2), key.size(2)
    columns = shape[-1]
    buffer = bias.new_empty(*bias.shape[:-1], columns + -columns % _BIAS_MULTIPLE)
    buffer[..., :columns].copy_(bias)
    return buffer[..., :columns].expand(shape)
