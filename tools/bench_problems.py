"""What the benches of FlexAttention and varlen_attn share: documents, and the steps they time."""

from __future__ import annotations

import torch


def document_lengths(length: int, mean: int) -> list[int]:
    """Uniform in [1, 2 * mean), the same on every rank, until the sequence is full."""
    generator = torch.Generator().manual_seed(0)
    lengths, left = [], length
    while left:
        size = min(left, int(torch.randint(1, 2 * mean, (), generator=generator)))
        lengths.append(size)
        left -= size
    return lengths


def steps(inputs, grad, call):
    """A forward without gradients, and a forward with its backward, by the mode's name."""

    def forward():
        with torch.no_grad():
            return call(*inputs)

    leaves = [x.detach().requires_grad_() for x in inputs]

    def both():
        return torch.autograd.grad(call(*leaves), leaves, grad)

    return {"fwd": forward, "fwd+bwd": both}
