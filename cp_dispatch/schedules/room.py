"""``Room``: memory of a GPU that the other ranks of a group can address, with flags to wait for.

This module knows the addresses of the memory and of each flag; :mod:`mailbox` knows what is copied
when.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from cp_dispatch._compat import symmetric_memory
from cp_dispatch.errors import ContextParallelError

#: Bytes of the flags, which precede the room; the last four count blocks of a kernel.
HEADER = 4096


class Flags(NamedTuple):
    """Addresses of the two kinds of flags, one of each for each rank."""

    free: list[int]
    full: list[int]

    def of(self, ranks: Sequence[int]) -> Flags:
        return Flags(*([addresses[rank] for rank in ranks] for addresses in self))


class Room:
    """``own``, from :func:`memory`, and the same memory of the other ranks of a group, which all
    create theirs together."""

    def __init__(self, group: dist.ProcessGroup, own: Tensor):
        self._own, self._rank = own, dist.get_rank(group)
        self.size = own.numel() - HEADER
        ranks = range(dist.get_world_size(group))
        self._handle = symmetric_memory.rendezvous(own, group.group_name)
        shape = tuple(own.shape)
        self._memory = [self._handle.get_buffer(rank, shape, own.dtype) for rank in ranks]
        self._peers = tuple(rank for rank in ranks if rank != self._rank)
        starts = [memory.data_ptr() for memory in self._memory]

        def flag(room: int, kind: int, writer: int) -> int:
            return starts[room] + 4 * (kind * len(ranks) + writer)

        # This rank's flags in the rooms of others, which it raises, and the others' flags in its
        # own room.
        self._there = Flags(*([flag(rank, kind, self._rank) for rank in ranks] for kind in (0, 1)))
        self._here = Flags(*([flag(self._rank, kind, rank) for rank in ranks] for kind in (0, 1)))
        # The flags of all peers, which most calls use.
        self._all = self._there.of(self._peers), self._here.of(self._peers)
        self._some: dict[tuple[int, ...], tuple[Flags, Flags]] = {}
        #: Whether :mod:`~cp_dispatch.schedules.mailboxes` returns this room: no larger one has
        #: replaced it, and it was not freed.
        self.is_current = True
        #: A cache for views of the rooms that a caller would make at each call; rooms never move.
        self.views: dict[Hashable, Any] = {}

    def at(self, rank: int, offset: int, numel: int, dtype: torch.dtype) -> Tensor:
        """A flat part of a rank's room, ``offset`` in bytes."""
        start = HEADER + offset
        return self._memory[rank][start : start + numel * dtype.itemsize].view(dtype)

    def address(self, rank: int, offset: int) -> int:
        """The address of a place in a rank's room, ``offset`` in bytes."""
        return self._memory[rank].data_ptr() + HEADER + offset

    def move(
        self, source: int, first: int, rows: int, rank: int, offset: int, stride: int
    ) -> list[int]:
        """One of the ``moves`` of :meth:`~cp_dispatch.schedules.mailbox.Mailbox.push_rows`: it
        copies rows of the source with that index to a rank's room, ``offset`` bytes from its start,
        with ``stride`` bytes between batch rows."""
        return [source, first, rows, self.address(rank, offset), stride]

    def forget_many(self, most: int = 64) -> None:
        """Keep ``views`` small if shapes change all the time."""
        if len(self.views) >= most:
            self.views.clear()

    def retire(self) -> None:
        """Mark the room as replaced or freed."""
        self.is_current = False
        self.views.clear()  # cached views may refer to the box

    def _flags(self, peers: Sequence[int] | None) -> tuple[Flags, Flags]:
        """The flags of this rank at all peers, or at those given, and the peers' flags here."""
        if peers is None:
            return self._all
        found = self._some.get(peers := tuple(peers))
        if found is None:
            found = self._some[peers] = self._there.of(peers), self._here.of(peers)
        return found


def memory(group: dist.ProcessGroup, size: int, device: torch.device) -> Tensor:
    """Allocate flags, set to 0, and ``size`` bytes that peers can address. If a rank cannot
    allocate them, all ranks raise."""
    found = error = None
    missing = torch.zeros(1, dtype=torch.int64, device=device)
    how = (HEADER + size,), (1,), torch.uint8, device
    try:
        try:
            found = symmetric_memory.empty_strided_p2p(*how)
        except RuntimeError:  # torch's allocator may hold freed memory
            torch.cuda.empty_cache()
            found = symmetric_memory.empty_strided_p2p(*how)
    except RuntimeError as e:
        error = e
        missing += 1
    dist.all_reduce(missing, group=group)
    if error is not None:
        raise error
    if int(missing):
        raise ContextParallelError(
            f"{int(missing)} of {dist.get_world_size(group)} ranks could not allocate the buffer "
            f"of {size / 2**20:.0f} MiB into which copy engines write what other ranks send. Leave "
            "more memory free, or set CP_DISPATCH_COPY_ENGINES=0, which needs no such buffers"
        )
    found[:HEADER].zero_()
    return found
