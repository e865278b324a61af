"""Results of a rank: empty tensors of their shapes, and conversion to DTensors."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from cp_dispatch._compat import local_tensor
from cp_dispatch.backends import wide_dtype


def outlines(query: Tensor, value_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Zeros in the shapes of output, logsumexp and maximum of these rows."""
    shape = query.shape[:3]
    stats = wide_dtype(query.dtype)
    out = query.new_zeros((*shape, value_dim))
    return out, query.new_zeros(shape, dtype=stats), query.new_zeros(shape, dtype=stats)


def not_before(results, *waited) -> list[Tensor]:
    """The results of a rank without rows, made to depend on what it ``waited`` for.

    A graph drops computations without users, and moves those that do not depend on gradients from
    the backward to the forward. Without the dependency the other ranks would wait forever for this
    rank's part in an exchange.
    """
    starts = [x.unsqueeze(0)[:0] for x in waited if isinstance(x, Tensor)]
    return torch.ops.cp_dispatch.flex_apart([*results, *starts])[: len(results)]


def zeros_for(captured) -> Tensor | None:
    """Zero gradients of the tensors that a mod captures, for a rank without rows."""
    needs = isinstance(captured, Tensor) and captured.is_floating_point()
    return torch.zeros_like(captured) if needs else None


def no_gradients(tensors, captured, *waited) -> tuple[list[Tensor], list[Tensor | None]]:
    """Zeros for ``tensors`` and for what a mod ``captured``, :func:`not_before` what they wait
    for: those of captured tensors are summed over all ranks."""
    zeros = [zeros_for(x) for x in captured]
    given = [torch.zeros_like(x) for x in tensors] + [x for x in zeros if x is not None]
    given = not_before(given, *waited)
    found = iter(given[len(tensors) :])
    return given[: len(tensors)], [None if x is None else next(found) for x in zeros]


def placed_strides(shape, like) -> tuple:
    """Strides of dense memory with its dims in the order that the strides ``like`` have, the last
    dim innermost."""
    outer = sorted(range(len(shape) - 1), key=lambda dim: (-like[dim], dim))
    strides, step = [1] * len(shape), 1
    for dim in reversed([*outer, len(shape) - 1]):
        strides[dim] = step
        step = step * shape[dim]
    return tuple(strides)


def wrap(local: Tensor, like: DTensor, placements=None) -> DTensor:
    """A result of this rank as a DTensor with the batch, heads and sequence of ``like``.

    Its memory has the dims in the order of the strides of ``like``: whether a DTensor can be viewed
    is decided by its global strides, and the view is then made of the shard.
    """
    shape = (*like.shape[:3], *local.shape[3:])
    order = like.stride() if local.ndim == 4 else sorted(like.stride()[:3], reverse=True)
    wanted = placed_strides(local.shape, order)
    differ = [
        dim for dim in range(local.ndim)
        if local.shape[dim] > 1 and local.stride(dim) != wanted[dim]
    ]  # fmt: skip
    if differ and 0 not in local.shape:
        local = torch.empty_strided(
            local.shape, wanted, dtype=local.dtype, device=local.device
        ).copy_(local)
    return DTensor.from_local(
        local, like.device_mesh, like.placements if placements is None else placements,
        run_check=False, shape=torch.Size(shape), stride=placed_strides(shape, order),
    )  # fmt: skip


def nothing(like: DTensor, dims: int) -> DTensor:
    """The result on a rank outside the mesh."""
    shape = like.shape[:dims]
    return DTensor.from_local(
        local_tensor(like).new_empty(0), like.device_mesh, like.placements, run_check=False,
        shape=shape, stride=torch.empty(shape, device="meta").stride(),
    )  # fmt: skip
