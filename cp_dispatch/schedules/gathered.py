"""Buffers of the keys of all ranks, and of their gradients."""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor

from cp_dispatch.backends import wide_dtype
from cp_dispatch.merge import token_major
from cp_dispatch.schedules.comm import Ring
from cp_dispatch.schedules.gradients import KeyShare


class _Rows:
    """Rows of key and value side by side, ``(pieces, ranks, positions, B, Hkv, D + Dv)``: the
    positions first, so that pieces of several ranks are one sequence of keys for any batch."""

    def __init__(self, key: Tensor, value: Tensor, pieces: int):
        self.batch, self.heads, length, self.dim = key.shape
        self.value_dim = value.size(-1)
        self.pieces, self.size = pieces, length // pieces

    def empty(self, like: Tensor, ranks: int, dtype: torch.dtype) -> Tensor:
        row = self.batch, self.heads, self.dim + self.value_dim
        return like.new_empty((self.pieces, ranks, self.size, *row), dtype=dtype)

    def views(self, buffer: Tensor) -> tuple[Tensor, Tensor]:
        """Key and value ``(B, Hkv, all positions of the buffer, D)``."""
        rows = buffer.flatten(0, 2).permute(1, 2, 0, 3)
        return rows[..., : self.dim], rows[..., self.dim :]


class GatheredKeys:
    """Keys and values of all ranks: pieces of the last kind of every rank, then of the one
    before, and so on."""

    def __init__(self, key: Tensor, value: Tensor, pieces: int, ring: Ring):
        self._tensors, self._ring = (key, value), ring
        self._rows = _Rows(key, value, pieces)
        # The current stream's memory, also when a side stream fills it: the current stream has
        # waited before it is given back.
        self._send = self._rows.empty(key, 1, key.dtype)  # the pieces in their own order
        self._all = self._rows.empty(key, ring.world_size, key.dtype)

    @contextlib.contextmanager
    def coming(self):
        """Inside, compute with what is at home; meanwhile the gather starts.

        On CUDA the host launches the kernels at home first, so that the GPU does not idle while
        it prepares the gather, which all the same does not wait for them.
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
        for view, tensor in zip(self._rows.views(self._send), self._tensors, strict=True):
            view.copy_(tensor)
        last = self._rows.pieces - 1
        self._works = [
            self._ring.start_all_gather(
                self._send[last - region].flatten(), self._all[region].flatten()
            )
            for region in range(self._rows.pieces)
        ]

    def wait(self) -> tuple[Tensor, Tensor]:
        """Key and value views of all positions, ``(B, Hkv, S, D)``, once they are there."""
        for work in self._works:
            work.wait()
        return self._rows.views(self._all)


class KeyGradient:
    """dK and dV of all keys, in float32 for 16-bit inputs; summed over the ranks, each rank gets
    those of its own keys."""

    def __init__(self, key: Tensor, value: Tensor, pieces: int, ring: Ring):
        self._key, self._value, self._ring = key, value, ring
        self._rows = _Rows(key, value, pieces)
        self._wide = wide_dtype(key.dtype)
        self._all = self._rows.empty(key, ring.world_size, self._wide)
        self._views = self._rows.views(self._all)
        self._written: list[tuple[int, int]] = []  # ranges of positions, ascending

    def add(self, share: KeyShare) -> None:
        """Add a tile's share, which says where it belongs among all positions."""
        start, stop = share.start, share.start + share.dk.size(2)
        for begin, end, written in self._ranges(start, stop):
            for total, part in zip(self._views, (share.dk, share.dv), strict=True):
                window = total[:, :, begin:end]
                part = part[:, :, begin - start : end - start]
                window.add_(part) if written else window.copy_(part)
        self._written = _union(self._written, (start, stop))

    def start(self) -> None:
        """Start the sum over the ranks."""
        for begin, end, written in self._ranges(0, self._views[0].size(2)):
            if not written:
                for total in self._views:
                    total[:, :, begin:end].zero_()
        pieces = self._rows.pieces
        self._own = self._rows.empty(self._key, 1, self._wide)  # the pieces in their own order
        self._works = [
            self._ring.start_reduce_scatter(
                self._all[region].flatten(), self._own[pieces - 1 - region].flatten()
            )
            for region in range(pieces)
        ]

    def finish(self, shares: list[KeyShare]) -> tuple[Tensor, Tensor]:
        """dK and dV of this rank's own keys, with the shares of what it computed at home, in
        their dtype, token-major."""
        for work in self._works:
            work.wait()
        self._all = self._views = None
        views = self._rows.views(self._own)
        for share in shares:
            for total, part in zip(views, (share.dk, share.dv), strict=True):
                total[:, :, share.start : share.start + part.size(2)].add_(part)
        return tuple(
            token_major(*like.shape, like=like).copy_(total)
            for total, like in zip(views, (self._key, self._value), strict=True)
        )

    def _ranges(self, start: int, stop: int):
        """``(begin, end, written)`` of the parts of ``[start, stop)``."""
        at = start
        for begin, end in self._written:
            begin, end = max(begin, at), min(end, stop)
            if begin >= end:
                continue
            if at < begin:
                yield at, begin, False
            yield begin, end, True
            at = end
        if at < stop:
            yield at, stop, False


def _union(ranges: list[tuple[int, int]], new: tuple[int, int]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for begin, end in sorted([*ranges, new]):
        if merged and begin <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((begin, end))
    return merged
