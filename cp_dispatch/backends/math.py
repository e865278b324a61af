"""Attention from plain matrix products: the reference backend, for every device and dtype."""

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from cp_dispatch.backends.base import Backend
from cp_dispatch.native.parts import wide_dtype


class Math(Backend):
    """Computes in float32 for 16-bit inputs, as torch's math kernel does, and in the inputs'
    dtype otherwise.

    The output and the logsumexp are float64. The backward recomputes probabilities and their mean
    gradient from them, whereas torch's kernel keeps the probabilities. Rounded to float32, they
    would cause up to 1.8 times the error of one device.
    """

    name = "math"
    sdp_backend = SDPBackend.MATH
    devices = ("cpu", "cuda")
    takes_dropout = True
    mask_gradient = True
    takes_any_bias = True
    holds_scores = True
    grouped_heads = False

    def output_dtype(self, dtype):
        return torch.float64

    def logsumexp_dtype(self, dtype):
        return torch.float64

    def gradient_dtype(self, dtype):
        return wide_dtype(dtype)

    def _forward(self, query, key, value, bias, causal, scale, dropout=None):
        query, key, value = _widen(query, key, value)
        scores = _scores(query, key, bias, causal, scale)
        largest = _finite(scores.amax(-1, keepdim=True))
        weight = torch.exp(scores - largest)
        total = weight.sum(-1, keepdim=True)
        logsumexp = largest.double() + total.double().log()
        if dropout is not None:
            weight = weight * dropout
        return weight @ value / total, logsumexp.squeeze(-1)

    def _backward(
        self, grad_output, query, key, value, output, logsumexp, bias, causal, scale, dropout=None
    ):
        correction = (grad_output.double() * output.double()).sum(-1, keepdim=True)
        query, key, value = _widen(query, key, value)
        grad_output, correction = grad_output.to(query.dtype), correction.to(query.dtype)
        # exp(score - logsumexp): the small difference in float32, the rest, one number per row, in
        # float64. This is as exact as the softmax of one device.
        scores = _scores(query, key, bias, causal, scale)
        largest = scores.amax(-1, keepdim=True)
        # 0 for a row without keys in this block, which may have some in others.
        share = torch.exp(largest.double() - logsumexp.unsqueeze(-1)).to(query.dtype)
        probability = torch.exp(scores - _finite(largest)) * share
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


def _finite(largest: Tensor) -> Tensor:
    """The largest score of each row; 0 for a row without keys, since -inf + inf would be NaN."""
    return largest.masked_fill(largest == -torch.inf, 0.0)


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
