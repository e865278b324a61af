"""Prepares the launches of repeated ops by copy engines at the first call.

For the same mask an op gets tensors of the same shapes and strides again and again, and only makes
a few launches. Apart from memory addresses, their arguments are the same each time: views, which
are stored as numbers, indices of the exchange, and parts of rooms, which never move. A prepared
call is about ten calls of torch, which is all that the host has time for during short kernels.

A *way* is a prepared op. ``keep_keys`` and ``keep_gradients`` run the op once on stand-ins without
memory, and record its views of them; ``run`` makes the same views of a call's tensors, ``given`` in
the same order.

A way is held by the views of its room (``Mailbox.views``). The exchange of a mask has only a weak
reference to it, and so keeps neither the way nor a replaced room alive.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from cp_dispatch._compat import view_of
from cp_dispatch.bounded import keep
from cp_dispatch.by_need.copies import copies
from cp_dispatch.by_need.here import Here, here_of, stand_in
from cp_dispatch.by_need.selector import Pairs
from cp_dispatch.flex.exchange import Exchange
from cp_dispatch.flex.pulled import MOST_VIEWS, PulledGradients, PulledKeys
from cp_dispatch.flex.sums import RowSums
from cp_dispatch.native.parts import way_to_add
from cp_dispatch.native.rows import copy_rows, sum_rows

#: Ways per exchange; an op's shapes hardly change while its mask stays the same.
_MOST_WAYS = 16

#: Bytes of a rank's keys and values (or gradients) above which their copy takes longer than the
#: host needs for one more launch.
LONG_COPY = 2**26


class Views:
    """Tensors that are views of those of a call, or parts of rooms, which never move."""

    def __init__(self, tensors, given: Sequence[Tensor]):
        storages = [x.untyped_storage() for x in given]
        numbers = {id(x): i for i, x in enumerate(storages)}
        # None for each view. Of these: the place in the list, the index of the call's tensor, then
        # size, strides and offset.
        self._fixed: list[Tensor | None] = []
        self._moving: list[tuple[int, int, tuple[int, ...], tuple[int, ...], int]] = []
        for place, x in enumerate(tensors):
            i = numbers.get(id(x.untyped_storage()))
            self._fixed.append(x if i is None else None)
            if i is not None:
                view = i, tuple(x.shape), x.stride(), x.storage_offset()
                self._moving.append((place, *view))

    def of(self, given: Sequence[Tensor]) -> list[Tensor]:
        """The same views of the actual tensors."""
        found = self._fixed.copy()
        for place, i, size, strides, offset in self._moving:
            found[place] = view_of(given[i], size, strides, offset)
        return found


#: Arguments of :func:`copy_rows`: views that are written to, views that are read, and the rest.
Copies = list[tuple[Views, Views, Tensor | None, list[int], bool]]


class _Way:
    """A prepared op for tensors of one kind in one group."""

    def __init__(self, group, box):
        self.group, self._box = group, weakref.ref(box)

    @property
    def box(self):
        """The room; None once it has been replaced."""
        box = self._box()
        return box if box is not None and box.is_current else None


def find(exchange: Exchange, group, *tensors: Tensor):
    """The way for tensors like these, and its room; None, None if none is known."""
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
    keep(exchange.ways, kind, weakref.ref(way), _MOST_WAYS)


def _kind(group, tensors: Sequence[Tensor]) -> tuple:
    # The group object, because names repeat after destroy_process_group, and in threads.
    kind = [id(group)]
    for x in tensors:
        kind += (x.shape, x.stride(), x.dtype)
    return tuple(kind)


class KeysWay(_Way):
    """The prepared ``flex_bring``. Its views are of key, value, buffer, and packed rows if there
    are any."""

    shape: tuple[int, ...]  # of the buffer
    packed: tuple[int, ...]  # of others' rows, if a kernel puts them in place; else empty
    here: Here | None  # all but ``last``, if that is possible
    first: Copies  # before others may read this rank's room
    meanwhile: Copies  # while others' rows arrive
    last: Copies  # after they have arrived
    there: list[Tensor]  # the parts of others' rooms that are read
    places: Views  # their targets

    def run(self, box, key: Tensor, value: Tensor, fill: bool) -> Tensor:
        """The buffer, as :meth:`PulledKeys.bring` fills it."""
        buffer = key.new_empty(self.shape)
        if fill:
            buffer.zero_()
        given = [key, value, buffer]
        if self.packed:
            given.append(key.new_empty(self.packed))
        box.wait_for_readers()
        if self.here is not None and box.may_pull_here:
            box.pull_here(given + self.here.rooms, self.here.numbers)
        else:
            _copy(self.first, given)
            now = not self.meanwhile
            box.pull(self.places.of(given), self.there, then_wait=now)
            if not now:
                _copy(self.meanwhile, given)
                box.wait()
        if self.last:
            _copy(self.last, given)
        return buffer


def keep_keys(exchange: Exchange, carrier: PulledKeys, group, key, value, buffer) -> None:
    """Store the way for tensors like these, if it makes the same copies at each call."""
    if exchange.keys.lanes > 1 or 0 in (key.numel(), value.numel()):
        return
    way = KeysWay(group, carrier.box)
    given = [stand_in(x) for x in (key, value, buffer)]
    packed = carrier.packed(given[2])
    room, way.there, places = carrier.views_for(given[2], packed)
    offered, own = exchange.offer(room, given[:2]), exchange.own_places(*given)
    if not _alike([*offered, *own]):
        return
    given += [] if packed is None else [packed]
    way.here = None
    way.shape, way.packed = tuple(buffer.shape), () if packed is None else tuple(packed.shape)
    if key.nbytes + value.nbytes < LONG_COPY:
        found, first = _noted_copies([*offered, *own], given), max(1, len(copies(offered)))
        way.first, way.meanwhile = found[:first], found[first:]
        way.here = here_of(carrier.box, [*offered, *own], places, way.there, given)
    else:  # own rows, for which no other rank waits, while those of others arrive
        way.first, way.meanwhile = _noted_copies(offered, given), _noted_copies(own, given)
    way.last = [] if packed is None else _noted_copies(exchange.unpacked(packed, given[2]), given)
    way.places = Views(places, given)
    _keep(way, exchange, key, value)


class GradientsWay(_Way):
    """The prepared ``flex_bring_back``. Its views are of the kernel's dK and dV, of what came from
    others, and of the sums, which are dK and dV of this rank's keys."""

    room: Tensor  # this rank's
    there: list[Tensor]  # the parts of others' rooms that are read
    shapes: list[tuple[int, ...]]  # of what arrives: a tensor from each rank, or one of all rows
    here: Here | None  # ``staged``, the pull and ``own``, if that is possible
    staged: Copies  # before others may read this rank's room
    own: Copies  # shares of own rows, while others' arrive
    parts: Views  # the sources of the sums
    by_row: RowSums | None  # None: the parts are added in pieces
    add: Callable  # of parts, pieces and sums
    pieces: list[int]
    # For sums row by row:
    places: Views  # targets of what arrives
    sums: Views  # dK and dV

    def run(self, box, grad_key: Tensor, grad_value: Tensor, key, value) -> tuple[Tensor, Tensor]:
        """dK and dV, as :meth:`PulledGradients.bring_back` sums them."""
        grads = torch.empty_like(key), torch.empty_like(value)
        box.wait_for_readers()
        came = [self.room.new_empty(shape) for shape in self.shapes]
        given = [grad_key, grad_value, *came, *grads]
        if self.here is not None and box.may_pull_here:
            box.pull_here(given + self.here.rooms, self.here.numbers)
        else:
            _copy(self.staged, given)
            places = came if self.by_row is None else self.places.of(given)
            now = not self.own
            box.pull(places, self.there, then_wait=now)
            if not now:
                _copy(self.own, given)
                box.wait()
        parts = self.parts.of(given)
        if self.by_row is None:
            self.add(parts, self.pieces, grads)
        else:
            sum_rows(self.sums.of(given), parts, self.by_row.order, self.by_row.offsets, [0, 0])
        return grads


def keep_gradients(
    exchange: Exchange, carrier: PulledGradients, group, grad_key, grad_value, key, value, grads
) -> None:
    """As :func:`keep_keys`; ``grads`` are those that the carrier wrote to."""
    way = GradientsWay(group, carrier.box)
    way.room, there = carrier.views
    of_keys, sums = [stand_in(grad_key), stand_in(grad_value)], [stand_in(x) for x in grads]
    pairs = carrier.shares_of(*of_keys)
    if not _alike([*pairs, *zip(of_keys, grads, strict=True)]):
        return
    way.by_row = exchange.sums.by_row
    # Among many ranks, few share rows with this one.
    way.there = [rows for rows in there if rows.numel()]
    own: Pairs = []
    into: list[Tensor] = []
    if way.by_row is None:
        came, places = [stand_in(rows) for rows in there], []
        filled = [rows for rows in came if rows.numel()]
        flat = [part for parts in carrier.parts(*of_keys, grads, came) for part in parts]
        way.add, way.pieces = way_to_add(flat, grads, exchange.sums.places)
    else:
        gathered = way.room.new_empty((way.by_row.rows, way.room.size(1)), device="meta")
        filled = [gathered]
        places = [rows for rows in carrier.places(gathered) if rows.numel()]
        own = carrier.own_into(gathered, *of_keys)
        into, flat = carrier.rows_of(sums, gathered)
    given = [*of_keys, *filled, *sums]
    way.shapes, way.here = [tuple(rows.shape) for rows in filled], None
    if sum(x.nbytes for x, _ in own) < LONG_COPY:
        pairs, own = [*pairs, *own], []
        targets = filled if way.by_row is None else places
        way.here = here_of(carrier.box, pairs, targets, way.there, given)
    way.staged, way.own = _noted_copies(pairs, given), _noted_copies(own, given)
    way.places, way.parts = Views(places, given), Views(flat, given)
    way.sums = Views(into, given)
    _keep(way, exchange, grad_key, grad_value, key, value)


def _alike(pairs) -> bool:
    return all(a.dtype is b.dtype for a, b in pairs)


def _noted_copies(pairs: Pairs, given: Sequence[Tensor]) -> Copies:
    """The arguments of :func:`_copy` for pairs of views of stand-ins."""
    found = []
    for targets, sources, index, scatter in copies(pairs):
        views = Views(targets, given), Views(sources, given)
        found.append((*views, index, [0] * len(targets), scatter))
    return found


def _copy(kept: Copies, given: Sequence[Tensor]) -> None:
    for targets, sources, index, dims, scatter in kept:
        copy_rows(targets.of(given), sources.of(given), index, dims, scatter)
