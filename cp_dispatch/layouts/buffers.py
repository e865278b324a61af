"""``shard()`` and ``unshard()``: from whole tensors to this rank's rows, and back.

Note [Gradients of shard and unshard]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Neither communicates in its backward.

- ``shard``: each rank's gradient of the whole tensor has values in the rows that the rank owns and
  zeros elsewhere. The full gradient is the *sum* over the ranks of the mesh, taken by whatever sums
  the gradients of replicated parameters: a data parallel wrapper over this mesh, or one
  ``all_reduce``.
- ``unshard``: a rank's gradient of its shard is its slice of the gradient of the whole tensor,
  which is assumed to be *the same on all ranks*, as in ``DTensor.full_tensor()`` by default. This
  is right if every rank computes the same loss from the whole tensor. If each rank computes a
  different part of the loss, ``all_reduce`` the gradient of the whole tensor first
  (``whole.register_hook``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from cp_dispatch._compat import all_gather_single, in_fake_mode, is_fake
from cp_dispatch.errors import ContextParallelError
from cp_dispatch.layouts.balancer import Balancer
from cp_dispatch.layouts.spans import Span, chunk
from cp_dispatch.layouts.structure import map_tensors
from cp_dispatch.native.permute import permute_sequence

T = TypeVar("T")
SeqDims = int | Sequence[Any] | Mapping[Any, Any]


def shard(mesh: DeviceMesh, buffers: T, seq_dims: SeqDims, balancer: Balancer | None = None) -> T:
    """Cut this rank's rows out of whole tensors, in the order that ``balancer`` defines.

    Does not communicate: every rank passes the same whole tensors.

    Args:
        mesh: the 1-D mesh over which the sequence is sharded.
        buffers: a tensor of any dtype and number of dims, or lists, tuples and dicts of tensors,
            nested as you like. ``None`` stays ``None``. A torch ``BlockMask`` of the whole sequence
            becomes a ``BlockMask`` of this rank's rows of blocks, for ``flex_attention`` on
            DTensors; it keeps its global lengths, and its ``seq_dims`` is ignored.
        seq_dims: the sequence dim of every tensor: one int for all, or ints in the same structure
            as ``buffers``.
        balancer: which rank owns which positions. None: consecutive chunks, as ``Shard`` has them.

    Returns:
        The same structure, of contiguous copies. Along the sequence dim they have as many rows as
        ``torch.chunk`` gives this rank, which is what
        ``DTensor.from_local(x, mesh, [Shard(seq_dim)])`` expects; pass it the global ``shape`` and
        ``stride`` if the lengths are uneven. Differentiable, see Note [Gradients of shard and
        unshard].

    Raises:
        ContextParallelError: if mesh, tensor and balancer do not match; the message has the
            numbers.
    """
    rank = _local_rank(mesh, balancer)

    def one(tensor: torch.Tensor, dim: int, name: str) -> torch.Tensor:
        size = tensor.shape[dim]
        if balancer is None:
            own = chunk(Span(0, size), mesh.size())[rank]
            index = _natural_index(own)
        else:
            _check_fits(balancer, tensor, dim, size, name)
            index = balancer.positions(rank)
        return _Take.apply(tensor, index, dim)

    def rows_of_mask(mask, name: str):
        from cp_dispatch.flex.create import cut_block_mask

        return cut_block_mask(mask, mesh, balancer)

    return map_tensors(one, buffers, seq_dims, on_mask=rows_of_mask)


def unshard(mesh: DeviceMesh, buffers: T, seq_dims: SeqDims, balancer: Balancer | None = None) -> T:
    """Gather the ranks' shards into whole tensors in natural order: ``unshard(shard(x)) == x``.

    Gathers every tensor in one collective, after a small one that exchanges the lengths of all
    shards. All ranks must pass the same structure.

    Args:
        mesh, buffers, seq_dims, balancer: as for :func:`shard`, with shards as the buffers.

    Returns:
        The same structure, of contiguous whole tensors, bit for bit those that were sharded.
        Differentiable, see Note [Gradients of shard and unshard].

    Raises:
        ContextParallelError: as for :func:`shard`; on all ranks if the lengths of the shards are
            not those that ``torch.chunk`` gives.
    """
    rank = _local_rank(mesh, balancer)
    lengths: list[int] = []

    def count(tensor: torch.Tensor, dim: int, name: str) -> None:
        lengths.append(tensor.shape[dim])

    map_tensors(count, buffers, seq_dims, on_mask=_whole_mask)
    every_length = iter(_exchange(lengths, mesh))

    def one(tensor: torch.Tensor, dim: int, name: str) -> torch.Tensor:
        lengths = next(every_length)
        whole = sum(lengths)
        spans = chunk(Span(0, whole), mesh.size())
        if lengths != [span.length for span in spans]:
            raise ContextParallelError(
                f"{name}: shards of {lengths} rows along dim {dim} are not what torch.chunk gives "
                f"{mesh.size()} ranks of their {whole} rows, {[span.length for span in spans]}"
            )
        own = spans[rank]
        if balancer is None:
            index, inverse = _natural_index(own), None
        else:
            _check_fits(balancer, tensor, dim, whole, name)
            index, inverse = balancer.positions(rank), balancer.inverse
        return _Gather.apply(tensor, mesh, max(lengths), whole, index, inverse, dim)

    return map_tensors(one, buffers, seq_dims, on_mask=_whole_mask)


def _whole_mask(mask, name: str):
    if not hasattr(mask, "cp_whole"):
        raise ContextParallelError(
            f"{name} is a BlockMask that does not come from shard(); the rows of all ranks cannot "
            "be joined, because they are cut within blocks. Keep the whole mask"
        )
    return mask.cp_whole


# -- Autograd ---------------------------------------------------------------------------------


class _Take(torch.autograd.Function):
    """Rows of a whole tensor by their positions."""

    @staticmethod
    def forward(ctx, whole, index, dim):
        ctx.index, ctx.dim, ctx.size = index, dim, whole.shape[dim]
        return permute(whole, index, dim)

    @staticmethod
    def backward(ctx, grad):
        return _Place.apply(grad, ctx.index, ctx.dim, ctx.size), None, None


class _Place(torch.autograd.Function):
    """The adjoint of :class:`_Take`: rows at their positions, zeros elsewhere."""

    @staticmethod
    def forward(ctx, local, index, dim, size):
        ctx.index, ctx.dim = index, dim
        places = torch.arange(index.shape[1], device="cpu").expand_as(index)
        back = index.new_full((index.shape[0], size), -1).scatter_(1, index, places)
        return permute(local, back, dim)

    @staticmethod
    def backward(ctx, grad):
        return _Take.apply(grad, ctx.index, ctx.dim), None, None, None


class _Gather(torch.autograd.Function):
    """All rows of the whole tensor, in natural order."""

    @staticmethod
    def forward(ctx, local, mesh, most, whole, index, inverse, dim):
        ctx.index, ctx.dim = index, dim
        permuted = gather(mesh, local, dim, most, whole)
        return permuted.contiguous() if inverse is None else permute(permuted, inverse, dim)

    @staticmethod
    def backward(ctx, grad):
        return _Take.apply(grad, ctx.index, ctx.dim), *[None] * 6


def gather(mesh: DeviceMesh, local: torch.Tensor, dim: int, most: int, whole: int) -> torch.Tensor:
    """Concatenate the ranks' parts along a dim, ``whole`` long in total, each at most ``most``."""
    rows = local.movedim(dim, 0)
    padded = rows.new_zeros(most, *rows.shape[1:])
    padded[: rows.shape[0]] = rows
    # As bytes: not every collective library knows every dtype.
    sent = padded.view(-1).view(torch.uint8)
    received = sent.new_empty(mesh.size() * sent.numel())
    if sent.numel():
        all_gather_single(received, sent, group=mesh.get_group())
    gathered = received.view(padded.dtype).view(mesh.size() * most, *rows.shape[1:])
    # Only the last ranks are short, so the padding comes after all rows.
    return gathered[:whole].movedim(0, dim)


def _natural_index(own: Span) -> torch.Tensor:
    return torch.arange(own.position, own.position + own.length, device="cpu").unsqueeze(0)


def permute(tensor: torch.Tensor, index: torch.Tensor, dim: int) -> torch.Tensor:
    """Rows of ``tensor`` along ``dim``; ``index`` (1 or B, L) int64 on CPU, -1 for zeros.

    With B rows, row b of dim 0 of ``tensor`` goes by ``index[b]``. A contiguous copy.
    """
    index = in_fake_mode(index).to(tensor.device)
    (taken,) = permute_sequence([tensor], index, dim, checked=True, unique=True)
    return taken.contiguous()


# -- Checks, the same on every rank -------------------------------------------------------------


def _local_rank(mesh: DeviceMesh, balancer: Balancer | None) -> int:
    if not isinstance(mesh, DeviceMesh):
        raise ContextParallelError(f"mesh must be a DeviceMesh, got {type(mesh).__name__}")
    if mesh.ndim != 1:
        names = mesh.mesh_dim_names or tuple(range(mesh.ndim))
        likely = "cp" if "cp" in names else names[-1]
        raise ContextParallelError(
            f"mesh must have one dim, got dims {names} of sizes {tuple(mesh.shape)}; pass the one "
            f'over which the sequence is sharded, such as mesh["{likely}"]'
        )
    if not isinstance(balancer, Balancer | None):
        raise ContextParallelError(
            "balancer must be None (natural order) or a balancer such as "
            f"cp_dispatch.HeadTail(seq_len, world_size), got {balancer!r}"
        )
    if balancer is not None and balancer.world_size != mesh.size():
        raise ContextParallelError(
            f"{balancer} is for {balancer.world_size} ranks, the mesh has {mesh.size()}"
        )
    if mesh.get_coordinate() is None:
        raise ContextParallelError(
            f"rank {dist.get_rank()} is not part of the mesh {mesh.mesh.tolist()}"
        )
    return mesh.get_local_rank()


def _check_fits(balancer: Balancer, tensor: torch.Tensor, dim: int, size: int, name: str) -> None:
    if size != balancer.seq_len:
        raise ContextParallelError(
            f"{name}: {balancer} is for {balancer.seq_len} positions, the tensor has {size} along "
            f"dim {dim}"
        )
    if balancer.rows > 1 and (dim == 0 or tensor.shape[0] != balancer.rows):
        raise ContextParallelError(
            f"{name}: {balancer} has {balancer.rows} layouts, one for each row of dim 0, but "
            f"the tensor has shape {list(tensor.shape)} and its sequence in dim {dim}"
        )


def _exchange(lengths: list[int], mesh: DeviceMesh) -> list[list[int]]:
    """``[tensor][rank]``: rows of each rank's shards."""
    if not lengths:
        return []
    device = mesh.device_type
    sent = torch.tensor(lengths, dtype=torch.int64, device=device)
    received = sent.new_empty(mesh.size() * len(lengths))
    all_gather_single(received, sent, group=mesh.get_group())
    if is_fake(received):  # no rank knows, so all are taken to have as many rows as this one
        return [[length] * mesh.size() for length in lengths]
    return received.view(mesh.size(), len(lengths)).t().tolist()
