"""Ops that copy to other GPUs and signal by flags on streams (``csrc/peers_cuda.cu``).

Also says which tensors can be copied without packing. See :mod:`cp_dispatch.schedules.mailbox` for
the protocol.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from cp_dispatch import extension as _extension  # noqa: F401  loads the kernels

#: Bytes: where tensors start in a room.
GRAIN = 256

library = torch.library.Library("cp_dispatch", "FRAGMENT")
# ``here`` is this GPU's room, ``stream`` the handle of the stream that copies, flags are addresses
# of int32 of any GPU. Only ever called inside of ops. Pushes with CURRENT for a stream take the
# current one, which has nothing else to do meanwhile: copies and flags are a kernel.
CURRENT = -1
for _schema in (
    # After what the current stream has queued, put 1 in each flag.
    "raise_flags(Tensor here, int[] flags, int stream) -> ()",
    # If the side waits, after what the current stream has queued: put 1 in flags, wait until each
    # of the next is 1 and put 0 there, copy tensors (B, ...) whose batch rows are contiguous, put 1
    # in flags and take others. If asked for, let the current stream wait for all that.
    "push_slabs(Tensor(a!)[] targets, Tensor[] sources, Tensor here, int[] raise_first,"
    " int[] take_first, int[] raise_then, int[] take_last, int stream, bool side_waits,"
    " bool then_wait=False) -> ()",
    # The same with rows of sources (B, S, ...); for each copy what ``Mailbox.move`` gives.
    "push_rows(Tensor[] sources, Tensor here, int[] moves, int[] raise_first, int[] take_first,"
    " int[] raise_then, int[] take_last, int stream, bool side_waits, bool then_wait=False) -> ()",
    # push_rows of two sources (B, H, S, D), token-major, with CURRENT; ``numbers``, int64 on the
    # host: how many moves and flags of each kind, and then they. Lists cost more than the launch.
    "push_pair(Tensor first, Tensor second, Tensor here, Tensor numbers) -> ()",
    # The same of sources that :func:`has_heads_in_rows`, or (B, H, S) with each head's rows in one
    # piece; for each copy what ``Moves.numbers`` gives (:mod:`head_moves`).
    "push_heads(Tensor[] sources, Tensor here, Tensor numbers, int stream, bool then_wait) -> ()",
    # Let the stream wait for the current one, or the other way round.
    "join_streams(Tensor here, int stream, bool side_waits) -> ()",
):
    library.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))

raise_flags = torch.ops.cp_dispatch.raise_flags.default
push_slabs = torch.ops.cp_dispatch.push_slabs.default
push_rows = torch.ops.cp_dispatch.push_rows.default
push_pair = torch.ops.cp_dispatch.push_pair.default
push_heads = torch.ops.cp_dispatch.push_heads.default
join_streams = torch.ops.cp_dispatch.join_streams.default


def numbers_of(*lists: Sequence[int]) -> Tensor:
    """Moves and the four kinds of flags, as :data:`push_pair` and :data:`push_heads` take them."""
    return torch.tensor([*map(len, lists), *itertools.chain(*lists)], dtype=torch.int64)


def rows_for(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Tensors ``(B, H, S, D)`` in the form for copies, ``(B, S, H, D)`` with contiguous batch rows;
    packed by a kernel of the current stream if necessary."""
    rows = [x.transpose(1, 2) for x in tensors]
    return [x if can_be_copied(x) else x.contiguous() for x in rows]


def aligned(size: int) -> int:
    """Bytes of a room that a tensor of ``size`` bytes takes, so that the next one is aligned."""
    return -(-size // GRAIN) * GRAIN


def can_be_copied(rows: Tensor) -> bool:
    """Whether ``(B, ...)`` can be copied without packing: batch rows are contiguous, do not
    overlap, as those of an expanded tensor do, and are less than 2 GiB apart, as CUDA requires."""
    if rows.size(0) < 2:
        return rows.is_contiguous()
    row, pitch = rows[0], rows.stride(0)
    return row.is_contiguous() and row.numel() <= pitch < 2**31 // rows.itemsize


def has_heads_in_rows(tensor: Tensor) -> bool:
    """Whether each row of ``(B, H, S, D)`` has its heads one after the other, and rows do not
    overlap and are less than 2 GiB apart."""
    _, heads, length, dim = tensor.shape
    _, of_head, of_row, of_number = tensor.stride()
    are_dense = (dim == 1 or of_number == 1) and (heads == 1 or of_head == dim)
    return are_dense and (length == 1 or heads * dim <= of_row < 2**31 // tensor.itemsize)
