"""Running a problem on plain shards inside ``context_parallel``."""

from __future__ import annotations

import torch

import cp_dispatch
from cp_dispatch.plain_tensors.context import layout_for


def run_plain(
    problem, tensors, mesh, *, mask_dims=(), buffers=True, needs=True, attend=None, **options
):
    """Whole output, dQ, dK and dV, in natural order, of the call on plain shards.

    ``mask_dims`` are the dims along which a rank gets its part of the mask. With ``buffers`` the
    context cuts the tensors, otherwise :func:`cp_dispatch.shard` does. ``attend`` replaces
    ``problem.attend``.
    """
    *inputs, grad = (x.clone() for x in tensors)
    mask = problem.attn_mask()
    masks = [] if mask is None else [mask.detach().to(mesh.device_type, copy=True)]
    dim = problem.sequence_dim
    order = options.get("balancer", "auto")

    def cut(x, at):
        return cp_dispatch.shard(mesh, x, at, layout_for(order, x.shape[at], mesh.size()))

    masks = [_cut_dims(cut, x, mask_dims) for x in masks]
    named = {"buffers": [*inputs, grad], "buffer_seq_dims": [dim] * 4} if buffers else {}
    if not buffers:
        *inputs, grad = (cut(x, dim) for x in (*inputs, grad))
    with cp_dispatch.context_parallel(mesh, **named, **options):
        shards = [x.detach().clone().requires_grad_(needs) for x in inputs]
        own = grad.detach().clone()
        output = (attend or problem.attend)(*shards, *masks)
    assert type(output) is torch.Tensor and output.shape == own.shape
    results = [output.detach()]
    if needs:
        results += torch.autograd.grad(output, shards, own)
    return cp_dispatch.context_parallel_unshard(
        mesh, results, [dim] * len(results), balancer=order
    ) + [None] * (4 - len(results))


def _cut_dims(cut, mask, dims):
    for dim in dims:
        mask = cut(mask, dim)
    return mask
