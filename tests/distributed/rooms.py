"""Mailboxes among ranks in threads: the memory and the order of events, without copy engines."""

from __future__ import annotations

import threading

import torch
import torch.distributed as dist

from cp_dispatch.schedules.comm import Ring


class Rooms:
    """Gives the heads of every rank's ring mailboxes on CPU. One per test."""

    def __init__(self, monkeypatch):
        self._lock, self._rooms, self._boxes = threading.Lock(), {}, {}
        #: Names of the boxes that were pushed to.
        self.used: set[str] = set()
        rooms = self

        def mailbox(ring, name, size):
            return rooms.box(ring, name, size) if name.startswith("heads") else None

        monkeypatch.setattr(Ring, "mailbox", mailbox)
        monkeypatch.setattr(Ring, "may_push", True)

    def box(self, ring: Ring, name: str, size: int):
        key = name, size, *dist.get_process_group_ranks(ring.group)
        with self._lock:
            room = self._rooms.setdefault(
                key, [torch.zeros(size, dtype=torch.uint8) for _ in range(ring.world_size)]
            )
            return self._boxes.setdefault((key, ring.rank), _Box(self, ring, name, room))


class _Box:
    """As :class:`cp_dispatch.schedules.mailbox.Mailbox`."""

    def __init__(self, rooms: Rooms, ring: Ring, name: str, memory: list[torch.Tensor]):
        self._rooms, self._ring, self._name, self._memory = rooms, ring, name, memory
        self._state, self.views = "free", {}

    def at(self, rank: int, offset: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return self._memory[rank][offset : offset + numel * dtype.itemsize].view(dtype)

    def forget_many(self) -> None:
        self.views.clear()

    def open(self) -> None:
        assert self._state == "free", f"{self._name} is opened before it was released"
        self._state = "open"

    def push(self, targets, sources, peers=None, ready_at_open=False) -> None:
        assert self._state == "open" and peers is None
        self._state = "pushed"
        self._rooms.used.add(self._name)
        dist.barrier(self._ring.group)  # every room is open
        for target, source in zip(targets, sources, strict=True):
            assert target.shape == source.shape and target.dtype is source.dtype
            for x in (target, source):  # what a copy engine can do
                assert x.numel() == 0 or x[0].is_contiguous(), x.stride()
            target.copy_(source)
        dist.barrier(self._ring.group)

    def let_go(self) -> None:
        assert self._state == "pushed"

    def release(self) -> None:
        assert self._state == "pushed"
        self._state = "free"
        self._memory[self._ring.rank].fill_(255)  # NaN, for whoever reads it yet
