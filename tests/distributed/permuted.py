"""Running a :class:`~tests.distributed.reference.Problem` on data that a balancer has permuted."""

from __future__ import annotations

import torch
from torch.distributed.tensor import Replicate, Shard

import cp_dispatch
from cp_dispatch import BlockBalanced, HeadTail, PerDocumentHeadTail
from tests.distributed.sharded import distribute


def permuted(tensor, index, dim):
    """``tensor`` with its rows along ``dim`` in the order of ``index`` ``(1 or B, S)``."""
    index = index.to(tensor.device)
    if index.size(0) == 1:
        return tensor.index_select(dim, index[0])
    rows = [x.index_select(dim - 1, i) for x, i in zip(tensor, index, strict=True)]
    return torch.stack(rows)


def run_permuted(
    problem, balancer, mesh, *, mask_placements=None, placements=None, schedule="auto"
):
    """Output, dQ, dK, dV and the bias's gradient in natural order, computed on permuted data.

    Everything that is sharded along the sequence is permuted first, also the mask.
    """
    placements = placements or [Shard(2)] + [Replicate()] * (mesh.ndim - 1)
    *tensors, grad = (permuted(x, balancer.indices, 2) for x in problem.tensors(mesh.device_type))
    inputs = [distribute(x, mesh, placements).requires_grad_() for x in tensors]
    mask = problem.attn_mask(mesh.device_type)
    masks = []
    order = [p.dim for p in mask_placements or () if p in (Shard(2), Shard(3))]
    if mask is not None:
        moved = mask.detach()
        for dim in order:
            moved = permuted(moved, balancer.indices, dim) if moved.size(dim) > 1 else moved
        if mask_placements is not None:
            moved = distribute(moved, mesh, mask_placements)
        masks = [moved.requires_grad_(mask.requires_grad)]
    with cp_dispatch.enabled(schedule=schedule, layout=balancer):
        output = problem.attend(*inputs, *masks)
    assert output.placements == tuple(placements)
    wanted = [x for x in (*inputs, *masks) if x.requires_grad]
    grads = torch.autograd.grad(output, wanted, distribute(grad, mesh, placements))
    results = [
        permuted(x.full_tensor().detach(), balancer.inverse, 2) for x in (output, *grads[:3])
    ]
    for x in grads[3:]:
        whole = x.full_tensor()
        for dim in order:
            whole = permuted(whole, balancer.inverse, dim) if whole.size(dim) > 1 else whole
        results.append(whole)
    return results


def balancers(length: int, world_size: int, batch: int) -> dict:
    first, second = length // 3, length // 5
    rest = length - first - second
    found = {
        "head-tail": HeadTail(length, world_size),
        "documents": PerDocumentHeadTail([first, second, rest], world_size),
        "documents of each row": PerDocumentHeadTail(
            [[length - row, row] if row else [length] for row in range(batch)], world_size
        ),
    }
    if length % (4 * world_size) == 0:
        work = list(range(1, 4 * world_size + 1))
        found["blocks"] = BlockBalanced(work, world_size, length // (4 * world_size))
    return found
