"""A ring by copy engines, where ranks can write to each other's memory (see :mod:`mailbox`).

Every owner writes its keys directly from its own tensors to the rank that needs them at the next
hop, and every rank writes its share of dK and dV to their owner, which sums the shares. So nothing
is passed on, hops do not wait for a chain, keys that no rank needs do not move, and shares travel
in the kernels' dtype. At hop h rank r computes with the keys of rank r - h, as in the ring that
passes keys on. Rooms hold two key/value shards and two shares of gradients, or one of each for two
ranks; the sum, in wide precision, is outside them.

If a hop has several tiles of the same keys, as in layouts by documents or blocks, their sum travels
in wide precision. In 16 bits it would be rounded once more than in a ring that passes sums on
(with kernels that round once, dV's error was 1.58 times that of one device instead of 1.43).
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Sequence

from torch import Tensor

from cp_dispatch.backends import wide_dtype
from cp_dispatch.layouts import Geometry, RowGeometry
from cp_dispatch.native.merge import token_major
from cp_dispatch.native.parts import add_up
from cp_dispatch.schedules.copy_ops import rows_for
from cp_dispatch.schedules.gradients import KeyShare, window_of
from cp_dispatch.schedules.job import Job
from cp_dispatch.schedules.mailbox import Mailbox
from cp_dispatch.schedules.pair import Pair


def places(world_size: int) -> int:
    """The number of shards that a room holds, used by hops in turn."""
    return max(1, min(2, world_size - 1))


class _Hops:
    """The ranks that a rank sends to and receives from at each hop, and the places in the rooms. A
    room holds :func:`places` ``pair``s of the longest shard, used by hops in turn."""

    def __init__(self, job: Job, box: Mailbox, pair: Pair):
        self.geometry, self.rank, self.box, self._pair = job.geometry, job.rank, box, pair
        self.world_size = job.geometry.world_size
        self._longest = max(map(self.geometry.key_length, range(self.world_size)))
        self.hop = 0

    def before(self, hop: int) -> int:
        return (self.rank - hop) % self.world_size

    def after(self, hop: int) -> int:
        return (self.rank + hop) % self.world_size

    def sees(self, rank: int, owner: int) -> bool:
        return self.geometry.sees(rank, owner)

    def room(self, rank: int, hop: int, length: int, as_rows: bool = False) -> Sequence[Tensor]:
        """Views ``(B, H, length, D)`` of the data that arrives on a rank at a hop; ``as_rows``: in
        the form for copies."""
        pair, box = self._pair, self.box
        size = pair.numel(self._longest)
        offset = hop % places(self.world_size) * size * pair.dtype.itemsize
        place = rank, offset, size, length, as_rows, pair.layout
        found = box.views.get(place)
        if found is None:
            found = pair.views(box.at(rank, offset, size, pair.dtype), length)
            if as_rows:
                found = [x.transpose(1, 2) for x in found]
            box.forget_many()
            box.views[place] = found
        return found


class PushedShards(_Hops):
    """As :class:`~cp_dispatch.schedules.ring.TravellingKeys`."""

    def __init__(self, key: Tensor, value: Tensor, job: Job, box: Mailbox):
        super().__init__(job, box, Pair(key, value))
        self.key, self.value = key, value
        self._own = rows_for((key, value))

    @contextlib.contextmanager
    def moving_on(self):
        """In this context, compute with ``key`` and ``value`` while those of the next hop
        arrive."""
        self.hop += 1
        owner, reader = self.before(self.hop), self.after(self.hop)
        last = self.hop == self.world_size
        coming = [owner] if not last and self.sees(self.rank, owner) else []
        going = [reader] if not last and self.sees(reader, self.rank) else []
        if going or coming:
            self.box.open(coming)
        yield
        if going or coming:
            own = self.geometry.key_length(self.rank)
            targets = self.room(reader, self.hop, own, as_rows=True) if going else []
            sources = self._own if going else []
            self.box.push(targets, sources, going, coming, ready_at_open=True)
            self.box.wait()
        if coming:
            length = self.geometry.key_length(owner)
            self.key, self.value = self.room(self.rank, self.hop, length)
        if last:
            self.box.release()


@functools.lru_cache(maxsize=256)
def shares_overlap(geometry: Geometry | RowGeometry) -> bool:
    """Whether at some hop several tiles of a batch row have gradients for the same keys."""
    ranks = range(geometry.world_size)
    for rank, owner in itertools.permutations(ranks, 2):
        windows = sorted(
            (tile.row or 0, tile.key_start, tile.key_start + tile.key_length)
            for tile in geometry.tiles(rank, owner)
        )
        ends: dict[int, int] = {}
        for row, start, end in windows:
            if start < ends.get(row, 0):
                return True
            ends[row] = end
    return False


class ReturnedShares(_Hops):
    """As :class:`~cp_dispatch.schedules.gradients.TravellingGradient`. At each hop::

        add        add what arrived at the last hop to the sum, and take this hop's shares
        pass_on    send them to the keys' owner; open the room for the next hop

    A rank sends an owner one *window* of its keys: that of a single tile, or all of them.
    """

    def __init__(self, key: Tensor, value: Tensor, job: Job, box: Mailbox, dtype):
        super().__init__(job, box, Pair(key, value, dtype))
        self._key, self._value, self._job = key, value, job
        total, own = Pair(key, value, wide_dtype(key.dtype)), self.geometry.key_length(self.rank)
        self._sum = total.views(total.buffer(own), own)
        self._is_empty = True
        self._shares: list[KeyShare] = []
        self._arrived: KeyShare | None = None
        self._must_wait = False
        self._open(1)

    def add(self, shares: list[KeyShare]) -> None:
        """Add the shares that arrived for this rank's keys, and keep this hop's shares."""
        self._collect()
        self._shares = shares

    def pass_on(self) -> None:
        """Start sending this hop's shares to the keys' owner, while another rank's arrive."""
        hop, shares, self._shares = self.hop, self._shares, []
        self.hop = hop + 1
        if hop == 0:
            self._add(shares)
            return
        owner, reader = self.before(hop), self.after(hop)
        going = [owner] if self._tiles(self.rank, owner) else []
        coming = [reader] if self._tiles(reader, self.rank) else []
        if going or coming:
            targets, sources = [], []
            if going:
                (_, length), sent = self._in_one(shares, owner)
                targets = self.room(owner, hop, length, as_rows=True)
                sources = rows_for(sent)
            self.box.push(targets, sources, going, coming)
            self._must_wait = True
        if coming:
            start, length = self._window(reader, self.rank)
            self._arrived = KeyShare(*self.room(self.rank, hop, length), start, None)
        self._open(hop + 1)

    def finish(self) -> tuple[Tensor, Tensor]:
        """dK and dV of this rank's own keys, in their dtype, token-major."""
        self._collect()
        self.box.release()
        dtype = self._job.key_grad_dtype or self._key.dtype
        return tuple(
            token_major(*like.shape, like=like, dtype=dtype).copy_(total)
            for like, total in zip((self._key, self._value), self._sum, strict=True)
        )

    def _open(self, hop: int) -> None:
        """Let the rank that sends at a hop write its share; the previous share in that place has
        already been added."""
        if hop < self.world_size and self._tiles(self.after(hop), self.rank):
            self.box.open([self.after(hop)])

    def _collect(self) -> None:
        if self._must_wait:
            self.box.wait()
            self._must_wait = False
        if self._arrived is not None:
            self._add([self._arrived])
            self._arrived = None

    def _add(self, shares: list[KeyShare]) -> None:
        if self._is_empty:
            self._is_empty = False
            if len(shares) == 1 and shares[0].dk.shape == self._sum[0].shape:
                for total, part in zip(self._sum, shares[0][:2], strict=True):
                    total.copy_(part)
                return
            for total in self._sum:
                total.zero_()
        for share in shares:
            for total, part in zip(self._sum, (share.dk, share.dv), strict=True):
                window_of(total, share.start, part, share.row).add_(part)

    def _tiles(self, rank: int, owner: int):
        """The tiles whose summed gradients ``rank`` sends to ``owner``."""
        key, value = self._key, self._value
        # The same on all ranks: a rank may own no key and still have gradients of others' keys.
        if 0 in (*key.shape[:2], key.size(3), value.size(3)):
            return ()
        rows = key.size(0)
        return self.geometry.tiles_of(rank, owner, self._job.batch_start, rows)

    def _window(self, rank: int, owner: int) -> tuple[int, int]:
        """The first key and the number of keys of the window that ``rank`` sends."""
        tiles = self._tiles(rank, owner)
        if len(tiles) == 1 and tiles[0].row is None:
            return tiles[0].key_start, tiles[0].key_length
        return 0, self.geometry.key_length(owner)

    def _in_one(self, shares: list[KeyShare], owner: int):
        """A hop's shares in one piece: the window, and dK and dV, either as they are or as the sum
        of several shares."""
        start, length = window = self._window(self.rank, owner)
        if len(shares) == 1:
            dk, dv, _, row = shares[0]
            if row is None and dk.size(2) == length and dk.dtype is self._pair.dtype:
                return window, (dk, dv)
        whole = self._pair.views(self._pair.buffer(length), length)
        rows = {share.row for share in shares}
        for row in range(whole[0].size(0)) if rows != {None} else (None,):
            into = whole if row is None else [x[row : row + 1] for x in whole]
            own = [share for share in shares if share.row == row]
            places = tuple((share.start - start, share.dk.size(2), 0) for share in own)
            add_up(into, ([x.dk for x in own], [x.dv for x in own]), places)
        return window, whole
