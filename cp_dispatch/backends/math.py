"""Attention in plain matrix products: the reference, for every device and dtype."""

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from cp_dispatch.backends.base import Backend


class Math(Backend):
    """Computes in float32 for 16-bit inputs, as torch's math kernel does, and in the inputs'
    dtype otherwise; outputs, and partial gradients, stay in that wide dtype."""

    name = "math"
    sdp_backend = SDPBackend.MATH
    devices = ("cpu", "cuda")
    wide_output = True
    takes_dropout = True
    mask_gradient = True
    grouped_heads = False

    def _forward(self, query, key, value, bias, causal, scale, dropout=None):
        query, key, value = _widen(query, key, value)
        scores = _scores(query, key, bias, causal, scale)
        logsumexp = torch.logsumexp(scores, dim=-1)
        probability = torch.exp(scores - logsumexp.unsqueeze(-1))
        if dropout is not None:
            probability = probability * dropout
        return probability @ value, logsumexp

    def _backward(
        self, grad_output, query, key, value, output, logsumexp, bias, causal, scale, dropout=None
    ):
        grad_output, query, key, value, output = _widen(grad_output, query, key, value, output)
        probability = torch.exp(_scores(query, key, bias, causal, scale) - logsumexp.unsqueeze(-1))
        correction = (grad_output * output).sum(-1, keepdim=True)
        grad_probability = grad_output @ value.mT
        dropped = probability
        if dropout is not None:
            dropped, grad_probability = probability * dropout, grad_probability * dropout
        grad_value = dropped.mT @ grad_output
        grad_scores = probability * (grad_probability - correction)
        grad_query, grad_key = (
            (grad_scores @ key) * scale,
            (grad_scores.mT @ query) * scale,
        )
        return grad_query, grad_key, grad_value, grad_scores


def _widen(*tensors: Tensor) -> list[Tensor]:
    return [x.float() if x.dtype in (torch.float16, torch.bfloat16) else x for x in tensors]


def _scores(query: Tensor, key: Tensor, bias: Tensor | None, causal: bool, scale: float) -> Tensor:
    scores = (query * scale) @ key.mT
    if bias is not None:
        scores = scores + bias
    if causal:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(future, -torch.inf)
    return scores
