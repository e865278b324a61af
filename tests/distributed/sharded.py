"""Running a :class:`~tests.distributed.reference.Problem` on DTensors."""

from __future__ import annotations

import contextlib

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.attention import sdpa_kernel

from tests.distributed.reference import KERNELS, Problem

SEQUENCE = (Shard(2),)


def distribute(tensor: torch.Tensor, mesh, placements) -> DTensor:
    """Cut locally: every rank has the whole tensor, and nothing is sent."""
    return distribute_tensor(tensor, mesh, list(placements), src_data_rank=None)


def average_gradients(model: torch.nn.Module, group) -> None:
    """Average gradients over the ranks of a sequence, as FSDP or DDP would."""
    for parameter in model.parameters():
        grad = parameter.grad
        grad = grad.to_local() if isinstance(grad, DTensor) else grad
        dist.all_reduce(grad, group=group)
        grad /= group.size()


def run_sharded(
    problem: Problem,
    tensors,
    mesh,
    placements=None,
    *,
    key_placements=None,
    value_placements=None,
    mask_placements=None,
    kernel: str | None = None,
    needs=(True, True, True),
    attend=None,
) -> list[torch.Tensor | None]:
    """Whole output, dQ, dK, dV and gradient of the bias of the call on DTensors; None for those
    that were not requested.

    Also checks that the output is placed like the query and every gradient, on each mesh dim, like
    its input, the query or the key. If ``placements`` is None, the sequence is sharded over the
    first mesh dim; if ``mask_placements`` is None, the mask is a plain tensor. If no ``needs`` is
    True, it runs without gradients. ``attend`` replaces ``problem.attend``.
    """
    inputs, masks, placed = distributed_inputs(
        problem, tensors, mesh, placements, key_placements, value_placements, mask_placements, needs
    )
    only = sdpa_kernel(KERNELS[kernel]) if kernel else contextlib.nullcontext()
    wanted = [x.requires_grad for x in (*inputs, *masks)]
    results: list[torch.Tensor | None] = [None] * (1 + len(needs) + any(wanted[3:]))
    with only:
        output = (attend or problem.attend)(*inputs, *masks)
        assert isinstance(output, DTensor), type(output)
        assert output.placements == placed, f"output is {output.placements}"
        results[0] = output.full_tensor().detach()
        asked = [i for i, want in enumerate(wanted) if want]
        if asked:
            grads = torch.autograd.grad(
                output,
                [(*inputs, *masks)[i] for i in asked],
                distribute(tensors[3], mesh, output.placements),
            )
            for i, grad in zip(asked, grads, strict=True):
                own = (*inputs, *masks)[i].placements
                allowed = [own] if i == 3 else [placed, own, inputs[1].placements]
                for placement, *likes in zip(grad.placements, *allowed, strict=True):
                    assert placement in likes, f"gradient {i} is {grad.placements}, input {own}"
                results[i + 1] = grad.full_tensor()
    return results


def distributed_inputs(
    problem, tensors, mesh, placements=None, key_placements=None, value_placements=None,
    mask_placements=None, needs=(True, True, True),
):  # fmt: skip
    """``([query, key, value], [mask] or [], the query's placements)``."""
    if placements is None:
        placements = [Shard(problem.sequence_dim)] + [Replicate()] * (mesh.ndim - 1)
    key_placements = key_placements or placements
    where = placements, key_placements, value_placements or key_placements
    inputs = [
        distribute(x.detach(), mesh, p).requires_grad_(need)
        for x, p, need in zip(tensors[:3], where, needs, strict=True)
    ]
    mask = problem.attn_mask(tensors[0].device)
    masks = [] if mask is None else [mask]
    if mask is not None and mask_placements is not None:
        masks = [
            distribute(mask.detach(), mesh, mask_placements).requires_grad_(mask.requires_grad)
        ]
    return inputs, masks, tuple(placements)
