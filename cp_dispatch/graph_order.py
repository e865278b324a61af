"""Communication in compiled graphs: on every rank the same, in the same order.

Note [Graphs of ranks]
~~~~~~~~~~~~~~~~~~~~~~
Each rank compiles its own graph, and torch decides by the sizes of its shard. Of torch's own
collectives it knows that all ranks take part in them; our ops are to it like any others that
compute something. So without what stands here

- inductor orders ops that do not need each other by the memory that this takes, which is another
  order where shards are uneven: two rings meet each other's partners, or an all-gather of torch's.
  Inside inductor our ops therefore come in the order of the trace, among themselves and among
  torch's collectives, as these do among themselves;
- what comes of no rows is nothing that a graph would compute: on a rank without rows an op is left
  out whose results only have consumers of no size. There an op that nobody leaves out reads them;
- a backward op whose gradients are constants on a rank without rows (torch differentiates some
  norms of nothing so) or that reads keys alone could move to the forward. It is held back;
- told to save memory (``activation_memory_budget``, ``aggressive_recomputation``), torch weighs
  sizes to say which ops a backward repeats, which may be a ring on one rank and not on another.
  Ours are not repeated, as torch's collectives are not, but in checkpoints.

Torch's own collectives have that last trouble too, see :func:`warn_of_no_rows`.
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
    leave_in_backward,
    leave_in_forward,
    local_tensor,
    save_in_partitioners,
    size_hint,
)
from cp_dispatch.graph_ops import keep as keep_op


def communicates(op) -> bool:
    """Whether an op is one of ours and may talk to other ranks."""
    return getattr(op, "namespace", None) == "cp_dispatch" and "group_name" in argument_names(op)


def _knows_memory(op) -> bool:
    """Whether an op knows masks or documents by their memory (:mod:`cp_dispatch.by_need.kept`).
    Graphs that make several write one over another, and count no version of it."""
    if getattr(op, "namespace", None) != "cp_dispatch":
        return False
    return any(name in ("kv_num", "cu_seq_q") for name in argument_names(op))


def keep_order() -> None:
    """To be called in a trace: see the first and last part of Note [Graphs of ranks]; and keep
    masks and documents that a graph makes."""
    keep_order_in_inductor(communicates, _knows_memory)
    save_in_partitioners(communicates)


def keep_in_graph(result: Tensor, rows: Iterable[Tensor], backward: bool = False) -> None:
    """In a trace on a rank where some of ``rows`` (its queries, its keys) are none, hold on to the
    op that made ``result``, in the forward or in the backward."""
    if is_tracing() and any(0 in _local(x).shape for x in rows):
        keep_op(_local(result).detach())
        if backward:
            leave_in_backward(keep_op)
            leave_in_forward(keep_op)


def stay_in_backward(op: torch._ops.OpOverload) -> None:
    """In a trace, let the call of ``op`` that was just made not move to the forward."""
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
