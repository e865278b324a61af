"""What copy engines do at one call after the other, worked out at the first.

An op gets tensors of the same shapes and strides for the same mask again and again, and all that it
does are a few launches. What these take is the same each time but for the memory: views, which are
kept as numbers, and parts of rooms, which never move. Then a call is some ten calls of torch, which
is all that a host has time for beside short kernels.

A way lives as long as the views of its room (``Mailbox.views``); the exchange of a mask finds it
without being held up, or holding up a room that another one replaced.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from cp_dispatch._compat import view_of
from cp_dispatch.flex.exchange import Exchange
from cp_dispatch.flex.pulled import MOST_VIEWS, PulledGradients, PulledKeys
from cp_dispatch.parts import way_to_add
from cp_dispatch.rows import copy_rows

#: For each exchange; an op's shapes hardly change while its mask stays the same.
_MOST_WAYS = 16

#: The number of a tensor among those of a call, then size, strides and offset of a view of it.
View = tuple[int, tuple[int, ...], tuple[int, ...], int]


class _Way:
    """What an op does for tensors of one kind in one group."""

    def __init__(self, group, box):
        self.group, self._box = group, weakref.ref(box)

    @property
    def box(self):
        """The room; None once another one has taken its place."""
        box = self._box()
        return box if box is not None and box.is_current else None


def find(exchange: Exchange, group, *tensors: Tensor):
    """The way of tensors like these and its room; None, None where none is known."""
    found = exchange.ways.get(_kind(group, tensors))
    way = None if found is None else found()
    if way is None or way.group is not group:
        return None, None
    box = way.box
    return (None, None) if box is None else (way, box)


def _keep(way: _Way, exchange: Exchange, *tensors: Tensor) -> None:
    box, kind = way.box, _kind(way.group, tensors)
    if box is None:
        return
    box.forget_many(MOST_VIEWS)
    box.views["way", exchange, kind] = way
    if len(exchange.ways) >= _MOST_WAYS:
        exchange.ways.clear()
    exchange.ways[kind] = weakref.ref(way)


def _kind(group, tensors: Sequence[Tensor]) -> tuple:
    # The group itself, for names repeat after destroy_process_group, and in threads.
    kind = [id(group)]
    for x in tensors:
        kind += (x.shape, x.stride(), x.dtype)
    return tuple(kind)


class KeysWay(_Way):
    """What ``flex_bring`` does."""

    def run(self, box, key: Tensor, value: Tensor, fill: bool) -> Tensor:
        """The buffer, as :meth:`PulledKeys.bring` fills it."""
        buffer = key.new_empty(self.shape)
        if fill:
            buffer.zero_()
        given = key, value, buffer
        box.wait_for_readers()
        targets = [*self.offered, *_seen(self.into, given)]
        copy_rows(targets, [key, value, *_seen(self.rows, given)], None, self.dims, False)
        box.pull(_seen(self.places, given), self.there, True, True, True)
        box.wait()
        return buffer


def keep_keys(exchange: Exchange, carrier: PulledKeys, group, key, value, buffer) -> None:
    """Keep the way of tensors like these, if all that it copies are slices."""
    given = [_like(x) for x in (key, value, buffer)]
    if exchange.keys.lanes > 1 or not exchange.own_is_sliced or 0 in (key.numel(), value.numel()):
        return
    way = KeysWay(group, carrier.box)
    way.offered, way.there, places = carrier.views_for(given[2])
    pairs = _filled(exchange.own_places(*given))
    if not _alike([*zip(way.offered, given, strict=False), *pairs]):
        return
    way.shape = tuple(buffer.shape)
    way.into = _views((pair[0] for pair in pairs), given)
    way.rows = _views((pair[1] for pair in pairs), given)
    way.places = _views(places, given)
    way.dims = [0] * (len(way.offered) + len(pairs))
    _keep(way, exchange, key, value)


class GradientsWay(_Way):
    """What ``flex_bring_back`` does."""

    def run(self, box, grad_key: Tensor, grad_value: Tensor, key, value) -> tuple[Tensor, Tensor]:
        """dK and dV, as :meth:`PulledGradients.bring_back` sums them."""
        given = grad_key, grad_value
        grads = torch.empty_like(key), torch.empty_like(value)
        box.wait_for_readers()
        if self.staged:
            copy_rows(self.staged, _seen(self.shares, given), None, self.dims, False)
        came = [self.room.new_empty(shape) for shape in self.shapes]
        box.pull(came, self.there, True, True, True)
        box.wait()
        self.add(_seen(self.parts, (*given, *came)), self.pieces, grads)
        return grads


def keep_gradients(
    exchange: Exchange, carrier: PulledGradients, group, grad_key, grad_value, key, value, grads
) -> None:
    """As :func:`keep_keys`; ``grads`` are those that the carrier wrote to."""
    if not exchange.shares_are_sliced:
        return
    way = GradientsWay(group, carrier.box)
    way.room, there = carrier.views
    came = [_like(rows) for rows in there]
    of_keys = _like(grad_key), _like(grad_value)
    pairs = _filled(carrier.shares_of(*of_keys))
    if not _alike(pairs):
        return
    # Of many ranks few share rows with this one.
    way.there = [rows for rows in there if rows.numel()]
    way.shapes = [tuple(rows.shape) for rows in way.there]
    given = [*of_keys, *(rows for rows in came if rows.numel())]
    way.staged = [pair[0] for pair in pairs]
    way.shares = _views((pair[1] for pair in pairs), given)
    way.dims = [0] * len(pairs)
    flat = [part for own in carrier.parts(*of_keys, grads, came) for part in own]
    way.parts = _views(flat, given)
    way.add, way.pieces = way_to_add(flat, grads, exchange.sums[0])
    _keep(way, exchange, grad_key, grad_value, key, value)


def _like(x: Tensor) -> Tensor:
    """A stand-in with memory of its own, which is none."""
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")


def _filled(pairs):
    return [pair for pair in pairs if pair[1].numel()]


def _alike(pairs) -> bool:
    return all(a.dtype is b.dtype for a, b in pairs)


def _views(tensors, given: Sequence[Tensor]) -> list[View]:
    """Views of stand-ins as numbers."""
    storages = [x.untyped_storage() for x in given]
    return [
        (
            next(i for i, s in enumerate(storages) if s is x.untyped_storage()),
            tuple(x.shape), x.stride(), x.storage_offset(),
        )
        for x in tensors
    ]  # fmt: skip


def _seen(views: list[View], given: Sequence[Tensor]) -> list[Tensor]:
    """The same views of what stands there now."""
    return [view_of(given[i], size, strides, offset) for i, size, strides, offset in views]
