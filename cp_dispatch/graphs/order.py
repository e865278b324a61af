"""Keeps the communication of compiled graphs the same, and in the same order, on every rank.

Note [Graphs of ranks]
~~~~~~~~~~~~~~~~~~~~~~
Each rank compiles its own graph, and torch makes decisions by the sizes of the rank's shard. Torch
knows that its own collectives involve all ranks; it treats our ops like any other computation.
Without this module:

- Inductor would order independent ops by memory use, which differs between ranks if shards are
  uneven. Two rings could then be matched with each other, or with an all-gather of torch's. So
  inside inductor our ops keep the order of the trace, among themselves and relative to torch's
  collectives.
- On a rank without rows, an op whose results are used only by consumers of size zero would be
  removed. So another op that is never removed reads the results.
- A backward op could move to the forward if its gradients are constants on a rank without rows
  (torch differentiates some norms of empty tensors this way) or if it reads only keys. It is held
  back.
- When asked to save memory (``activation_memory_budget``, ``aggressive_recomputation``), torch
  decides by sizes which ops the backward repeats, so a ring might be repeated on one rank and not
  on another. Ours are not repeated, like torch's collectives, except in checkpoints.

Torch's own collectives have the third problem too, see :func:`warn_of_no_rows`.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from cp_dispatch._compat import (
    argument_names,
    is_tracing,
    keep_order_in_inductor,
    keep_sizes_traceable,
    leave_in_backward,
    leave_in_forward,
    local_tensor,
    save_in_partitioners,
    size_hint,
)
from cp_dispatch.graphs.ops import keep as keep_op


def communicates(op) -> bool:
    """Whether an op is one of ours that may communicate with other ranks."""
    return getattr(op, "namespace", None) == "cp_dispatch" and "group_name" in argument_names(op)


def _knows_memory(op) -> bool:
    """Whether an op recognizes masks or documents by their memory
    (:mod:`cp_dispatch.by_need.kept`). Graphs that make several of them overwrite one with another,
    without a new version."""
    if getattr(op, "namespace", None) != "cp_dispatch":
        return False
    return any(name in ("kv_num", "cu_seq_q") for name in argument_names(op))


def keep_order() -> None:
    """Call this in a trace, for the first and last item of Note [Graphs of ranks], to keep masks
    and documents that the graph makes or that our ops return, and for sizes that change from call
    to call."""
    keep_sizes_traceable()
    keep_order_in_inductor(communicates, _knows_memory)
    save_in_partitioners(communicates)


def keep_in_graph(result: Tensor, rows: Iterable[Tensor], backward: bool = False) -> None:
    """In a trace on a rank where one of ``rows`` (its queries, its keys) is empty, keep the op that
    made ``result`` in the graph, in the forward or in the backward."""
    if is_tracing() and any(0 in _local(x).shape for x in rows):
        keep_op(_local(result).detach())
        if backward:
            leave_in_backward(keep_op)
            leave_in_forward(keep_op)


def stay_in_backward(op: torch._ops.OpOverload) -> None:
    """In a trace, keep the last call of ``op`` from moving to the forward."""
    if is_tracing():
        leave_in_backward(op)


def _local(x: Tensor) -> Tensor:
    return local_tensor(x) if isinstance(x, DTensor) else x


_warned = False


def warn_of_no_rows(tensors: Iterable[Tensor]) -> None:
    """In a trace for training, warn on every rank if the length of one of these DTensors leaves a
    rank without rows: on that rank torch may run collectives of the backward in the forward."""
    global _warned
    if _warned or not is_tracing() or not torch.is_grad_enabled():
        return
    tensors = [x for x in tensors if isinstance(x, DTensor)]
    if not any(x.requires_grad for x in tensors):
        return
    for x in tensors:
        if leaves_a_rank_without(x):
            _warned = True
            warnings.warn(
                f"a compiled graph is trained with shards of {tuple(map(size_hint, x.shape))} "
                f"{x.placements} on a mesh of {tuple(x.device_mesh.shape)}, which leaves some rank "
                "without rows. If such a graph has other collectives than those of attention, "
                "torch (2.11 to 2.14) may run those of the backward in the forward on that rank "
                "alone, and hang or compute wrong gradients. Attention alone is correct. Pad the "
                "sequence, or run this length uncompiled.",
                stacklevel=2,
            )
            return


def leaves_a_rank_without(x: DTensor) -> bool:
    """Whether some rank's shard of a DTensor is empty; adds no guards on its sizes."""
    sizes = {dim: {size_hint(size)} for dim, size in enumerate(x.shape)}
    for ranks, placement in zip(x.device_mesh.shape, x.placements, strict=True):
        if isinstance(placement, Shard):
            sizes[placement.dim] = {
                shard for size in sizes[placement.dim] for shard in _shards(size, ranks)
            }
    return any(0 in found for found in sizes.values())


def _shards(size: int, ranks: int) -> set[int]:
    """The possible sizes of shards, as ``torch.chunk`` cuts them."""
    largest = -(-size // ranks)
    return {max(0, min(largest, size - rank * largest)) for rank in range(ranks)}
