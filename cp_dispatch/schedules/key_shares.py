"""Sums dK and dV of gathered keys: every rank sends its shares to the keys' owners.

The shares travel in the kernels' dtype and are summed in float32 (float64 for float64), so nothing
is rounded in between. A rank sends about as much as in a reduce-scatter of the kernels' dtype.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor

from cp_dispatch.layouts import Geometry, Span
from cp_dispatch.native.merge import token_major
from cp_dispatch.native.parts import add_up
from cp_dispatch.schedules.comm import Ring
from cp_dispatch.schedules.copy_ops import rows_for
from cp_dispatch.schedules.gather_plan import Parcel, parcels_of
from cp_dispatch.schedules.gradients import KeyShare
from cp_dispatch.schedules.home import narrowed
from cp_dispatch.schedules.mailbox import Mailbox
from cp_dispatch.schedules.pair import Pair


class KeyShares:
    """Shares of dK and dV, to every owner of keys and from every rank.

    ``parcels(geometry, rank, owner)`` returns the gradients that a rank computes for an owner,
    unless ``nothing`` is computed on any rank. ``room`` names the mailbox where they arrive; it may
    be one of another purpose that is no longer in use after :meth:`open`.
    """

    def __init__(
        self, key: Tensor, value: Tensor, geometry: Geometry, ring: Ring, dtype,
        parcels=parcels_of, nothing: bool = False, room: str = "gradients",
    ):  # fmt: skip
        self._key, self._value, self._ring = key, value, ring
        self._pair = Pair(key, value, dtype)
        self._plan = _plan_of(geometry, ring.rank, parcels)
        # Elements per position; none if nothing is computed. All ranks must find the same number,
        # also a rank that has no shares for others, because it may receive shares.
        self._row = 0 if nothing or not (key.numel() and value.numel()) else self._pair.numel(1)
        self._is_open, self._work = False, None
        # Of the shares that were sent, those of own keys.
        self._kept: list[KeyShare] = []
        # The key of a cache: everything that determines the places of shares.
        self._like = geometry, parcels, key.shape, value.shape, dtype, self._row
        #: The mailbox in which the shares of this rank's keys arrive; None if collectives move
        #: them.
        self.box: Mailbox | None = ring.mailbox(
            room, self._plan.largest * self._row * dtype.itemsize
        )

    def open(self) -> None:
        """Tell the other ranks that they can send their shares; the earlier, the less they wait.
        :meth:`start` does it if it was not done."""
        if self.box is not None:
            self.box.open()
            self._is_open = True

    def start(self, shares: list[KeyShare]) -> None:
        """Start sending the shares of all tiles of gathered keys, in their order. Once sent, those
        of other ranks' keys are freed."""
        shares = shares if self._row else []
        self._kept = [shares[parcel.tile] for parcel in self.own]
        if self.box is None:
            self._send_in_one_message(shares)
            return
        sources = rows_for(x for share in shares for x in (share.dk, share.dv))
        self.box.push_rows(sources, self.moves(), opens=not self._is_open)

    def _send_in_one_message(self, shares: list[KeyShare]) -> None:
        pair, plan = self._pair, self._plan
        sizes, coming = ([n * self._row for n in x] for x in (plan.sent, plan.coming))
        send, received = (
            self._key.new_empty(sum(x), dtype=pair.dtype) for x in (sizes, coming)
        )  # fmt: skip
        at = 0
        # In the order of the owners' ranks, not nearest first.
        for _, _, parcel in sorted(plan.outgoing) if self._row else ():
            share, numel = shares[parcel.tile], pair.numel(parcel.length)
            parts = (x.narrow(2, parcel.start, parcel.length) for x in (share.dk, share.dv))
            pair.pack(*parts, send[at : at + numel])
            at += numel
        self._arrived = self._views(received)
        self._work = self._ring.exchange_all(send, sizes, received, coming)

    def finish(self, shares: Mapping[Span, list[KeyShare]]) -> tuple[Tensor, Tensor]:
        """dK and dV of this rank's own keys, in their dtype, token-major. ``shares``: what it
        computed with its own keys, by heads, with the same rows for all heads; if it has any, of
        every head."""
        if self.box is not None:
            self.box.wait()
            self._arrived = self.coming()
        else:
            self._work.wait()
        self._work = None
        everywhere = [*self._kept, *self._arrived]
        results = tuple(token_major(*x.shape, like=x) for x in (self._key, self._value))
        totals, parts, places = [], [], ()
        for heads, own in (shares or {Span(0, self._key.size(1)): []}).items():
            for index, result in enumerate(results):
                totals.append(narrowed(result, heads))
                parts.append([x[index] for x in own])
                parts[-1] += [narrowed(x[index], heads) for x in everywhere]
            places = tuple((share.start, share.dk.size(2), 0) for share in own)
        add_up(totals, parts, places + self.places(self._arrived))
        if self.box is not None:
            self.box.release()
        return results

    @property
    def own(self) -> tuple[Parcel, ...]:
        """The shares of this rank's own keys among the shares that it computes."""
        return self._plan.own if self._row else ()

    def places(self, arrived: list[KeyShare]) -> tuple[tuple[int, int, int], ...]:
        """The places of :attr:`own`, then of the shares that arrived, for
        :func:`~cp_dispatch.native.parts.add_up`."""
        return (
            *((parcel.place, parcel.length, parcel.start) for parcel in self.own),
            *((share.start, share.dk.size(2), 0) for share in arrived),
        )

    def moves(self) -> list[int]:
        """The targets of shares, as moves of the mailbox."""
        box = self.box
        item = self._pair.dtype.itemsize
        place = *self._like, "moves"
        found = box.views.get(place)
        if found is None:
            box.forget_many()
            found = box.views[place] = []
            for owner, at, parcel in self._plan.outgoing if self._row else ():
                offset, source = at * self._row * item, 2 * parcel.tile
                for index, tensor in enumerate((self._key, self._value)):
                    stride = parcel.length * tensor.size(1) * tensor.size(3) * item
                    found += box.move(
                        source + index, parcel.start, parcel.length, owner, offset, stride
                    )
                    offset += tensor.size(0) * stride
        return found

    def coming(self) -> list[KeyShare]:
        """The shares that arrive in the mailbox."""
        box = self.box
        found = box.views.get(self._like)
        if found is None:
            box.forget_many()
            size = sum(self._plan.coming) * self._row
            room = box.at(self._ring.rank, 0, size, self._pair.dtype)
            found = box.views[self._like] = self._views(room)
        return found

    def _views(self, received: Tensor) -> list[KeyShare]:
        pair, shares, at = self._pair, [], 0
        for parcel in self._plan.incoming if self._row else ():
            numel = pair.numel(parcel.length)
            views = pair.views(received[at : at + numel], parcel.length)
            shares.append(KeyShare(*views, parcel.place, None))
            at += numel
        return shares


class _Plan(NamedTuple):
    """The parcels of one rank.

    Attributes:
        outgoing: its parcels for others, ``(owner, position where they go there, parcel)``, the
            nearest owner first.
        own: its parcels of its own keys.
        incoming: the parcels that arrive, in the order of the ranks.
        sent: positions sent to each rank.
        coming: positions that come from each rank.
        largest: the most positions that any rank receives.
    """

    outgoing: tuple[tuple[int, int, Parcel], ...]
    own: tuple[Parcel, ...]
    incoming: tuple[Parcel, ...]
    sent: tuple[int, ...]
    coming: tuple[int, ...]
    largest: int


@functools.lru_cache(maxsize=256)
def _plan_of(geometry: Geometry, rank: int, parcels_of) -> _Plan:
    ranks = range(geometry.world_size)

    def positions(sender: int, owner: int) -> int:
        if sender == owner:
            return 0
        return sum(parcel.length for parcel in parcels_of(geometry, sender, owner))

    outgoing = []
    for step in ranks[1:]:
        owner = (rank + step) % len(ranks)  # no two ranks write to the same rank at a time
        at = sum(positions(sender, owner) for sender in range(rank))
        for parcel in parcels_of(geometry, rank, owner):
            outgoing.append((owner, at, parcel))
            at += parcel.length
    return _Plan(
        tuple(outgoing),
        parcels_of(geometry, rank, rank),
        tuple(p for sender in ranks if sender != rank for p in parcels_of(geometry, sender, rank)),
        tuple(positions(rank, owner) for owner in ranks),
        tuple(positions(sender, rank) for sender in ranks),
        max(sum(positions(sender, owner) for sender in ranks) for owner in ranks),
    )
