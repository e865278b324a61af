"""Exchanges heads by copy engines, where ranks can write to each other's memory (:mod:`mailbox`).

Like :mod:`cp_dispatch.schedules.wire`, but heads are written where kernels read them: in natural
order, each tensor separately, ``(B, S, heads, dim)``. So nothing is packed (except thin rows, which
copy engines move slowly), nothing is reordered, and no NCCL kernel takes SMs from attention. Heads
that come back are concatenated by the copy that takes them out of the room.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cp_dispatch.native.rows import copy_rows
from cp_dispatch.schedules.comm import Ring
from cp_dispatch.schedules.copy_ops import has_heads_in_rows, rows_for
from cp_dispatch.schedules.head_moves import Moves
from cp_dispatch.schedules.mailbox import on_default_stream
from cp_dispatch.schedules.wire import Part, collect

# Rows are packed before they are copied if their heads for one rank take fewer bytes than this.
_LEAST_WIDTH = 1024
#: The most copies of one tensor to one rank, because each costs the host some microseconds.
MOST_COPIES = 16


class _Pushed:
    """A message in transit in a mailbox. With ``at_once`` the current stream waits for it
    immediately, because nothing can overlap with it."""

    def __init__(self, ring: Ring, box, moves: Moves, at_once: bool):
        self._ring, self._box, self._moves, self._at_once = ring, box, moves, at_once

    def _push(self, tensors: Sequence[Tensor], packed: tuple[bool, ...]) -> None:
        ring, box, moves = self._ring, self._box, self._moves
        known = box.views.get((moves, packed))
        if known is None:
            box.forget_many()
            known = box.views[moves, packed] = moves.numbers(box, packed), moves.own(box)
        numbers, self._own = known
        box.push_heads(tensors, numbers, self._at_once)
        # Do not wait for the whole of the box's stream, because the next stage's messages follow.
        waits = not self._at_once and ring.stream is not None
        self._there = ring.stream.record_event() if waits else None

    def _wait(self) -> None:
        if self._at_once:
            return
        if self._there is not None:
            self._ring.wait(self._there)
        self._box.let_go()


class PushedOutward(_Pushed):
    """As :class:`~cp_dispatch.schedules.wire.Outward`."""

    def __init__(
        self, ring: Ring, box, moves: Moves, parts: tuple[Part, ...], tensors, at_once: bool
    ):
        super().__init__(ring, box, moves, at_once)
        self._push(*packed_heads(parts, tensors, at_once))

    def wait(self) -> list[Tensor]:
        """Wait for all rows of own heads, ``(B, heads, S, dim)``, in the order of kernels."""
        self._wait()
        return self._own

    def release(self) -> None:
        """Called when nothing reads them any more."""
        self._box.release()


class PushedHomeward(_Pushed):
    """As :class:`~cp_dispatch.schedules.wire.Homeward`."""

    def __init__(
        self, ring: Ring, box, moves: Moves, parts: tuple[Part, ...], pieces, at_once: bool
    ):
        super().__init__(ring, box, moves, at_once)
        self._parts = parts
        wholes = []
        for part, tensors in zip(parts, pieces, strict=True):
            tensors = [x.to(part.dtype) for x in tensors]
            wholes.append(as_heads(tensors[0] if len(tensors) == 1 else torch.cat(tensors, 1)))
        self._push(wholes, (False,) * len(parts))

    def wait(self, *results: Tensor) -> None:
        """As :meth:`~cp_dispatch.schedules.wire.Homeward.wait`."""
        self._wait()
        parts = self._parts
        if self._moves.is_even:
            pairs = [
                (came, result.unflatten(1, (len(came), -1)).transpose(0, 1))
                for came, result in zip(self._own, results, strict=True)
            ]
        else:
            pairs = [
                (came, result.narrow(1, *part.heads[rank]))
                for rank in range(self._ring.world_size)
                for came, part, result in zip(
                    self._own[rank * len(parts) :], parts, results, strict=False
                )
            ]
        collect(parts, pairs, results)
        self._box.release()


def packed_heads(parts: Sequence[Part], tensors: Sequence[Tensor], at_once: bool):
    """Tensors ``(B, H, S, dim)`` to send, in the form for :meth:`Moves.numbers`, and which of them
    are packed: none if a kernel copies them."""
    if at_once and on_default_stream(tensors[0].device):
        return [as_heads(x) for x in tensors], (False,) * len(parts)
    thin = are_thin(parts, tensors)
    packed = iter(_packed([x for x in zip(tensors, parts, thin, strict=True) if x[2]]))
    heads = [
        next(packed) if is_thin else as_heads(x) for x, is_thin in zip(tensors, thin, strict=True)
    ]
    return heads, thin


def as_heads(tensor: Tensor) -> Tensor:
    """A tensor ``(B, H, S, dim)``, or ``(B, H, S)`` for one number per row, in the form for
    :meth:`~cp_dispatch.schedules.mailbox.Mailbox.push_heads`."""
    if goes_as_it_is(tensor):
        return tensor
    if tensor.dim() == 3:
        return tensor.contiguous()
    if tensor.size(3) == 1:
        return tensor[..., 0].contiguous()
    return rows_for([tensor])[0].transpose(1, 2)


def goes_as_it_is(tensor: Tensor) -> bool:
    """Whether :func:`as_heads` returns the tensor itself."""
    if tensor.dim() == 3:
        return tensor.is_contiguous()
    return tensor.size(3) > 1 and has_heads_in_rows(tensor)


def are_thin(parts: Sequence[Part], tensors: Sequence[Tensor]) -> tuple[bool, ...]:
    """Which of the tensors are packed before they are copied."""
    return tuple(
        part.dim > 1
        and part.heads[0].length * part.dim * part.dtype.itemsize < _LEAST_WIDTH
        and part.step(tensor.size(1)) > 0
        for part, tensor in zip(parts, tensors, strict=True)
    )


def _packed(found: Sequence[tuple[Tensor, Part, bool]]) -> list[Tensor]:
    """Each tensor as ``(B * ranks, heads, S, dim)``, with each rank's heads contiguous."""
    wholes, targets, sources = [], [], []
    for tensor, part, _ in found:
        ranks, (start, count) = len(part.heads), part.heads[0]
        batch, heads, length, dim = tensor.shape
        whole = tensor.new_empty((batch, ranks, length, count, dim))
        wholes.append(whole)
        targets.append(whole.transpose(2, 3))
        dealt = tensor.unflatten(1, (ranks, part.step(heads)))
        sources.append(dealt[:, :, start : start + count])
    if wholes:
        copy_rows(targets, sources, None, [2] * len(wholes), False)
    return [x.flatten(0, 1).transpose(1, 2) for x in wholes]
