"""Exchanges rows between a rank and its mirror rank, W - 1 - r."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cp_dispatch.schedules.comm import Ring
from cp_dispatch.schedules.copy_ops import can_be_copied

#: The mailbox where halves arrive.
ROOM = "halves"
_ALIGNMENT = 16  # bytes, of each tensor in a message


class Swap:
    """Exchanges ``count`` rows of tensors ``(B, H, S, ...)``, from row ``start`` on, with the
    mirror rank. Shapes are the same on all ranks except for H and the last dim. If a rank does not
    send (``sends``), its mirror receives nothing (``comes``)."""

    def __init__(
        self, ring: Ring, tensors: Sequence[Tensor], start: int, count: int, sends: bool = True,
        comes: bool = True,
    ):  # fmt: skip
        self._ring, self._tensors = ring, tensors
        self._start, self._count, self._peer = start, count, mirror_of(ring)
        self._sends, self._comes = sends, comes
        #: The middle one of an odd number of ranks keeps all rows.
        self.is_alone = self._peer == ring.rank
        # The mirror's rows, and what to wait for before they have arrived.
        self._received: list[Tensor] = []
        self._coming = None
        self._bytes = [x.nbytes // x.size(2) * count for x in tensors]
        # All ranks create it together, so the middle one does too.
        self._box = ring.mailbox(ROOM, sum(map(_aligned, self._bytes)))
        if self._box is not None:
            if not self.is_alone:
                self._push()
        elif self.is_alone:
            nothing = tensors[0].new_empty(0)
            ring.exchange(ring.rank, nothing, nothing).wait()
        else:
            self._exchange()
        if not self.is_alone:
            self._tensors = ()  # the message or the box holds what is still read

    def _exchange(self) -> None:
        """By a collective, in one message."""
        size = sum(map(_aligned, self._bytes))
        message = [
            self._tensors[0].new_empty(size if moves else 0, dtype=torch.uint8)
            for moves in (self._sends, self._comes)
        ]
        if self._sends:
            for view, x in zip(self._views(message[0]), self._tensors, strict=True):
                view.copy_(self.given(x))
        if self._comes:
            self._received = self._views(message[1])
        self._coming = self._ring.exchange(self._peer, *message)

    def _push(self) -> None:
        """By copy engines, to the mirror's room."""
        given = self._tensors if self._sends else ()
        sources, firsts = [], []
        for source, first in map(self._source, given):
            sources.append(source)
            firsts.append(first)
        shapes = ((x.shape, x.dtype) for x in self._tensors)
        place = "swap", *firsts, self._count, self._sends, *shapes
        found = self._box.views.get(place)
        if found is None:
            self._box.forget_many()
            found = self._box.views[place] = self._places(firsts)
        moves, self._received = found
        self._box.push_rows(sources, moves, opens=True, peers=(self._peer,))
        self._coming = self._box

    def given(self, x: Tensor) -> Tensor:
        """The rows of a tensor that go to the mirror."""
        return x.narrow(2, self._start, self._count)

    def _source(self, x: Tensor) -> tuple[Tensor, int]:
        """The source of the copy, ``(B, S, H, D)`` or ``(B, H, S)`` with contiguous batch rows, and
        the start of the part that is sent."""
        if x.dim() == 4:
            rows = x.transpose(1, 2)
            if can_be_copied(rows):
                return rows, self._start
            return rows.narrow(1, self._start, self._count).contiguous(), 0
        return self.given(x).contiguous(), 0

    def _places(self, firsts: Sequence[int]) -> tuple[list[int], list[Tensor]]:
        """Moves to the mirror's room, and views of the data that arrives in this rank's room."""
        box, moves, offset = self._box, [], 0
        for index, (x, size) in enumerate(zip(self._tensors, self._bytes, strict=True)):
            rows, stride = self._count if x.dim() == 4 else x.size(1), size // max(1, x.size(0))
            if self._sends:
                moves += box.move(index, firsts[index], rows, self._peer, offset, stride)
            offset += _aligned(size)
        return moves, self._views(box.at(self._ring.rank, 0, offset, torch.uint8))

    def _views(self, message: Tensor) -> list[Tensor]:
        """Rows of tensors of several dtypes in one buffer, those with a last dim token-major."""
        views, offset = [], 0
        for x, size in zip(self._tensors, self._bytes, strict=True):
            part = message[offset : offset + size].view(x.dtype)
            if x.dim() == 3:
                views.append(part.view(x.size(0), x.size(1), self._count))
            else:
                shape = x.size(0), self._count, x.size(1), x.size(3)
                views.append(part.view(shape).transpose(1, 2))
            offset += _aligned(size)
        return views

    def wait(self) -> list[Tensor]:
        """The mirror's rows; this rank's own if it is its own mirror."""
        if self.is_alone:
            return [self.given(x) for x in self._tensors]
        if self._coming is not None:
            self._coming.wait()
            self._coming = None
        return self._received

    def release(self) -> None:
        """Called when nothing reads the mirror's rows any more."""
        self.wait()  # even if no row needed them: the flags must be reset
        self._received = []
        if self._box is not None and not self.is_alone:
            self._box.release()


def mirror_of(ring: Ring) -> int:
    """Rank W - 1 - r."""
    return ring.world_size - 1 - ring.rank


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
