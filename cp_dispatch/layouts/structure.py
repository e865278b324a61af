"""Maps a function over nested lists and dicts of tensors, each with its sequence dim."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.distributed.tensor import DTensor

from cp_dispatch.errors import ContextParallelError


def map_tensors(function, buffers, seq_dims, name: str = "buffers", on_mask=None):
    """The structure of ``buffers``, with ``function(tensor, dim, name)`` in place of every tensor
    and ``on_mask(mask, name)`` in place of every ``BlockMask``.

    ``dim`` is non-negative; ``name`` says where the tensor is, for messages.

    Raises:
        ContextParallelError: if something is not a plain tensor or has no such sequence dim.
    """
    if buffers is None:
        return None
    if isinstance(buffers, torch.Tensor):
        return function(buffers, _check_tensor(buffers, seq_dims, name), name)
    if on_mask is not None and hasattr(buffers, "kv_num_blocks"):
        return on_mask(buffers, name)
    if isinstance(buffers, Mapping):
        keys = list(buffers)
        if isinstance(seq_dims, Mapping) and set(seq_dims) != set(keys):
            raise ContextParallelError(
                f"{name} has the keys {keys}, but seq_dims has {list(seq_dims)}"
            )
    elif isinstance(buffers, (list, tuple)):
        keys = range(len(buffers))
        if isinstance(seq_dims, (list, tuple)) and len(seq_dims) != len(keys):
            raise ContextParallelError(
                f"{name} holds {len(keys)} tensors, but seq_dims holds {len(seq_dims)} ints"
            )
    else:
        raise ContextParallelError(
            f"{name} must be a tensor, or a list, tuple or dict of tensors, got "
            f"{type(buffers).__name__}"
        )
    kinds = Mapping if isinstance(buffers, Mapping) else (list, tuple)
    if not isinstance(seq_dims, (int, kinds)):
        raise ContextParallelError(
            f"seq_dims for {name} must be an int or a {type(buffers).__name__} of ints, got "
            f"{seq_dims!r}"
        )
    mapped = {
        key: map_tensors(
            function,
            buffers[key],
            seq_dims if isinstance(seq_dims, int) else seq_dims[key],
            f"{name}[{key!r}]",
            on_mask,
        )
        for key in keys
    }
    if isinstance(buffers, Mapping):
        return mapped
    values = list(mapped.values())
    return type(buffers)(*values) if hasattr(buffers, "_fields") else type(buffers)(values)


def _check_tensor(tensor: torch.Tensor, dim, name: str) -> int:
    """The sequence dim, counted from the front."""
    if isinstance(tensor, DTensor):
        raise ContextParallelError(
            f"{name} is a DTensor with placements {tensor.placements}; sharding and unsharding "
            "take plain tensors: pass x.full_tensor() to shard one (also in context_parallel) or "
            "x.to_local() to unshard one, or, in natural order, use x.redistribute() instead"
        )
    if isinstance(dim, bool) or not isinstance(dim, int):
        raise ContextParallelError(f"the seq_dim of {name} must be an int, got {dim!r}")
    if not -tensor.ndim <= dim < tensor.ndim:
        raise ContextParallelError(
            f"{name} has shape {list(tensor.shape)}, which has no dim {dim} for the sequence"
        )
    return dim % tensor.ndim
