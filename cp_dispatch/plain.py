"""Context parallelism for models whose activations are plain local tensors.

Has the functions of ``torch.distributed.tensor.experimental`` under the same names and signatures:
existing code only changes its import. Differences from torch 2.13:

- Some calls on which torch raises, hangs or gives wrong results work here: masks, dropout, GQA on
  every kernel, non-causal calls with the defaults, blocks without buffers, lengths that are not a
  multiple of the number of ranks, 3-D inputs, causal calls in ``torch.compile``. Where a plain
  tensor is ambiguous, the call raises instead of guessing; see :func:`context_parallel`.
- The order of the sequence is an argument, ``balancer``. The global
  ``_cp_options.enable_load_balance`` is not read. The default is torch's: head-tail if the length
  is a multiple of 2 W, else natural order. It is chosen from each buffer's own length, where torch
  uses the first buffer's for all. A table that is longer than the sequence has to be cut to the
  sequence's length first; a warning says so. Sequences that have no buffer's length are in the
  order of all buffers; if these differ, calls that depend on the order raise.
- ``torch.nn.functional`` is not patched, so functions that were imported earlier are covered too. A
  block applies to its thread and to backward passes, not to all threads. Blocks nest.
- For the block, buffers get other storage; at its end they get their own back, without copies. What
  autograd saved inside is kept, so the backward may run after the block, unless it has to recompute
  attention, which raises. Buffers that need gradients are refused on entry; torch fails on them
  halfway through.
- ``set_rotate_method`` is read when a block is entered. Blocks do not affect DTensors, which
  ``cp_dispatch.enable`` governs.
- Errors are :class:`ContextParallelError`; where torch raises ``ValueError`` or
  ``NotImplementedError``, they are instances of that too.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Collection, Iterator, Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh

from cp_dispatch._compat import run_uncompiled
from cp_dispatch.errors import (
    ContextParallelError,
    ContextParallelNotImplementedError,
    ContextParallelValueError,
)
from cp_dispatch.fused_modules import no_fast_path
from cp_dispatch.layouts import Balancer, unshard
from cp_dispatch.layouts.buffers import permute
from cp_dispatch.plain_tensors.buffers import checked, length_of, listed, shard_of, swapped
from cp_dispatch.plain_tensors.context import (
    PlainContext,
    check_balancer,
    check_order,
    layout_for,
    order_of_buffers,
)
from cp_dispatch.toggle import plain_context, plain_shards

# Torch's names for how keys travel, and the schedules that they select.
ROTATE_METHODS = {"allgather": "auto", "alltoall": "ring"}

_schedule = ROTATE_METHODS["allgather"]


@contextlib.contextmanager
def context_parallel(
    mesh: DeviceMesh,
    *,
    buffers: Sequence[torch.Tensor] | None = None,
    buffer_seq_dims: Sequence[int] | None = None,
    no_restore_buffers: Collection[torch.Tensor] | None = None,
    balancer: Balancer | str | None = "auto",
    schedule: str | None = None,
) -> Iterator[None]:
    """Inside the block, ``F.scaled_dot_product_attention`` treats plain tensors as this rank's
    shards over ``mesh``, and attends to the whole sequence.

    Query ``(B, H, L, D)`` and key and value ``(B, Hkv, Lk, D)``, of any floating dtype, are this
    rank's shards of W L queries and W Lk keys. The output ``(B, H, L, D)`` is this rank's shard.
    The sequence is the second-to-last dim, also of 3-D tensors. The block affects every call on
    plain tensors in this thread.

    Each dim of ``attn_mask`` may be 1, to broadcast, or have one of two lengths. A dim of the whole
    length is indexed by the original positions; a dim of the local length holds this rank's part,
    in the order of the shards. So a padding mask ``(B, 1, 1, S)``, its shard ``(B, 1, 1, L)``, a
    mask ``(S, S)`` and this rank's rows of it, ``(L, S)``, all work. ``(L, L)`` says nothing about
    the keys of other ranks, and raises.

    ``flex_attention`` attends over all ranks too, uncompiled or compiled by inductor. Pass its
    ``BlockMask`` among the buffers; inside the block it has this rank's rows and lengths.
    ``varlen_attn`` takes shards ``(L, H, D)`` and the cumulative lengths of the whole sequence. As
    with torch, other attention stays local because it is not seen:
    ``nn.MultiheadAttention(need_weights=True)``, nested tensors. ``torch.func`` transforms raise.

    Args:
        mesh: a 1-D mesh, such as ``mesh["cp"]``.
        buffers: whole tensors, the same on every rank, of any dtype, that need no gradients:
            inputs, labels, positions, RoPE tables; also a ``BlockMask``. Inside the block they are
            shards. Each is sharded by its own length: cut a table that is longer than the sequence
            first. ``DistributedDataParallel`` around a module with one of them needs
            ``broadcast_buffers=False``; without it attention raises.
        buffer_seq_dims: the sequence dim of each buffer; any int for a ``BlockMask``.
        no_restore_buffers: those of ``buffers`` that stay shards after the block.
        balancer: the order of the sequences.

            - ``"auto"``: torch's default. The first and the last pieces go to the same rank
              (:class:`HeadTail`) if the length is a multiple of 2 W, else natural order.
              Sequences of other lengths than the buffers are in the order that all buffers are in.
              If these differ, or without buffers, their order is unknown, and calls that depend on
              it (causal ones, masks indexed by the original positions) raise.
            - ``"head-tail"``: for any length.
            - None: natural order.
            - a balancer: its order, for sequences of its length.
        schedule: as for :func:`cp_dispatch.enable`. None: the one that :func:`set_rotate_method`
            selected.

    Raises:
        ContextParallelError: if arguments do not match, before anything is changed; and for calls
            in the block that are not supported or are ambiguous.
    """
    context, *to_swap = _prepared(
        mesh, buffers, buffer_seq_dims, no_restore_buffers, balancer, schedule
    )
    with plain_shards(context), no_fast_path(), swapped(*to_swap):
        yield


@run_uncompiled
def _prepared(mesh, buffers, buffer_seq_dims, no_restore_buffers, balancer, schedule):
    """The block's context, the buffers, their shards, and which buffers stay shards."""
    check_order(mesh, balancer)
    buffers, dims, keep = checked(buffers, buffer_seq_dims, no_restore_buffers)
    lengths = [length_of(buffer, dim) for buffer, dim in zip(buffers, dims, strict=True)]
    if mesh.size() > 1:
        _warn_of_tables(buffers, lengths)
    with torch.no_grad():
        shards = [
            shard_of(mesh, buffer, dim, layout_for(balancer, length, mesh.size()))
            for buffer, dim, length in zip(buffers, dims, lengths, strict=True)
        ]
    order, known = balancer, True
    if balancer == "auto":
        order, known = order_of_buffers(lengths, mesh.size())
    context = PlainContext.of(
        mesh,
        _schedule if schedule is None else schedule,
        order,
        lengths,
        order_is_known=known,
    )
    return context, buffers, shards, keep


def _warn_of_tables(buffers: list, lengths: list[int]) -> None:
    """Warn that a table longer than the sequence has shards at wrong positions, which no later
    check can see. Not an error, since an encoder's and a decoder's sequences may well differ."""
    tensors = [n for x, n in zip(buffers, lengths, strict=True) if isinstance(x, torch.Tensor)]
    if len(set(tensors)) > 1:
        warnings.warn(
            f"buffers are {tensors} long, and each is sharded by its own length. A table that goes "
            "with a shorter sequence, such as RoPE's, would have its rows at wrong positions: cut "
            f"it to the sequence's length before the block (table[:{min(tensors)}]).",
            stacklevel=5,
        )


@torch.no_grad()
def context_parallel_unshard(
    mesh: DeviceMesh,
    buffers: Sequence[torch.Tensor],
    seq_dims: Sequence[int],
    load_balancer: Balancer | None = None,
    *,
    balancer: Balancer | str | None = "auto",
) -> list[torch.Tensor]:
    """Gather the ranks' shards into whole tensors in natural order, without gradients.

    Args:
        mesh: a 1-D mesh.
        buffers: shards of any dtype, with the lengths that ``torch.chunk`` gives the ranks.
        seq_dims: the sequence dim of each.
        load_balancer: torch's name for ``balancer``. As in torch, None is the default order.
        balancer: as for :func:`context_parallel`. ``"auto"``: the order of the block around, if
            that is over this mesh, else the default order of a block.

    Returns:
        A list of new tensors, the same on every rank. For gradients use
        :func:`cp_dispatch.unshard`.

    Raises:
        ContextParallelError: if mesh, tensors and balancer do not match, if the balancer is one of
            torch's, or if the block around does not know the order.
    """
    if load_balancer is not None:
        balancer = load_balancer
    check_balancer(balancer)
    around = plain_context()
    block = around if balancer == "auto" and around is not None and around.mesh == mesh else None
    if block is not None:
        _check_order_known(block)
        balancer = block.balancer
    buffers, dims = listed(buffers, "buffers"), listed(seq_dims, "seq_dims")
    if len(buffers) != len(dims):
        raise ContextParallelValueError(
            f"buffers holds {len(buffers)} tensors, seq_dims {len(dims)} ints"
        )
    if isinstance(balancer, Balancer):
        return unshard(mesh, buffers, dims, balancer)
    whole = unshard(mesh, [x.detach() for x in buffers], dims)
    for i, (tensor, dim) in enumerate(zip(whole, dims, strict=True)):
        if block is not None:
            _check_order_known(block, tensor.shape[dim])
        layout = layout_for(balancer, tensor.shape[dim], mesh.size())
        if layout is not None:
            whole[i] = permute(tensor, layout.inverse, dim % tensor.ndim)
    return whole


def _check_order_known(block: PlainContext, *lengths: int) -> None:
    if unknown := block.unknown_order(*lengths):
        raise ContextParallelError(f"context_parallel_unshard needs to know the order: {unknown}")


def set_rotate_method(rotate_method: str) -> None:
    """Set the schedule of later :func:`context_parallel` blocks in this process, by torch's names.

    Args:
        rotate_method: ``"allgather"``, the default, lets cp_dispatch choose the schedule;
            ``"alltoall"`` selects the ring.

    Raises:
        ContextParallelError: for any other name.
    """
    global _schedule
    if rotate_method not in ROTATE_METHODS:
        raise ContextParallelNotImplementedError(
            f"rotate_method must be one of {', '.join(map(repr, ROTATE_METHODS))}, got "
            f"{rotate_method!r}"
        )
    _schedule = ROTATE_METHODS[rotate_method]


def current_schedule() -> str:
    """The schedule that :func:`set_rotate_method` selected."""
    return _schedule
