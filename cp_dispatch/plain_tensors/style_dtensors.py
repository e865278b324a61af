"""DTensors that a module in the style ``ContextParallel`` takes and returns."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from cp_dispatch.errors import ContextParallelError
from cp_dispatch.layouts import Span
from cp_dispatch.layouts.spans import chunk
from cp_dispatch.plain_tensors.context import whole_of


def has_sequence(x: torch.Tensor, seq_dim: int) -> bool:
    """Whether a tensor has this dim."""
    return -x.ndim <= seq_dim < x.ndim


def wholes_among(given: list[torch.Tensor], mesh: DeviceMesh, seq_dim: int) -> list[DTensor]:
    """The inputs that are DTensors, which must be sharded along the sequence.

    Raises:
        ContextParallelError: if one is placed in another way.
    """
    wholes = [x for x in given if isinstance(x, DTensor)]
    for x in wholes:
        fits = has_sequence(x, seq_dim) and x.device_mesh == mesh
        if not fits or list(x.placements) != [Shard(seq_dim % x.ndim)]:
            raise ContextParallelError(
                f"ContextParallel(seq_dim={seq_dim}) takes plain shards, or DTensors that are "
                f"Shard({seq_dim}) on {mesh}; an input of shape {list(x.shape)} has placements "
                f"{x.placements} on {x.device_mesh}"
            )
    return wholes


def whole_output(x: torch.Tensor, mesh: DeviceMesh, seq_dim: int, length: int) -> torch.Tensor:
    """The DTensor, of ``length`` along the sequence, of which an output is this rank's shard; the
    output itself if it has no such dim.

    Raises:
        ContextParallelError: if it does not have the length of this rank's shard.
    """
    if not has_sequence(x, seq_dim):
        return x
    own = chunk(Span(0, length), mesh.size())[mesh.get_local_rank()].length
    if x.shape[seq_dim] != own:
        raise ContextParallelError(
            f"ContextParallel(seq_dim={seq_dim}) turns outputs into DTensors if inputs are "
            f"DTensors, but an output of shape {list(x.shape)} does not have this rank's {own} of "
            f"{length} positions along dim {seq_dim}; pass the module plain shards, or apply the "
            "style to a smaller module whose outputs have the sequence in the same dim as its "
            "inputs"
        )
    return whole_of(mesh, x, seq_dim % x.ndim, length)
