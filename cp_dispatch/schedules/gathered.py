"""Gathers keys and values of all ranks into one buffer, in the order of :mod:`gather_plan`."""

from __future__ import annotations

import contextlib
import math

from torch import Tensor

from cp_dispatch.layouts import Geometry
from cp_dispatch.schedules.comm import Ring
from cp_dispatch.schedules.copy_ops import aligned, rows_for
from cp_dispatch.schedules.gather_plan import Slots, plan_of, slots_of
from cp_dispatch.schedules.mailbox import Mailbox

#: The mailbox where keys arrive, and later the shares of their gradients.
ROOM = "keys"


def is_pushed(key: Tensor, value: Tensor, ring: Ring, owners: int) -> bool:
    """Whether :func:`gathered_keys` uses copy engines."""
    return ring.mailbox(ROOM, room_bytes(key, value, owners)) is not None


def gathered_keys(
    key: Tensor, value: Tensor, geometry: Geometry, ring: Ring, slots: Slots = slots_of,
    owners: int | None = None,
) -> GatheredKeys | PushedKeys:  # fmt: skip
    """The keys of all ranks; entering the result's ``coming()`` starts the transfer. With copy
    engines, ``slots`` says where the keys go, in a room for the keys of ``owners`` ranks."""
    owners = owners or ring.world_size
    box = ring.mailbox(ROOM, room_bytes(key, value, owners))
    if box is None:
        return GatheredKeys(key, value, plan_of(geometry, ring.rank).pieces, ring)
    return PushedKeys(key, value, geometry, ring, box, slots, owners)


class GatheredKeys:
    """Keys and values of all ranks by an all-gather of each piece.

    Rows of key and value are side by side, ``(pieces, ranks, positions, B, Hkv, D + Dv)``.
    Positions come before the batch, so that pieces of several ranks are one sequence of keys for
    any batch.
    """

    def __init__(self, key: Tensor, value: Tensor, pieces: int, ring: Ring):
        self._tensors, self._ring, self._pieces = (key, value), ring, pieces
        batch, heads, length, self._dim = key.shape
        row = length // pieces, batch, heads, self._dim + value.size(-1)
        # Allocated on the current stream, although a side stream may fill it: the current stream
        # has waited for that before the memory is freed.
        self._send = key.new_empty((pieces, 1, *row))  # the pieces in their natural order
        self._all = key.new_empty((pieces, ring.world_size, *row))

    @contextlib.contextmanager
    def coming(self):
        """In this context, compute with the rank's own keys while the gather starts.

        On CUDA the host launches the kernels of own keys first, so that the GPU does not idle while
        the host prepares the gather. The gather does not wait for these kernels.
        """
        mark = self._ring.mark()
        if mark is None:
            self._start()
            yield
            return
        yield
        with self._ring.after(mark):
            self._start()

    def _start(self) -> None:
        for view, tensor in zip(self._views(self._send), self._tensors, strict=True):
            view.copy_(tensor)
        last = self._pieces - 1
        self._works = [
            self._ring.start_all_gather(
                self._send[last - region].flatten(), self._all[region].flatten()
            )
            for region in range(self._pieces)
        ]

    def wait(self) -> tuple[Tensor, Tensor]:
        """Wait for the keys, and return key and value views of all positions, ``(B, Hkv, S,
        D)``."""
        for work in self._works:
            work.wait()
        self._works = None  # NCCL's work objects hold the buffers that they wrote to
        return self._views(self._all)

    def release(self) -> None:
        """Called when nothing reads them any more."""
        self._all = self._send = None

    def _views(self, buffer: Tensor) -> tuple[Tensor, Tensor]:
        rows = buffer.flatten(0, 2).permute(1, 2, 0, 3)
        return rows[..., : self._dim], rows[..., self._dim :]


class PushedKeys:
    """Keys and values of all ranks, written by their owners to the ranks that need them.

    The room holds the keys ``(B, pieces * owners * positions, Hkv, D)``, then the values. A piece
    that a rank does not need is not sent to it, and its place keeps its old contents.
    """

    def __init__(
        self, key: Tensor, value: Tensor, geometry: Geometry, ring: Ring, box: Mailbox,
        slots: Slots, owners: int,
    ):  # fmt: skip
        self._tensors, self._box = (key, value), box
        place = geometry, key.shape, value.shape, key.dtype, slots
        rooms = box.views.get(place)
        if rooms is None:
            box.forget_many()
            rooms = box.views[place] = _Rooms(key, value, geometry, ring, box, slots, owners)
        self._rooms = rooms

    @contextlib.contextmanager
    def coming(self):
        """As :meth:`GatheredKeys.coming`."""
        sources = rows_for(self._tensors)
        self._box.open()
        yield
        # The work with own keys has been queued; what follows needs the gathered keys.
        self._box.push_rows(sources, self._rooms.moves, ready_at_open=True, then_wait=True)

    def wait(self) -> tuple[Tensor, Tensor]:
        """As :meth:`GatheredKeys.wait`."""
        return self._rooms.own

    def release(self) -> None:
        """As :meth:`GatheredKeys.release`."""
        self._box.release()


class _Rooms:
    """Where keys and values go: ``moves`` for :class:`Mailbox`, and ``own``, the views of the data
    that arrives, ``(B, Hkv, S, D)``."""

    def __init__(
        self, key: Tensor, value: Tensor, geometry: Geometry, ring: Ring, box: Mailbox,
        slots: Slots, owners: int,
    ):  # fmt: skip
        pieces = plan_of(geometry, ring.rank).pieces
        size = key.size(2) // pieces
        own, starts, end = [], [], 0
        for tensor in (key, value):
            batch, heads, length, dim = tensor.shape
            shape = batch, owners * length, heads, dim
            view = box.at(ring.rank, end, math.prod(shape), tensor.dtype).view(shape)
            own.append(view.transpose(1, 2))
            starts.append(end)
            end += aligned(owners * tensor.nbytes)
        self.own, self.moves = tuple(own), []
        for step in range(ring.world_size):
            # Nearest rank first, so that no two ranks write to the same rank at a time; this rank
            # last.
            peer = (ring.rank + 1 + step) % ring.world_size
            for piece, slot in slots(geometry, peer, ring.rank):
                for index, tensor in enumerate((key, value)):
                    row = tensor.size(1) * tensor.size(3) * tensor.itemsize
                    self.moves += box.move(
                        index, piece * size, size, peer, starts[index] + slot * size * row,
                        owners * key.size(2) * row,
                    )  # fmt: skip


def room_bytes(key: Tensor, value: Tensor, owners: int) -> int:
    """Bytes of a room for the keys and values of ``owners`` ranks."""
    return sum(aligned(owners * x.nbytes) for x in (key, value))
