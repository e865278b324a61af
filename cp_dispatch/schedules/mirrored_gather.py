"""The gather schedule for causal calls in natural order: mirror ranks share the unequal work.

Each rank computes its rows with its own keys, which is equal work on all ranks. Of the keys before
those, rank r has r shards to compute, and its mirror rank W - 1 - r has W - 1 - r shards. So each
of the two takes the first half of its own rows and the second half of its mirror's::

    W = 4                      rank 0   rank 1   rank 2   rank 3
    own keys                   0        1        2        3
    first half of its rows     -        0        0 1      0 1 2
    mirror's second half       0 1 2    0 1      0        -

Queries and keys arrive while a rank computes with its own keys. Then it computes the mirror's rows,
whose partial outputs go back while it computes its own rows; their owner merges them. Rank 0, whose
rows see no keys of other ranks, saves some of its own rows for this time.

The backward computes the same, with the mirror's rows of four tensors. Their dQ goes back like
partial outputs, and the shares of dK and dV go to the keys' owners, while each rank does the second
part of the work with its own keys (:mod:`home`).
"""

from __future__ import annotations

import functools
from typing import NamedTuple

from torch import Tensor

from cp_dispatch.layouts import Geometry, Span, Tile, laid_out
from cp_dispatch.layouts.tiles import tiles
from cp_dispatch.native.merge import token_major
from cp_dispatch.schedules.accumulate import OutputAccumulator, QueryGradient
from cp_dispatch.schedules.blocks import Rows, backward_block, forward_block
from cp_dispatch.schedules.gather import shares_of_keys
from cp_dispatch.schedules.gather_plan import Parcel
from cp_dispatch.schedules.gathered import gathered_keys
from cp_dispatch.schedules.half_swap import Swap
from cp_dispatch.schedules.home import Gradients, divided
from cp_dispatch.schedules.job import Job
from cp_dispatch.schedules.ranges import part


class Shares(NamedTuple):
    """The tiles of a rank."""

    #: Its rows with its own keys; in a forward, those that other ranks wait for, and the others.
    home: tuple[Tile, ...] = ()
    late: tuple[Tile, ...] = ()
    #: With gathered keys: the mirror's rows (counted from their first), and its own rows.
    mirrors: tuple[Tile, ...] = ()
    own: tuple[Tile, ...] = ()
    #: This rank's rows that the mirror computes.
    given: tuple[Tile, ...] = ()

    @property
    def of_rows(self) -> tuple[Tile, ...]:
        """All of this rank's rows."""
        return self.home + self.late + self.own + self.given


@functools.lru_cache(maxsize=1024)
def shares_of(geometry: Geometry, rank: int, backward: bool) -> Shares:
    """Who computes what; ``geometry`` has rows and keys in natural order."""
    mirror = geometry.world_size - 1 - rank
    (whole,) = geometry.key_spans[rank]
    half = whole.length // 2
    first, second = Span(whole.position, half), Span(whole.position + half, half)

    def with_keys_before(owner: int, start: int, *rows: Span) -> tuple[Tile, ...]:
        keys = (Span(0, owner * whole.length),) if owner else ()
        return _moved(tiles(rows, keys, True, 0), start)

    def at_home(start: int, rows: Span) -> tuple[Tile, ...]:
        return _moved(tiles((rows,), (whole,), True, whole.position), start)

    home, late = at_home(0, whole), ()
    if rank == 0 and not backward:
        # With fewer late rows, the partial results of the others take more memory.
        home, late = at_home(half, second), at_home(0, first)
    if mirror == rank:
        return Shares(home, late, own=with_keys_before(rank, 0, whole))
    theirs = Span(mirror * whole.length + half, half)
    return Shares(
        home,
        late,
        with_keys_before(mirror, 0, theirs),
        with_keys_before(rank, 0, first),
        with_keys_before(rank, half, second),
    )


def _moved(found: tuple[Tile, ...], start: int) -> tuple[Tile, ...]:
    return tuple(tile._replace(query_start=tile.query_start + start) for tile in found)


def slots_before(geometry: Geometry, rank: int, owner: int) -> tuple[tuple[int, int], ...]:
    """As :func:`cp_dispatch.schedules.gather_plan.slots_of`: ``owner``'s keys count if they are
    before any rows that ``rank`` computes."""
    return ((0, owner),) if owner < max(rank, geometry.world_size - 1 - rank) else ()


@functools.lru_cache(maxsize=4096)
def parcels_before(geometry: Geometry, rank: int, owner: int) -> tuple[Parcel, ...]:
    """As :func:`cp_dispatch.schedules.gather_plan.parcels_of`."""
    shares, length = shares_of(geometry, rank, True), geometry.key_length(owner)
    return tuple(
        Parcel(index, owner * length, length, 0)
        for index, tile in enumerate(shares.mirrors + shares.own)
        if owner * length < tile.key_length
    )


class _MirroredGather:
    geometry = staticmethod(laid_out)

    def blocks(self, plan, rank: int) -> tuple[int, int]:
        """The number of shards of keys that ``rank`` computes with, and of all shards."""
        size = plan.world_size
        before = (slots_before(plan.geometry, rank, owner) for owner in range(size))
        return sum(map(bool, before)) + (2 * rank >= size - 1), size

    def forward(self, job: Job, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """As :func:`cp_dispatch.schedules.ring.forward`."""
        mine = _Mine(job, query, False)
        swap = mine.swap(query)
        keys = gathered_keys(key, value, job.geometry, job.ring, slots_before, mine.owners)
        dtype = job.backend.output_dtype(query.dtype)
        lse_dtype = job.backend.logsumexp_dtype(query.dtype)
        shares, value_dim = mine.shares, value.size(-1)
        result = OutputAccumulator(query, value_dim, shares.of_rows, dtype, lse_dtype)
        with keys.coming(), part("gather[home]"):
            forward_block(job, query, key, value, shares.home, result)
        with part("gather[mirror]"):
            gathered = keys.wait()
            if shares.mirrors:
                (rows,) = swap.wait()
                of_mirror = OutputAccumulator(rows, value_dim, shares.mirrors, dtype, lse_dtype)
                forward_block(job, rows, *gathered, shares.mirrors, of_mirror)
                partial = of_mirror.finish()
                del rows, of_mirror
            else:
                partial = mine.nothing(value_dim, dtype, lse_dtype)
            swap.release()
            back = mine.swap_back(*partial)
            del partial
        with part("gather[gathered]"):
            forward_block(job, query, *gathered, shares.own, result)
            keys.release()
            del gathered
        with part("gather[home]"):
            forward_block(job, query, key, value, shares.late, result)
        for tile in shares.given:
            result.add(*back.wait(), tile)
        back.release()
        return result.finish()

    def backward(
        self,
        job: Job,
        grad_output: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        output: Tensor,
        logsumexp: Tensor,
        key_grad: bool,
        mask_grad: bool,
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        """As :func:`cp_dispatch.schedules.ring.backward`; there is no mask."""
        mine, sums = _Mine(job, query, True), None
        if key_grad:
            sums = shares_of_keys(job, query, key, value, parcels_before, mine.owners)
        tensors = grad_output, query, output, logsumexp
        rows, swap = Rows(*tensors), mine.swap(*tensors)
        keys = gathered_keys(key, value, job.geometry, job.ring, slots_before, mine.owners)
        shares, dtype = mine.shares, job.backend.gradient_dtype(query.dtype)
        home = divided(job, shares.home, query, key)
        grads = Gradients(query, home)

        def block(rows, keys, tiles, into):
            return backward_block(job, rows, *keys, tiles, into, None)

        with keys.coming(), part("gather_backward[home]"):
            for work in home[:1]:
                grads.compute(work, rows, key, value, None)
        with part("gather_backward[mirror]"):
            gathered, of_others = keys.wait(), []
            if shares.mirrors:
                theirs = swap.wait()
                of_mirror = QueryGradient(theirs[1], shares.mirrors, dtype)
                of_others += block(Rows(*theirs), gathered, shares.mirrors, of_mirror)
                partial = (of_mirror.finish(),)
                del theirs, of_mirror
            else:
                partial = mine.nothing(query.size(3), dtype)
            swap.release()
            back = mine.swap_back(*partial)
            del partial
        with part("gather_backward[gathered]"):
            of_others += block(rows, gathered, shares.own, grads)
            keys.release()
            del gathered
        if sums is not None:
            sums.start(of_others)
        del of_others
        with part("gather_backward[home]"):
            for work in home[1:]:
                grads.compute(work, rows, key, value, None)
        for tile in shares.given:
            grads.add(*back.wait(), tile)
        dq = grads.finish()
        back.release()
        dk, dv = sums.finish(grads.of_keys) if sums is not None else (None, None)
        return dq, dk, dv, None


class _Mine:
    """A rank's exchange with its mirror, and its tiles; empty if it has no rows."""

    def __init__(self, job: Job, query: Tensor, backward: bool):
        shares = shares_of(job.geometry, job.rank, backward)
        self._ring, self._gives, self._takes = job.ring, bool(shares.given), bool(shares.mirrors)
        self._query, self._half = query, query.size(2) // 2
        self.shares = shares if query.numel() else Shares()
        #: The number of ranks whose keys other ranks see; no rows come after the last rank's keys.
        self.owners = job.geometry.world_size - 1

    def swap(self, *tensors: Tensor) -> Swap:
        """Exchange the second halves of tensors with this rank's rows for the mirror's."""
        return Swap(self._ring, tensors, self._half, self._half, self._gives, self._takes)

    def swap_back(self, *tensors: Tensor) -> Swap:
        """Exchange results of the mirror's rows for its results of this rank's rows."""
        return Swap(self._ring, tensors, 0, self._half, self._takes, self._gives)

    def nothing(self, dim: int, dtype, lse_dtype=None) -> tuple[Tensor, ...]:
        """Empty results in place of those of the mirror's rows, to give their sizes."""
        query, shape = self._query, (*self._query.shape[:2], self._half)
        out = token_major(*shape, dim, like=query, dtype=dtype)
        return (out,) if lse_dtype is None else (out, query.new_empty(shape, dtype=lse_dtype))


MirroredGather = _MirroredGather()
