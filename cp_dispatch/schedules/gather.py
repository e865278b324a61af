"""The gather schedule: keys and values of all ranks in one buffer, and few large kernels.

Every rank gathers all keys, as in Llama 3 (arXiv:2407.21783, section 3.3.2), if there is memory for
them. It needs no hops: one kernel computes the rank's own keys during the gather, and then there is
one more kernel for each part of the rows. In head-tail order, where rank r owns pieces r ("lo") and
2W - 1 - r ("hi"), that makes three kernels for any W, and one merge per row. (Attention does not
depend on the order of the keys.)

- If ranks can write to each other's memory (:mod:`mailbox`), a forward takes the pieces of the
  others in the order of their positions. Then the keys that the lo rows see, lo of ranks 0 to
  r - 1, come first, and the hi rows see these and all that follow, up to hi of rank r + 1.
- An all-gather has the same order on all ranks ::

      [hi of rank 0, 1, ..., W - 1 | lo of rank 0, 1, ..., W - 1]

  Then the keys that the hi rows see, from hi of rank r + 1 to the end, are one range (with the
  rank's own lo in it), and those that the lo rows see, lo of ranks 0 to r - 1, are another. Calls
  with a mask use this order too, and so does the backward, which needs some of its own keys to be
  left while the shares of dK and dV travel.

Causal calls in natural order use :mod:`cp_dispatch.schedules.mirrored_gather`.

In the backward every rank sends its shares of dK and dV to the keys' owners while it computes with
its own keys (:mod:`cp_dispatch.schedules.key_shares`).
"""

from __future__ import annotations

import functools

from torch import Tensor

from cp_dispatch.layouts import Geometry, Tile, laid_out
from cp_dispatch.layouts.tiles import cut
from cp_dispatch.schedules.accumulate import OutputAccumulator, QueryGradient
from cp_dispatch.schedules.blocks import Rows, backward_block, forward_block
from cp_dispatch.schedules.gather_plan import (
    parcels_of,
    plan_apart,
    plan_of,
    slots_apart,
    slots_of,
)
from cp_dispatch.schedules.gathered import ROOM, PushedKeys, gathered_keys, room_bytes
from cp_dispatch.schedules.gradients import mask_gradient
from cp_dispatch.schedules.job import Job
from cp_dispatch.schedules.key_shares import KeyShares
from cp_dispatch.schedules.ranges import part


class _Gather:
    geometry = staticmethod(laid_out)

    def forward(self, job: Job, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """As :func:`cp_dispatch.schedules.ring.forward`."""
        geometry, rank = job.geometry, job.rank
        # The mask columns of a tile can be a slice over the keys of consecutive ranks, so no rank's
        # keys are left out.
        apart = job.mask is None
        slots, owners = (slots_apart, geometry.world_size - 1) if apart else (slots_of, None)
        keys = gathered_keys(key, value, geometry, job.ring, slots, owners)
        if apart and isinstance(keys, PushedKeys):
            own, rest, _ = plan_apart(geometry, rank)
        else:
            own, rest = _at_home(geometry, rank), plan_of(geometry, rank).rest
        if query.numel() == 0:
            own, rest = (), ()
        dtype = job.backend.output_dtype(query.dtype)
        lse_dtype = job.backend.logsumexp_dtype(query.dtype)
        halves = job.dropout is None and _are_halves(own, query, key, value)
        done = (Tile(0, query.size(2), 0, query.size(2), True, (), ()),) if halves else own
        result = OutputAccumulator(query, value.size(-1), done + rest, dtype, lse_dtype)
        with keys.coming(), part("gather[home]"):
            if halves:
                _forward_halves(job, query, key, value, result, *done)
            else:
                forward_block(job, query, key, value, own, result)
        with part("gather[gathered]"):
            forward_block(job, query, *keys.wait(), rest, result)
            keys.release()
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
        """As :func:`cp_dispatch.schedules.ring.backward`."""
        own, rest, _ = plan_of(job.geometry, job.rank)
        sums = shares_of_keys(job, query, key, value) if key_grad else None
        rows = Rows(grad_output, query, output, logsumexp)
        keys = gathered_keys(key, value, job.geometry, job.ring)
        if query.numel() == 0:
            own, rest = (), ()
        own = _halved(own)
        query_grad = QueryGradient(query, own + rest)
        grad_mask = mask_gradient(job.mask, query.dtype) if mask_grad else None

        def block(block_key, block_value, tiles):
            return backward_block(job, rows, block_key, block_value, tiles, query_grad, grad_mask)

        # Half of the work with the rank's own keys overlaps with the gather, the other half with
        # the transfer of dK and dV.
        half = len(own) // 2
        with keys.coming(), part("gather_backward[home]"):
            shares = block(key, value, own[:half])
        with part("gather_backward[gathered]"):
            of_others = block(*keys.wait(), rest)
            keys.release()
        del keys
        if sums is not None:
            sums.start(of_others)
        del of_others
        with part("gather_backward[home]"):
            shares += block(key, value, own[half:])
        dk, dv = sums.finish(shares) if sums is not None else (None, None)
        return query_grad.finish(), dk, dv, grad_mask


def shares_of_keys(
    job: Job, query: Tensor, key: Tensor, value: Tensor, parcels=parcels_of,
    owners: int | None = None,
) -> KeyShares:  # fmt: skip
    """The sums of shares of dK and dV of gathered keys; the shares arrive in the keys' room."""
    dtype = job.backend.gradient_dtype(key.dtype)
    nothing = 0 in query.shape[:2]  # a rank without rows still takes part
    # Request the room before it holds keys, because it may have to grow. It must not grow for keys
    # once it holds shares either, which could happen if the forward's room was freed.
    job.ring.mailbox(ROOM, room_bytes(key, value, owners or job.ring.world_size))
    return KeyShares(key, value, job.geometry, job.ring, dtype, parcels, nothing, ROOM)


@functools.lru_cache(maxsize=256)
def _at_home(geometry: Geometry, rank: int) -> tuple[Tile, ...]:
    """The tiles with own keys, as a single one if the rank's pieces are adjacent and one tile
    covers the same pairs."""
    own, whole = plan_of(geometry, rank).own, geometry.tiles(rank, rank)
    return whole if len(whole) == 1 and _pairs(whole) == _pairs(own) else own


def _pairs(tiles: tuple[Tile, ...]) -> int:
    """The number of (query, key) pairs that attend."""
    return sum(
        tile.query_length * (tile.query_length + 1) // 2
        if tile.causal
        else tile.query_length * tile.key_length
        for tile in tiles
    )


def _halved(own: tuple[Tile, ...]) -> tuple[Tile, ...]:
    """Splits a single tile without a diagonal into two, one for each half of its rows."""
    if len(own) != 1 or own[0].causal or own[0].query_length < 2:
        return own
    (tile,) = own
    half = tile.query_length // 2
    return tuple(
        tile._replace(
            query_start=tile.query_start + start,
            query_length=length,
            query_spans=cut(tile.query_spans, start, length),
        )
        for start, length in ((0, half), (half, tile.query_length - half))
    )


def _are_halves(own: tuple[Tile, ...], *tensors: Tensor) -> bool:
    """Whether the tiles with own keys are each half of the rows with its own keys, so that the two
    halves can be two batch rows of one call."""
    half = tensors[0].size(2) // 2
    return [tile[:5] for tile in own] == [
        (start, half, start, half, True) for start in (0, half)
    ] and all(x.transpose(1, 2).is_contiguous() for x in tensors)


def _forward_halves(job: Job, query, key, value, result: OutputAccumulator, tile: Tile) -> None:
    """The causal tiles of both halves as one kernel call."""
    batch, heads, length, _ = query.shape
    half = length // 2

    def halves(x: Tensor) -> Tensor:
        row, dim = x.size(1) * x.size(3), x.size(3)
        # One call, because separate views cost the host as much as a kernel.
        return x.as_strided((2 * batch, x.size(1), half, dim), (half * row, dim, row, 1))

    out, lse = job.backend.forward(*map(halves, (query, key, value)), None, True, job.scale)
    if not out.transpose(1, 2).is_contiguous():
        out = out.transpose(1, 2).contiguous().transpose(1, 2)
    row, dim = heads * out.size(3), out.size(3)
    out = out.as_strided((batch, heads, length, dim), (length * row, dim, row, 1))
    lse = lse.unflatten(0, (batch, 2)).transpose(1, 2).flatten(2, 3)
    result.add(out, lse, tile)


Gather = _Gather()
