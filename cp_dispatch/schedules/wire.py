"""Messages that exchange heads: from some rows of all heads to all rows of some heads, and back.

A group of ranks holds a sequence in shards. In one all-to-all each rank sends every other rank that
rank's share of the heads, and receives all rows of its own share. Rows are ordered by position,
then by batch row, with the heads of all parts (query, key, ...) side by side::

    rank 0, rows 0 1, sends rank 1 its heads      rank 1 receives
        [row 0: q k v][row 1: q k v]              [row 0: q k v][row 1: q k v][row 2: ...

So the rows from several ranks form one sequence, whatever their lengths, and kernels read their
part of it in place, as a view, without unpacking.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from cp_dispatch.layouts import Span
from cp_dispatch.native.rows import copy_rows
from cp_dispatch.schedules.comm import Ring
from cp_dispatch.schedules.head_shares import Order

_ALIGNMENT = 16  # bytes: where parts and rows start


class Part(NamedTuple):
    """A tensor ``(B, H, S, dim)``, and which of its heads each rank of the group takes."""

    dtype: torch.dtype
    dim: int
    heads: tuple[Span, ...]

    def step(self, all_heads: int) -> int:
        """The distance between the first heads of consecutive ranks, if all ranks have equally
        many; 0 if heads are not dealt that way."""
        start, count = self.heads[0]
        step, rest = divmod(all_heads, len(self.heads))
        even = all(span == (start + rank * step, count) for rank, span in enumerate(self.heads))
        return step if even and not rest and start + count <= step else 0

    @property
    def are_shared(self) -> bool:
        """Whether some head goes to several ranks."""
        return sum(span.length for span in self.heads) > sum(max(self.heads, key=sum))


class Wire:
    """The memory layout of a message, see the module's docstring."""

    def __init__(self, batch: int, lengths: tuple[int, ...], rank: int, parts: tuple[Part, ...]):
        self.parts, self._batch, self._rank, self._lengths = parts, batch, rank, lengths
        ranks = range(len(lengths))
        self._places: list[list[int]] = []
        self._rows: list[int] = []  # bytes per row of each rank's heads
        for r in ranks:
            places, end = [], 0
            for part in parts:
                places.append(end)
                size = part.heads[r].length * part.dim * part.dtype.itemsize
                end += -(-size // _ALIGNMENT) * _ALIGNMENT
            self._places.append(places)
            self._rows.append(end)
        #: Bytes of own rows with each rank's heads, and of each rank's rows with own heads.
        self.own = [lengths[rank] * batch * self._rows[r] for r in ranks]
        self.all = [lengths[r] * batch * self._rows[rank] for r in ranks]

    def views_of_all(self, buffer: Tensor) -> list[Tensor]:
        """All rows of this rank's heads, ``(B, heads, S, dim)`` for each part."""
        return self._views(buffer, self._rank, 0, sum(self._lengths))

    def _views(self, buffer: Tensor, rank: int, offset: int, length: int) -> list[Tensor]:
        views, row = [], self._rows[rank]
        for part, place in zip(self.parts, self._places[rank], strict=True):
            size = part.dtype.itemsize
            step = row // size
            # A batch of 1 gets the stride from which kernels see that the memory is token-major.
            batch = step if self._batch > 1 else step * length
            views.append(
                buffer.view(part.dtype).as_strided(
                    (self._batch, part.heads[rank].length, length, part.dim),
                    (batch, part.dim, step * self._batch, 1),
                    (offset + place) // size,
                )
            )
        return views

    def own_pairs(self, buffer: Tensor, tensors: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
        """The own rows: views of the buffer, and the views of ``tensors`` that correspond to
        them."""
        ranks, length = len(self._rows), self._lengths[self._rank]
        steps = [part.step(x.size(1)) for part, x in zip(self.parts, tensors, strict=True)]
        if not all(steps):
            return [
                (view, tensor[:, span.position : span.position + span.length])
                for rank in range(ranks)
                for view, tensor, span in zip(
                    self._views(buffer, rank, sum(self.own[:rank]), length), tensors,
                    (part.heads[rank] for part in self.parts), strict=True,
                )
            ]  # fmt: skip
        pairs = []
        for part, place, tensor, step in zip(
            self.parts, self._places[0], tensors, steps, strict=True
        ):
            size, (start, count) = part.dtype.itemsize, part.heads[0]
            row = self._rows[0] // size
            view = buffer.view(part.dtype).as_strided(
                (self._batch, ranks, count, length, part.dim),
                (row, row * self._batch * length, part.dim, row * self._batch, 1),
                place // size,
            )
            dealt = tensor.unflatten(1, (ranks, step))[:, :, start : start + count]
            pairs.append((view, dealt))
        return pairs


@functools.lru_cache(maxsize=256)
def wire(batch: int, lengths: tuple[int, ...], rank: int, parts: tuple[Part, ...]) -> Wire:
    """The :class:`Wire` of a message; the same object for the same message."""
    return Wire(batch, lengths, rank, parts)


class Outward:
    """Sends this rank's rows of all heads, immediately; :meth:`wait` returns all rows of its own
    heads. ``order`` puts them in natural order."""

    def __init__(self, ring: Ring, wire: Wire, tensors: Sequence[Tensor], order: Order | None):
        self._wire, self._order = wire, order
        like = tensors[0]
        self._send = like.new_empty(sum(wire.own), dtype=torch.uint8)
        self._receive = like.new_empty(sum(wire.all), dtype=torch.uint8)
        self._batch = like.size(0)
        # Allocated on the current stream before the mark and freed after it has waited, although
        # the side stream fills them.
        with ring.after(ring.mark()):
            _copy(wire.own_pairs(self._send, tensors))
            self._work = ring.exchange_all(self._send, wire.own, self._receive, wire.all)

    def wait(self) -> list[Tensor]:
        """Wait for what was sent: views ``(B, heads, all rows, dim)`` of one buffer."""
        self._work.wait()
        buffer = self._receive
        self._send = self._receive = self._work = None  # NCCL's work holds its output
        if self._order is not None and buffer.numel():
            ordered = torch.empty_like(buffer)
            rows = self._order.there.size(-1)
            target, source = (
                x.view(rows, self._batch, -1).transpose(0, 1) for x in (ordered, buffer)
            )
            copy_rows([target], [source], self._order.there, [1], False)
            buffer = ordered
        return self._wire.views_of_all(buffer)

    def release(self) -> None:
        """Called when nothing reads them any more; the views hold their memory."""


class Homeward:
    """Sends all rows of this rank's heads to the ranks that own the rows.

    ``pieces`` holds for each part its tensors ``(B, n, S, dim)``, which together have its heads.
    """

    def __init__(
        self, ring: Ring, wire: Wire, pieces: Sequence[Sequence[Tensor]], order: Order | None
    ):
        # Their memory must stay allocated while the side stream reads.
        self._wire, self._held = wire, (pieces, order)
        like = pieces[0][0]
        self._receive = like.new_empty(sum(wire.own), dtype=torch.uint8)
        self._send = self._as_it_is(pieces) if order is None else None
        ready = self._send is not None
        if not ready:
            self._send = like.new_empty(sum(wire.all), dtype=torch.uint8)
        with ring.after(ring.mark()):
            if not ready:
                self._pack(pieces, order)
            self._work = ring.exchange_all(self._send, wire.all, self._receive, wire.own)

    def _as_it_is(self, pieces) -> Tensor | None:
        """The memory of the only tensor, if it already has the layout of the message; otherwise
        None."""
        if len(pieces) != 1 or len(pieces[0]) != 1:
            return None
        rows = pieces[0][0].permute(2, 0, 1, 3)
        if (
            rows.dtype is not self._wire.parts[0].dtype
            or not rows.is_contiguous()
            or rows.nbytes != sum(self._wire.all)
        ):
            return None
        return rows.view(-1).view(torch.uint8)

    def _pack(self, pieces, order: Order | None) -> None:
        pairs = []
        for view, tensors in zip(self._wire.views_of_all(self._send), pieces, strict=True):
            start = 0
            for tensor in tensors:
                pairs.append((view[:, start : start + tensor.size(1)], tensor))
                start += tensor.size(1)
        _copy(pairs, None if order is None else order.back)

    def wait(self, *results: Tensor) -> None:
        """Write own rows of all heads into ``results``; if several ranks have shares of one head,
        sum them in ``results``' dtype."""
        self._work.wait()
        self._send = self._held = self._work = None
        collect(self._wire.parts, self._wire.own_pairs(self._receive, results), results)


def collect(parts: Sequence[Part], pairs, results: Sequence[Tensor]) -> None:
    """Write received data into ``results``. ``pairs`` are ``(received, its place in results)``;
    shares from several ranks are summed."""
    if not any(part.are_shared for part in parts):
        _copy([(place, came) for came, place in pairs])
        return
    for result in results:
        result.zero_()
    for came, place in pairs:
        place.add_(came)


def _copy(pairs: list[tuple[Tensor, Tensor]], index: Tensor | None = None) -> None:
    """Copy the second tensor of each pair to the first; with an index along the rows, dim 2 of
    4."""
    pairs = [(target, source) for target, source in pairs if target.numel()]
    if not pairs:
        return
    alike = [(a, b) for a, b in pairs if a.dtype is b.dtype]
    if alike:
        copy_rows([a for a, _ in alike], [b for _, b in alike], index, [2] * len(alike), False)
    for target, source in pairs:
        if target.dtype is not source.dtype:
            target.copy_(source if index is None else _select(source, index))


def _select(source: Tensor, index: Tensor) -> Tensor:
    if index.dim() == 1:
        return source.index_select(2, index)
    return source.gather(2, index[:, None, :, None].expand(source.shape))
