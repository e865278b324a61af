"""Gathers keys and values of all ranks as prefixes in natural order, one prefix after the other
(:mod:`prefix_plan`)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from cp_dispatch.layouts import Geometry
from cp_dispatch.schedules.comm import Ring
from cp_dispatch.schedules.copy_ops import GRAIN, aligned, rows_for
from cp_dispatch.schedules.mailbox import Mailbox
from cp_dispatch.schedules.pair import Pair
from cp_dispatch.schedules.prefix_plan import (
    keys_of,
    most_keys,
    prefix_parcels,
    prefix_starts,
)


def prefix_keys(
    key: Tensor, value: Tensor, geometry: Geometry, ring: Ring
) -> GatheredPrefixes | PushedPrefixes:
    """The prefixes of this rank: ``come()`` moves them here."""
    rows = most_keys(geometry)
    per_key = (key.nbytes + value.nbytes) // max(1, key.size(2))
    # The same on every rank, because all ranks must make the room together.
    box = ring.mailbox("prefixes", aligned(rows * per_key) + GRAIN)
    if box is None:
        return GatheredPrefixes(key, value, geometry, ring)
    return PushedPrefixes(key, value, geometry, ring, box)


class GatheredPrefixes:
    """By an all-gather, and a copy of the gathered keys into the order of the prefixes."""

    def __init__(self, key: Tensor, value: Tensor, geometry: Geometry, ring: Ring):
        self._pair, self._tensors, self._ring = Pair(key, value), (key, value), ring
        self._geometry = geometry

    def come(self) -> tuple[Tensor, Tensor]:
        """Key and value, ``(B, Hkv, keys of all prefixes, D)``, token-major."""
        key, value = self._tensors
        length, ranks = key.size(2), range(self._ring.world_size)
        send = self._pair.buffer(length)
        self._pair.pack(key, value, send)
        everyone = send.new_empty((len(ranks), send.numel()))
        self._ring.start_all_gather(send, everyone.flatten()).wait()
        shards = [self._pair.views(everyone[rank], length) for rank in ranks]
        pieces = sorted(
            (parcel.tile, parcel.start, owner, parcel.place, parcel.length)
            for owner in ranks
            for parcel in prefix_parcels(self._geometry, self._ring.rank, owner)
        )
        return tuple(
            torch.cat(
                [
                    shards[owner][index].narrow(2, place, count).transpose(1, 2)
                    for *_, owner, place, count in pieces
                ],
                dim=1,
            ).transpose(1, 2)
            for index in (0, 1)
        )

    def release(self) -> None:
        """Called when nothing reads them any more; the views hold their memory."""


class PushedPrefixes:
    """Written here by their owners, each piece once for each prefix that contains it."""

    def __init__(self, key: Tensor, value: Tensor, geometry: Geometry, ring: Ring, box: Mailbox):
        self._tensors = key, value
        place = geometry, key.shape, value.shape, key.dtype
        rooms = box.views.get(place)
        if rooms is None:
            box.forget_many()
            rooms = box.views[place] = _rooms(key, value, geometry, ring, box)
        #: The numbers for the box, and the views of the data that arrives.
        self.moves, self.own = rooms
        self.box = box

    def come(self) -> tuple[Tensor, Tensor]:
        """As :meth:`GatheredPrefixes.come`."""
        self.box.push_rows(rows_for(self._tensors), self.moves, opens=True, then_wait=True)
        return self.own

    def release(self) -> None:
        """As :meth:`GatheredPrefixes.release`."""
        self.box.release()


def _rooms(key: Tensor, value: Tensor, geometry: Geometry, ring: Ring, box: Mailbox):
    """Where keys and values go, as ``moves`` for :class:`Mailbox`, and the views of the data that
    arrives."""
    moves = []
    for step in range(ring.world_size):
        # Nearest rank first, so that no two ranks write to the same rank at a time; this rank last.
        peer = (ring.rank + 1 + step) % ring.world_size
        starts, keys = prefix_starts(geometry, peer), keys_of(geometry, peer)
        for parcel in prefix_parcels(geometry, peer, ring.rank):
            at = starts[parcel.tile] + parcel.start
            offset = 0
            for index, tensor in enumerate((key, value)):
                row = tensor.size(1) * tensor.size(3) * tensor.itemsize
                moves += box.move(
                    index, parcel.place, parcel.length, peer, offset + at * row, keys * row
                )
                offset += aligned(tensor.size(0) * keys * row)
    own, offset, keys = [], 0, keys_of(geometry, ring.rank)
    for tensor in (key, value):
        batch, heads, _, dim = tensor.shape
        shape = batch, keys, heads, dim
        view = box.at(ring.rank, offset, math.prod(shape), tensor.dtype).view(shape)
        own.append(view.transpose(1, 2))
        offset += aligned(view.nbytes)
    return moves, tuple(own)
