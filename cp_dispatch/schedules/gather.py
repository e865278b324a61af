"""Keys and values of all ranks in one buffer: few large kernels, for when the buffer is affordable.

Every rank gathers all keys, as in Llama 3 (arXiv:2407.21783, section 3.3.2), so that it needs no
hops: one kernel computes what is at home while the gather flies, and then each part of the rows has
one kernel more. For head-tail order, where rank r owns pieces r ("lo") and 2W - 1 - r ("hi"), the
pieces are gathered as ::

    [hi of rank 0, 1, ..., W - 1 | lo of rank 0, 1, ..., W - 1]

so that what the hi rows see, hi of rank r + 1 to the end, is one range, and what the lo rows see,
lo of ranks 0 to r - 1, is another: three kernels for any W, and one merge of each row. (Attention
does not mind the order of the keys.)

In natural order halves of the queries alone are swapped with the mirror rank
(:mod:`cp_dispatch.schedules.half_swap`); the keys are gathered in natural order, of which every row
sees a prefix.

In the backward every rank sends its shares of dK and dV to the keys' owners while it computes what
is at home, or in natural order the mirror's tile under the diagonal
(:mod:`cp_dispatch.schedules.key_shares`).
"""

from __future__ import annotations

import functools

from torch import Tensor

from cp_dispatch.layouts import Geometry, Tile, laid_out
from cp_dispatch.layouts.tiles import cut
from cp_dispatch.merge import token_major
from cp_dispatch.schedules.accumulate import OutputAccumulator, QueryGradient
from cp_dispatch.schedules.blocks import backward_block, forward_block
from cp_dispatch.schedules.gather_plan import plan_of
from cp_dispatch.schedules.gathered import ROOM, gathered_keys, room_bytes
from cp_dispatch.schedules.gradients import mask_gradient
from cp_dispatch.schedules.half_swap import HalfSwap, swapped
from cp_dispatch.schedules.job import Job
from cp_dispatch.schedules.key_shares import KeyShares
from cp_dispatch.schedules.ranges import part


class _Gather:
    """``mirrored``: halves of queries in natural order are swapped with the mirror rank."""

    def __init__(self, mirrored: bool):
        self.mirrored = mirrored

    def geometry(
        self, query_length: int, key_length: int, ring_shape: tuple[int, ...], causal: bool, layout
    ) -> Geometry:
        if not self.mirrored:
            return laid_out(query_length, key_length, ring_shape, causal, layout)
        return swapped(int(query_length), int(key_length), tuple(ring_shape), causal)

    def forward(self, job: Job, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """As :func:`cp_dispatch.schedules.ring.forward`."""
        plan, rows, swap = plan_of(job.geometry, job.rank), query, None
        if self.mirrored:
            swap = HalfSwap(job.ring, (query,))
            (rows,) = swap.rows
        keys = gathered_keys(key, value, job.geometry, job.ring)
        own, rest = _at_home(job.geometry, job.rank), plan.rest
        if query.numel() == 0:
            own, rest = (), ()
        dtype = job.backend.output_dtype(query.dtype)
        lse_dtype = job.backend.logsumexp_dtype(query.dtype)
        halves = swap is None and job.dropout is None and _are_halves(own, query, key, value)
        done = (Tile(0, query.size(2), 0, query.size(2), True, (), ()),) if halves else own
        result = OutputAccumulator(query, value.size(-1), done + rest, dtype, lse_dtype)
        with keys.coming(), part("gather[home]"):
            if halves:
                _forward_halves(job, query, key, value, result, *done)
            else:
                forward_block(job, rows, key, value, own, result)
        with part("gather[gathered]"):
            forward_block(job, rows, *keys.wait(), rest, result)
            keys.release()
        output, logsumexp = result.finish()
        if swap is not None:
            swap.release()
            HalfSwap(job.ring, (output, logsumexp), at_once=True).replace()
        return output, logsumexp

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
        plan, swap = plan_of(job.geometry, job.rank), None
        sums = None
        if key_grad:
            dtype = job.backend.gradient_dtype(key.dtype)
            nothing = 0 in query.shape[:2]  # a rank without rows takes part all the same
            # Before keys are in that room, for it may have to become larger. Nor may it do so for
            # keys once shares have it, as where the forward's room was freed.
            job.ring.mailbox(ROOM, room_bytes(key, value, job.ring.world_size))
            sums = KeyShares(
                key, value, job.geometry, job.ring, dtype, nothing=nothing, room=ROOM
            )  # fmt: skip
        rows = grad_output, query, output, logsumexp
        if self.mirrored:
            swap = HalfSwap(job.ring, rows)
            rows = swap.rows
        keys = gathered_keys(key, value, job.geometry, job.ring)
        own, rest = plan.own, plan.rest
        if query.numel() == 0:
            own, rest = (), ()
        own = _halved(own)
        query_grad = QueryGradient(query, own + rest)
        grad_mask = mask_gradient(job.mask, query.dtype) if mask_grad else None

        def block(block_key, block_value, tiles):
            go, q, out, lse = rows
            return backward_block(
                job, go, q, block_key, block_value, out, lse, tiles, query_grad, grad_mask
            )

        # Half of what is at home hides the gather, the other half the way of dK and dV.
        half = (len(own) + self.mirrored) // 2
        first, second = own[:half], own[half:]
        # The tile under the mirror's diagonal hides the way of all other shares, with keys of its
        # own: what comes takes the room of the gathered ones.
        diagonal = tuple(tile for tile in rest if tile.causal) if sums is not None else ()
        with keys.coming(), part("gather_backward[home]"):
            shares = block(key, value, first)
        with part("gather_backward[gathered]"):
            gathered = keys.wait()
            of_others = block(*gathered, rest[: len(rest) - len(diagonal)])
            kept = [_own_keys(gathered, tile) for tile in diagonal]
            keys.release()
        del keys, gathered
        if sums is not None:
            sums.start(of_others, last=not diagonal)
        del of_others
        for index, (tile, pair) in enumerate(zip(diagonal, kept, strict=True), 1):
            with part("gather_backward[diagonal]"):
                of_mirror = block(*pair, (tile._replace(key_start=0),))
            sums.start(of_mirror, last=index == len(diagonal))
        with part("gather_backward[home]"):
            shares += block(key, value, second)
        dk, dv = sums.finish(shares) if sums is not None else (None, None)
        dq = query_grad.finish()
        if swap is not None:
            swap.release()
            HalfSwap(job.ring, (dq,), at_once=True).replace()
        return dq, dk, dv, grad_mask


def _own_keys(pair: tuple[Tensor, Tensor], tile: Tile) -> tuple[Tensor, Tensor]:
    """Copies of the keys and values that a tile sees, token-major."""
    windows = [x.narrow(2, tile.key_start, tile.key_length) for x in pair]
    return tuple(token_major(*x.shape, like=x).copy_(x) for x in windows)


@functools.lru_cache(maxsize=256)
def _at_home(geometry: Geometry, rank: int) -> tuple[Tile, ...]:
    """The tiles at home, as one where a rank's pieces follow each other and one covers the same."""
    own, whole = plan_of(geometry, rank).own, geometry.tiles(rank, rank)
    return whole if len(whole) == 1 and _pairs(whole) == _pairs(own) else own


def _pairs(tiles: tuple[Tile, ...]) -> int:
    """How many queries and keys see each other."""
    return sum(
        tile.query_length * (tile.query_length + 1) // 2
        if tile.causal
        else tile.query_length * tile.key_length
        for tile in tiles
    )


def _halved(own: tuple[Tile, ...]) -> tuple[Tile, ...]:
    """A single tile without a diagonal as two, one for each half of its rows."""
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
    """Whether the tiles at home are each half of the rows with themselves, so that the halves can
    be two rows of a batch."""
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
        # One call: views one after the other cost the host as much as a kernel.
        return x.as_strided((2 * batch, x.size(1), half, dim), (half * row, dim, row, 1))

    out, lse = job.backend.forward(*map(halves, (query, key, value)), None, True, job.scale)
    if not out.transpose(1, 2).is_contiguous():
        out = out.transpose(1, 2).contiguous().transpose(1, 2)
    row, dim = heads * out.size(3), out.size(3)
    out = out.as_strided((batch, heads, length, dim), (length * row, dim, row, 1))
    lse = lse.unflatten(0, (batch, 2)).transpose(1, 2).flatten(2, 3)
    result.add(out, lse, tile)


Gather = _Gather(mirrored=False)
MirroredGather = _Gather(mirrored=True)
