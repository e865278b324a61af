"""dK and dV of gathered keys: every rank sends the owner of some keys its share of their gradient,
and the owner adds up.

The shares travel as the kernels gave them and are added in float32 (float64), so that nothing is
rounded on the way and each rank sends and receives no more than a reduce-scatter of the kernels'
dtype would.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from cp_dispatch.layouts import Geometry
from cp_dispatch.merge import token_major
from cp_dispatch.parts import sum_parts
from cp_dispatch.schedules.comm import Ring
from cp_dispatch.schedules.gather_plan import Parcel, parcels_of
from cp_dispatch.schedules.gradients import KeyShare
from cp_dispatch.schedules.mailbox import Mailbox
from cp_dispatch.schedules.pair import Pair


class KeyShares:
    """Shares of dK and dV, to every owner of keys and from every rank."""

    def __init__(self, key: Tensor, value: Tensor, geometry: Geometry, ring: Ring, dtype):
        self._key, self._value, self._geometry, self._ring = key, value, geometry, ring
        self._pair = Pair(key, value, dtype)
        self._received: list[KeyShare] = []
        ranks = range(ring.world_size)
        self._sent = [self._numel(ring.rank, owner) for owner in ranks]
        self._coming = [self._numel(rank, ring.rank) for rank in ranks]
        self._sent[ring.rank] = self._coming[ring.rank] = 0
        largest = max(
            sum(self._numel(rank, owner) for rank in ranks if rank != owner) for owner in ranks
        )
        self._box = ring.mailbox("gradients", largest * self._pair.dtype.itemsize)

    def open(self) -> None:
        """Let the others know that their shares can come; the earlier, the less they wait."""
        if self._box is not None:
            with self._ring.after(self._ring.mark()):
                self._box.open()

    def start(self, shares: list[KeyShare]) -> None:
        """Start sending the shares of the tiles of gathered keys, in their order."""
        ring = self._ring
        self._own = [_part(shares, parcel) for parcel in self._parcels(ring.rank, ring.rank)]
        if self._box is None:
            self._send_in_one_message(shares)
        else:
            self._push(shares, self._box)

    def _send_in_one_message(self, shares: list[KeyShare]) -> None:
        ring, pair = self._ring, self._pair
        send, self._buffer = (
            self._key.new_empty(sum(sizes), dtype=pair.dtype)
            for sizes in (self._sent, self._coming)
        )
        at = 0
        for owner in range(ring.world_size):
            for parcel in self._parcels(ring.rank, owner) if owner != ring.rank else ():
                share, size = _part(shares, parcel), pair.numel(parcel.length)
                pair.pack(share.dk, share.dv, send[at : at + size])
                at += size
        self._work = ring.exchange_all(send, self._sent, self._buffer, self._coming)

    def _push(self, shares: list[KeyShare], box: Mailbox) -> None:
        ring, pair = self._ring, self._pair
        targets, sources = [], []
        for step in range(1, ring.world_size):
            owner = (ring.rank + step) % ring.world_size  # no two ranks push to one at a time
            at = sum(self._numel(rank, owner) for rank in range(ring.rank) if rank != owner)
            for parcel in self._parcels(ring.rank, owner):
                share, size = _part(shares, parcel), pair.numel(parcel.length)
                room = box.at(owner, at * pair.dtype.itemsize, size, pair.dtype)
                for view, part in zip(
                    pair.views(room, parcel.length), (share.dk, share.dv), strict=True
                ):
                    targets.append(view.transpose(1, 2))
                    sources.append(part.transpose(1, 2))
                at += size
        with ring.after(ring.mark()):
            box.push(targets, sources)
        self._buffer = box.at(ring.rank, 0, sum(self._coming), pair.dtype)
        self._work = box

    def finish(self, shares: list[KeyShare]) -> tuple[Tensor, Tensor]:
        """dK and dV of this rank's own keys, with the shares of what it computed at home, in
        their dtype, token-major."""
        self._work.wait()
        parts = [*shares, *self._own, *self._arrived()]
        sums = []
        for like, part in ((self._key, 0), (self._value, 1)):
            total = token_major(*like.shape, like=like)
            _add_up(total, [(share.start, share[part]) for share in parts])
            sums.append(total)
        if self._box is not None:
            self._box.release()
        return tuple(sums)

    def _arrived(self) -> Iterable[KeyShare]:
        at = 0
        for rank in range(self._ring.world_size):
            for parcel in self._parcels(rank, self._ring.rank) if rank != self._ring.rank else ():
                size = self._pair.numel(parcel.length)
                views = self._pair.views(self._buffer[at : at + size], parcel.length)
                yield KeyShare(*views, parcel.place, None)
                at += size

    def _parcels(self, rank: int, owner: int) -> tuple[Parcel, ...]:
        return parcels_of(self._geometry, rank, owner) if self._pair.numel(1) else ()

    def _numel(self, rank: int, owner: int) -> int:
        return sum(self._pair.numel(parcel.length) for parcel in self._parcels(rank, owner))


def _part(shares: list[KeyShare], parcel: Parcel) -> KeyShare:
    """What a parcel carries, and where it belongs among the owner's keys."""
    share = shares[parcel.tile]
    keys = slice(parcel.start, parcel.start + parcel.length)
    return KeyShare(share.dk[:, :, keys], share.dv[:, :, keys], parcel.place, share.row)


def _add_up(total: Tensor, parts: list[tuple[int, Tensor]]) -> None:
    """Write the sum of parts, each with its first row of ``total``; zeros where there is none."""
    edges = {0, total.size(2)}
    for start, part in parts:
        edges |= {start, start + part.size(2)}
    edges = sorted(edges)
    for begin, end in zip(edges, edges[1:], strict=False):
        here = [
            part[:, :, begin - start : end - start]
            for start, part in parts
            if start <= begin and end <= start + part.size(2)
        ]
        into = total[:, :, begin:end]
        sum_parts(here, into) if here else into.zero_()
