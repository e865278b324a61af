"""Records what ranks in threads send, and what they allocate for sending."""

from __future__ import annotations

import contextlib
import threading
import weakref
from dataclasses import dataclass, field

import pytest
import torch
from torch.testing._internal.distributed.multi_threaded_pg import ProcessLocalGroup

from cp_dispatch.schedules import ring
from cp_dispatch.schedules.comm import Ring
from cp_dispatch.schedules.pair import Pair


@dataclass
class Record:
    """The record of one rank: bytes of every move, in order, and every collective by name and
    bytes."""

    sent: list[int] = field(default_factory=list)
    received: list[int] = field(default_factory=list)
    collectives: list[str] = field(default_factory=list)
    #: Bytes that this rank contributes to each of its gathers of keys.
    gathered: list[int] = field(default_factory=list)
    #: Bytes that this rank contributes to each of its all_reduces and gathers.
    bytes: list[int] = field(default_factory=list)
    live: int = 0
    live_bytes: int = 0
    peak: int = 0
    peak_bytes: int = 0

    def allocated(self, buffer: torch.Tensor) -> None:
        self.live += 1
        self.live_bytes += buffer.nbytes
        self.peak = max(self.peak, self.live)
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        weakref.finalize(buffer, self._freed, buffer.nbytes)

    def _freed(self, size: int) -> None:
        self.live -= 1
        self.live_bytes -= size


class Recorder:
    """Patches the functions through which every byte of the ring passes. One per test, used by all
    its ranks."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self._local = threading.local()
        exchange = Ring.exchange_all
        move, start, buffer = Ring._move, ProcessLocalGroup._start_coll, Pair.buffer

        def recorded_move(ring, send, to, receive, source):
            if record := self._current():
                record.sent.append(send.nbytes)
                record.received.append(receive.nbytes)
            return move(ring, send, to, receive, source)

        def recorded_exchange(ring, send, sizes, receive, coming):
            if record := self._current():
                # The part that a rank keeps for itself is not sent.
                own, back = sizes[ring.rank], coming[ring.rank]
                record.sent.append(send.nbytes - own * send.itemsize)
                record.received.append(receive.nbytes - back * receive.itemsize)
            return exchange(ring, send, sizes, receive, coming)

        def recorded_start(collective, group):
            if record := self._current():
                record.collectives.append(type(collective).__name__)
            return start(collective, group)

        def recorded(name):
            method = getattr(Ring, name)

            def call(ring, tensor):
                if record := self._current():
                    record.bytes.append(tensor.nbytes)
                return method(ring, tensor)

            monkeypatch.setattr(Ring, name, call)

        def recorded_start_of(name, where):
            method = getattr(Ring, name)

            def call(ring, send, receive):
                if record := self._current():
                    getattr(record, where).append(send.nbytes)
                return method(ring, send, receive)

            monkeypatch.setattr(Ring, name, call)

        recorded_start_of("start_all_gather", "gathered")
        recorded("all_gather")
        recorded("all_reduce")

        def recorded_buffer(pair, length):
            new = buffer(pair, length)
            if record := self._current():
                record.allocated(new)
            return new

        assert ring.Pair is Pair
        monkeypatch.setattr(Ring, "_move", recorded_move)
        monkeypatch.setattr(Ring, "exchange_all", recorded_exchange)
        monkeypatch.setattr(ProcessLocalGroup, "_start_coll", recorded_start)
        monkeypatch.setattr(Pair, "buffer", recorded_buffer)

    def _current(self) -> Record | None:
        return getattr(self._local, "record", None)

    @contextlib.contextmanager
    def record(self):
        """A :class:`Record` of what this thread does inside the block."""
        self._local.record = record = Record()
        try:
            yield record
        finally:
            self._local.record = None
