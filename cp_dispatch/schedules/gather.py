"""The gather schedule: keys and values of all ranks in one buffer, and few large kernels.

Every rank gathers all keys, as in Llama 3 (arXiv:2407.21783, section 3.3.2), if there is memory for
them. It needs no hops: one kernel computes the rank's own keys during the gather, and then there is
one more kernel for each part of the rows. In head-tail order, where rank r owns pieces r ("lo") and
2W - 1 - r ("hi"), that makes three kernels for any W, and one merge per row. (Attention does not
depend on the order of the keys.)

- If ranks can write to each other's memory (:mod:`mailbox`), a rank takes the pieces of the others
  in the order of their positions. Then the keys that the lo rows see, lo of ranks 0 to r - 1, come
  first, and the hi rows see these and all that follow, up to hi of rank r + 1.
- An all-gather has the same order on all ranks ::

      [hi of rank 0, 1, ..., W - 1 | lo of rank 0, 1, ..., W - 1]

  Then the keys that the hi rows see, from hi of rank r + 1 to the end, are one range (with the
  rank's own lo in it), and those that the lo rows see, lo of ranks 0 to r - 1, are another. Calls
  with a mask use this order too.

Causal calls in natural order use :mod:`cp_dispatch.schedules.mirrored_gather`.

The backward computes with a part of its own keys during the gather (:mod:`home`), and with the
others while its shares of dK and dV go to the keys' owners (:mod:`key_shares`).
"""

from __future__ import annotations

import functools

from torch import Tensor

from cp_dispatch.layouts import Geometry, Tile, laid_out
from cp_dispatch.schedules.accumulate import OutputAccumulator
from cp_dispatch.schedules.blocks import Rows, backward_block, forward_block
from cp_dispatch.schedules.gather_plan import APART, TOGETHER, Order, Parcels, plan_of
from cp_dispatch.schedules.gathered import ROOM, gathered_keys, is_pushed, room_bytes
from cp_dispatch.schedules.gradients import mask_gradient
from cp_dispatch.schedules.home import Gradients, divided
from cp_dispatch.schedules.job import Job
from cp_dispatch.schedules.key_shares import KeyShares
from cp_dispatch.schedules.ranges import part


class _Gather:
    geometry = staticmethod(laid_out)

    def forward(self, job: Job, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """As :func:`cp_dispatch.schedules.ring.forward`."""
        geometry, rank = job.geometry, job.rank
        order, owners = _order(job, key, value)
        keys = gathered_keys(key, value, geometry, job.ring, order.slots, owners)
        own, rest, _ = order.plan(geometry, rank)
        if order is TOGETHER:
            own = _at_home(geometry, rank)
        if query.numel() == 0:
            own, rest = (), ()
        dtype = job.backend.output_dtype(query.dtype)
        lse_dtype = job.backend.logsumexp_dtype(query.dtype)
        halves = job.dropout is None and _are_halves(own, query, key, value)
        done = (Tile(0, query.size(2), 0, query.size(2), True),) if halves else own
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
        order, owners = _order(job, key, value)
        own, rest, _ = order.plan(job.geometry, job.rank)
        sums = None
        if key_grad:
            sums = shares_of_keys(job, query, key, value, order.parcels, owners)
        rows = Rows(grad_output, query, output, logsumexp)
        keys = gathered_keys(key, value, job.geometry, job.ring, order.slots, owners)
        if query.numel() == 0:
            own, rest = (), ()
        grad_mask = mask_gradient(job.mask, query.dtype) if mask_grad else None
        # One part of the work with the rank's own keys overlaps with the gather, the other with the
        # transfer of dK and dV.
        home = divided(job, own, query, key)
        grads = Gradients(query, home)
        with keys.coming(), part("gather_backward[home]"):
            for work in home[:1]:
                grads.compute(work, rows, key, value, grad_mask)
        with part("gather_backward[gathered]"):
            shares = backward_block(job, rows, *keys.wait(), rest, grads, grad_mask)
            keys.release()
        del keys
        if sums is not None:
            sums.start(shares)
        del shares
        with part("gather_backward[home]"):
            for work in home[1:]:
                grads.compute(work, rows, key, value, grad_mask)
        dq = grads.finish()
        dk, dv = sums.finish(grads.of_keys) if sums is not None else (None, None)
        return dq, dk, dv, grad_mask


def _order(job: Job, key: Tensor, value: Tensor) -> tuple[Order, int]:
    """The order in which keys are gathered, and of how many ranks."""
    # The mask columns of a tile can be a slice over the keys of consecutive ranks, so with a mask
    # no rank's keys are left out.
    others = job.geometry.world_size - 1
    if job.mask is None and is_pushed(key, value, job.ring, others):
        return APART, others
    return TOGETHER, job.geometry.world_size


def shares_of_keys(
    job: Job, query: Tensor, key: Tensor, value: Tensor, parcels: Parcels, owners: int
) -> KeyShares:
    """The sums of shares of dK and dV of the gathered keys of ``owners`` ranks; the shares arrive
    in the keys' room."""
    dtype = job.backend.gradient_dtype(key.dtype)
    nothing = 0 in query.shape[:2]  # a rank without rows still takes part
    # Request the room before it holds keys, because it may have to grow. It must not grow for keys
    # once it holds shares either, which could happen if the forward's room was freed.
    job.ring.mailbox(ROOM, room_bytes(key, value, owners))
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
