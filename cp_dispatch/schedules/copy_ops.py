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

#: Alignment of tensors in a room, in bytes.
GRAIN = 256

library = torch.library.Library("cp_dispatch", "FRAGMENT")
# ``here`` is this GPU's room, ``stream`` the handle of the stream that copies, and flags are
# addresses of int32 on any GPU. These are only called inside other ops. A push with CURRENT as
# stream uses the current stream, for when nothing can overlap; copies and flags are then one
# kernel.
CURRENT = -1
for _schema in (
    # After the work queued on the current stream, write 1 to each flag.
    "raise_flags(Tensor here, int[] flags, int stream) -> ()",
    # If ``side_waits``, first wait for the work queued on the current stream. Write 1 to the flags
    # of ``raise_first``; wait until each of ``take_first`` is 1 and reset it to 0; copy tensors (B,
    # ...) whose batch rows are contiguous; raise ``raise_then``; take ``take_last``. If
    # ``then_wait``, make the current stream wait for all of that.
    "push_slabs(Tensor(a!)[] targets, Tensor[] sources, Tensor here, int[] raise_first,"
    " int[] take_first, int[] raise_then, int[] take_last, int stream, bool side_waits,"
    " bool then_wait=False) -> ()",
    # The same for rows of sources (B, S, ...); each copy has the numbers that ``Mailbox.move``
    # returns.
    "push_rows(Tensor[] sources, Tensor here, int[] moves, int[] raise_first, int[] take_first,"
    " int[] raise_then, int[] take_last, int stream, bool side_waits, bool then_wait=False) -> ()",
    # push_rows of two token-major sources (B, H, S, D), with CURRENT. ``numbers``, int64 on the
    # host: how many moves and flags of each kind there are, then the moves and flags. Passing lists
    # would cost more than the launch.
    "push_pair(Tensor first, Tensor second, Tensor here, Tensor numbers) -> ()",
    # The same for sources for which :func:`has_heads_in_rows` holds, or (B, H, S) where each head's
    # rows are contiguous; each copy has the numbers of ``Moves.numbers`` (:mod:`head_moves`).
    "push_heads(Tensor[] sources, Tensor here, Tensor numbers, int stream, bool then_wait) -> ()",
    # First copies within this GPU, then push_slabs with CURRENT. ``numbers`` as :func:`numbers_of`
    # makes them: the copies, the slabs, and the four kinds of flags; a copy or slab as
    # :func:`copies_of`.
    "copy_and_pull(Tensor(a!)[] tensors, Tensor here, Tensor numbers) -> ()",
    # Make the stream wait for the current one, or the reverse.
    "join_streams(Tensor here, int stream, bool side_waits) -> ()",
):
    library.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))

raise_flags = torch.ops.cp_dispatch.raise_flags.default
push_slabs = torch.ops.cp_dispatch.push_slabs.default
push_rows = torch.ops.cp_dispatch.push_rows.default
push_pair = torch.ops.cp_dispatch.push_pair.default
push_heads = torch.ops.cp_dispatch.push_heads.default
copy_and_pull = torch.ops.cp_dispatch.copy_and_pull.default
join_streams = torch.ops.cp_dispatch.join_streams.default


def numbers_of(*lists: Sequence[int]) -> Tensor:
    """Moves and the four kinds of flags, in the form for :data:`push_pair` and
    :data:`push_heads`."""
    return torch.tensor([*map(len, lists), *itertools.chain(*lists)], dtype=torch.int64)


def copies_of(pairs: Iterable[tuple[Tensor, Tensor]], tensors: Sequence[Tensor]) -> list[int]:
    """The numbers of copies of the second of each pair to the first, which are views of
    ``tensors``, for :data:`copy_and_pull`: where each goes (which tensor, and bytes from its
    start), the same for where it comes from, the bytes of an item, the number of dims, and for each
    dim its size and the bytes between its steps, there and here."""
    places = {id(x.untyped_storage()): (i, _first_byte(x)) for i, x in enumerate(tensors)}
    found: list[int] = []
    for target, source in pairs:
        for x in (target, source):
            i, start = places[id(x.untyped_storage())]
            found += i, _first_byte(x) - start
        item = target.itemsize
        found += item, target.dim()
        dims = zip(target.shape, target.stride(), source.stride(), strict=True)
        for size, there, here in dims:
            found += size, there * item, here * item
    return found


def _first_byte(x: Tensor) -> int:
    return x.storage_offset() * x.itemsize


def load_kernels(room: Tensor, header: int, stream: int) -> None:
    """Launch each kernel once, because CUDA loads a kernel at its first launch and may then wait
    for all streams. That must not happen while one of them waits for a peer.

    Each launch copies 16 bytes after the room's ``header`` onto themselves: the kernels that also
    raise flags, for few and for many copies, and the one that does not.
    """
    here = room[header : header + 16].view(1, 1, 16)
    move = [0, 0, 1, here.data_ptr(), 16]
    for where, count in ((CURRENT, 1), (CURRENT, 64), (stream, 3)):
        side = where != CURRENT
        push_rows([here], room, move * count, [], [], [], [], where, True, side)


def rows_for(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Tensors ``(B, H, S, D)`` in the form for copies, ``(B, S, H, D)`` with contiguous batch rows;
    packed by a kernel of the current stream if necessary."""
    rows = [x.transpose(1, 2) for x in tensors]
    return [x if can_be_copied(x) else x.contiguous() for x in rows]


def aligned(size: int) -> int:
    """Bytes of a room that a tensor of ``size`` bytes takes, so that the next one is aligned."""
    return -(-size // GRAIN) * GRAIN


def can_be_copied(rows: Tensor) -> bool:
    """Whether ``(B, ...)`` can be copied without packing: batch rows are contiguous, do not overlap
    (those of an expanded tensor do), and are less than 2 GiB apart, as CUDA requires."""
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
