"""Finds the inputs of a module around ``flex_attention``, and turns plain shards into DTensors."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn.attention.flex_attention import BlockMask

from cp_dispatch.agreement import agree, debug_is_on
from cp_dispatch.errors import ContextParallelError
from cp_dispatch.plain_tensors.uneven import told_by_ranks

_NAMES = ("query", "key", "value")
#: What torch's error says about DTensors beside plain tensors.
MIXED = "got mixed torch.Tensor and DTensor"


def find_inputs(module: str, names: list[str], args: tuple, kwargs: dict) -> list[tuple]:
    """Where query, key and value are: ``(position, None)`` or ``(None, keyword)``.

    ``names`` are the argument names of the module's forward. Query, key and value are the arguments
    ``query``, ``key``, ``value`` or ``q``, ``k``, ``v``, else the first three tensors.
    """
    places = [*((i, None) for i in range(len(args))), *((None, name) for name in kwargs)]

    def name_of(place):
        at, keyword = place
        return keyword if at is None else (names[at] if at < len(names) else None)

    for wanted in (_NAMES, ("q", "k", "v")):
        found = {name_of(place): place for place in places if name_of(place) in wanted}
        if len(found) == 3:
            return [found[name] for name in wanted]
    tensors = [p for p in places if isinstance(value_at(p, args, kwargs), torch.Tensor)]
    if len(tensors) < 3:
        raise ContextParallelError(
            "ContextParallel(attention_type='flex') is for a module that takes query, key and "
            "value, as arguments with these names or as its first three tensors; "
            f"{module} got {len(tensors)} tensors"
        )
    return tensors[:3]


def value_at(place: tuple, args, kwargs):
    """The argument at one of the places of :func:`find_inputs`."""
    at, keyword = place
    return args[at] if keyword is None else kwargs[keyword]


def lengths_of_masks(args: tuple, kwargs: dict) -> list[int]:
    """Global lengths of the block masks among the arguments."""
    masks = [x for x in (*args, *kwargs.values()) if isinstance(x, BlockMask)]
    return [length for mask in masks for length in mask.seq_lengths]


def as_dtensors(places, args: tuple, kwargs: dict, mesh: DeviceMesh, seq_dim: int, lengths):
    """The same arguments, with plain shards at ``places`` turned into DTensors of these global
    lengths."""
    made = []
    for place, length in zip(places, lengths, strict=True):
        x = value_at(place, args, kwargs)
        if not isinstance(x, DTensor):
            shape = list(x.shape)
            shape[seq_dim] = length
            # The shard's memory order, with the global sizes.
            order = sorted(range(x.ndim), key=lambda dim: (-x.stride(dim), dim))
            stride, step = [0] * x.ndim, 1
            for dim in reversed(order):
                stride[dim] = step
                step *= shape[dim]
            x = DTensor.from_local(
                x, mesh, [Shard(seq_dim % x.ndim)], run_check=False,
                shape=torch.Size(shape), stride=tuple(stride),
            )  # fmt: skip
        made.append(x)
    return with_inputs(places, made, args, kwargs)


def on_dtensors(module: torch.nn.Module) -> str:
    """What :data:`MIXED` means for a module that the style runs on DTensors."""
    return (
        f"ContextParallel(attention_type='flex') runs {type(module).__name__} on DTensors, which "
        "it combines with a plain tensor, such as a parameter. Instead of the style, call the "
        "model inside context_parallel, with the BlockMask among the buffers, where all tensors "
        "stay plain"
    )


def with_inputs(places, tensors, args: tuple, kwargs: dict):
    """The same arguments with these tensors at ``places``."""
    args, kwargs = list(args), dict(kwargs)
    for (at, keyword), x in zip(places, tensors, strict=True):
        if keyword is None:
            args[at] = x
        else:
            kwargs[keyword] = x
    return tuple(args), kwargs


def global_lengths(given: list[torch.Tensor], mesh: DeviceMesh, seq_dim: int, uneven: bool):
    """Global lengths of the sequences of these shards; if uneven, by a collective."""
    own = [x.shape[seq_dim] for x in given]
    if not uneven:
        return [
            x.shape[seq_dim] if isinstance(x, DTensor) else length * mesh.size()
            for x, length in zip(given, own, strict=True)
        ]
    if debug_is_on():  # ranks that refuse do not reach the exchange
        agree("flex_attention", "    lengths are told next", (), mesh)
    local = [0 if isinstance(x, DTensor) else n for x, n in zip(given, own, strict=True)]
    sums = map(sum, told_by_ranks(mesh, local))
    return [
        n if isinstance(x, DTensor) else total for x, n, total in zip(given, own, sums, strict=True)
    ]
