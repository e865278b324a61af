"""Context parallelism for models whose activations are plain local tensors.

The functions of ``torch.distributed.tensor.experimental`` under the same names and signatures:
change the import, and old code runs. What differs from torch 2.13:

- Calls that torch answers wrongly, refuses or hangs on are right: masks, dropout, GQA on every
  kernel, non-causal calls with the defaults, no buffers, lengths that ranks do not divide, 3-D
  inputs, causal calls in ``torch.compile``. Where a plain tensor can mean two things, the call
  raises instead of guessing; see :func:`context_parallel`.
- The order is an argument, ``balancer``, not the global ``_cp_options.enable_load_balance``, which
  is not read. The default is torch's: head-tail where 2 W divides the length, else natural order.
  It goes by each buffer's own length, where torch takes the first buffer's for all; a table that
  is longer than the sequence has to be cut to it first, and a warning says so.
- ``torch.nn.functional`` is not patched, so functions imported earlier take part; and a block
  belongs to its thread and to backward passes, not to all threads. Blocks nest.
- Buffers get other storage for the block and their own back, without copies; what autograd saved
  inside stays, so the backward may run after the block, as long as no attention is recomputed in
  it, which raises.
  Buffers that need gradients are refused on entry; torch fails on them half way.
- ``set_rotate_method`` is read on entry of a block. DTensors in a block mean what they mean outside
  of it: ``cp_dispatch.enable`` decides about them.
- Errors are :class:`ContextParallelError`; where torch's are ``ValueError`` or
  ``NotImplementedError``, they are that too.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Collection, Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh

from cp_dispatch._compat import run_uncompiled
from cp_dispatch.errors import (
    ContextParallelNotImplementedError,
    ContextParallelValueError,
)
from cp_dispatch.fused_modules import no_fast_path
from cp_dispatch.layouts import Balancer, unshard
from cp_dispatch.layouts.buffers import permute
from cp_dispatch.plain_buffers import checked, length_of, listed, shard_of, swapped
from cp_dispatch.plain_context import PlainContext, check_balancer, check_order, layout_for
from cp_dispatch.toggle import plain_context, plain_shards

# Torch's names of how keys travel, and the schedules that they ask for.
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
):
    """Inside the block, plain tensors given to ``F.scaled_dot_product_attention`` are this rank's
    shards of sequences over ``mesh``, and the call attends to all of the sequence.

    Query ``(B, H, L, D)``, key and value ``(B, Hkv, Lk, D)``, of any floating dtype, are shards of
    W L queries and W Lk keys; the output ``(B, H, L, D)`` is this rank's. The last dim but one is
    the sequence, also of tensors with three dims. Every plain call of the thread is taken so.

    ``attn_mask``, each dim broadcast or given in one of two ways: a dim of the whole length goes by
    true positions, a dim of the local length holds this rank's part, in the order of the shards. So
    a padding mask ``(B, 1, 1, S)``, its shard ``(B, 1, 1, L)``, ``(S, S)`` and this rank's rows
    ``(L, S)`` do; ``(L, L)`` says nothing about the keys of other ranks, and raises.

    ``flex_attention`` goes over ranks too, uncompiled or by inductor, with its ``BlockMask`` among
    the buffers, which has this rank's rows and lengths in the block. ``varlen_attn`` raises. Other
    attention, such as ``nn.MultiheadAttention(need_weights=True)`` or of nested tensors, is not
    seen and stays local, as with torch. ``torch.func`` transforms raise.

    Args:
        mesh: a mesh of one dim, such as ``mesh["cp"]``.
        buffers: whole tensors, the same on every rank, of any dtype, without gradients: inputs,
            labels, positions, RoPE tables. In the block they are shards. And ``BlockMask``.
            Each goes by its own length: cut a table that is longer than the sequence first.
        buffer_seq_dims: the sequence dim of each; of a ``BlockMask`` it may be any int.
        no_restore_buffers: those of ``buffers`` that stay shards after the block.
        balancer: the order of sequences. ``"auto"``: torch's default, the first and the last pieces
            go to the same rank (:class:`HeadTail`) where 2 W divides the length, else natural
            order. Without buffers the caller has cut the sequences, so ``"auto"`` knows no order,
            and calls that depend on it (causal ones, masks by true positions) raise.
            ``"head-tail"``: of any length. None: natural order. Or a balancer, for sequences of
            its length.
        schedule: as for :func:`cp_dispatch.enable`; None: what :func:`set_rotate_method` said.

    Raises:
        ContextParallelError: for arguments that do not fit, before anything is changed, and for
            calls in the block that are not supported or ambiguous.
    """
    context, *to_swap = _prepared(
        mesh, buffers, buffer_seq_dims, no_restore_buffers, balancer, schedule
    )
    with plain_shards(context), no_fast_path(), swapped(*to_swap):
        yield


@run_uncompiled
def _prepared(mesh, buffers, buffer_seq_dims, no_restore_buffers, balancer, schedule):
    """The block, the buffers, their shards, and which of them stay shards."""
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
    context = PlainContext(
        mesh,
        _schedule if schedule is None else schedule,
        balancer,
        order_is_known=bool(buffers) or balancer != "auto",
        uneven=any(length % mesh.size() for length in lengths),
        whole_lengths=tuple(lengths),
    )
    return context, buffers, shards, keep


def _warn_of_tables(buffers: list, lengths: list[int]) -> None:
    """Shards of a table that is longer than the sequence are at wrong positions, which nobody
    sees; an encoder's and a decoder's sequences may well differ."""
    tensors = [n for x, n in zip(buffers, lengths, strict=True) if isinstance(x, torch.Tensor)]
    if len(set(tensors)) > 1:
        warnings.warn(
            f"buffers are {tensors} long, and each is sharded by its own length. A table that goes "
            "with a shorter sequence, such as RoPE's, would have its rows at wrong positions: make "
            f"it the sequence's length before the block (table[:{min(tensors)}]).",
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
    """Whole tensors in natural order from this rank's shards, without gradients.

    Args:
        mesh: a mesh of one dim.
        buffers: shards of any dtype, of lengths as ``torch.chunk`` gives them to ranks.
        seq_dims: the sequence dim of each.
        load_balancer: torch's name for ``balancer``. None, as in torch, is the default order.
        balancer: as for :func:`context_parallel`. ``"auto"``: inside a block over this mesh its
            order, else what a block does by default.

    Returns:
        A list of new tensors, the same on every rank. For gradients use
        :func:`cp_dispatch.unshard`.

    Raises:
        ContextParallelError: where mesh, tensors and balancer do not fit, or balancers of torch.
    """
    if load_balancer is not None:
        balancer = load_balancer
    check_balancer(balancer)
    if balancer == "auto" and (block := plain_context()) is not None and block.mesh == mesh:
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
        layout = layout_for(balancer, tensor.shape[dim], mesh.size())
        if layout is not None:
            whole[i] = permute(tensor, layout.inverse, dim % tensor.ndim)
    return whole


def set_rotate_method(rotate_method: str) -> None:
    """Choose the schedule of later :func:`context_parallel` blocks of this process, in torch's
    words: ``"allgather"``, the default, lets cp_dispatch choose; ``"alltoall"`` is the ring.

    Raises:
        ContextParallelError: for any other word.
    """
    global _schedule
    if rotate_method not in ROTATE_METHODS:
        raise ContextParallelNotImplementedError(
            f"rotate_method must be one of {', '.join(map(repr, ROTATE_METHODS))}, got "
            f"{rotate_method!r}"
        )
    _schedule = ROTATE_METHODS[rotate_method]


def current_schedule() -> str:
    """What :func:`set_rotate_method` said."""
    return _schedule
