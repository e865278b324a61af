"""Keys and values of all ranks in one buffer: few large kernels, for when the buffer is affordable.

Every rank gathers all keys, so that it needs no hops: one kernel computes what is at home while the
gather flies, and then each part of the rows has one kernel more. For head-tail order, where rank r
owns pieces r ("lo") and 2W - 1 - r ("hi"), the pieces are gathered as ::

    [hi of rank 0, 1, ..., W - 1 | lo of rank 0, 1, ..., W - 1]

so that what the hi rows see, hi of rank r + 1 to the end, is one range, and what the lo rows see,
lo of ranks 0 to r - 1, is another: three kernels for any W, and one merge of each row. (Attention
does not mind the order of the keys.)

In natural order the queries alone are exchanged with the mirror rank
(:mod:`cp_dispatch.schedules.mirror`); the keys are gathered in natural order, of which every row
sees a prefix.

In the backward dK and dV of all keys are summed over the ranks by a reduce-scatter, in float32 for
16-bit inputs, while what is at home is computed.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

from torch import Tensor

from cp_dispatch.layouts import Geometry, Span, Tile, chunk_spans, laid_out
from cp_dispatch.layouts.tiles import cut, tiles
from cp_dispatch.schedules.accumulate import OutputAccumulator, QueryGradient
from cp_dispatch.schedules.blocks import backward_block, forward_block
from cp_dispatch.schedules.gathered import GatheredKeys, KeyGradient
from cp_dispatch.schedules.gradients import mask_gradient
from cp_dispatch.schedules.job import Job
from cp_dispatch.schedules.mirror import pair_spans, to_natural, to_pairs
from cp_dispatch.schedules.ranges import part


def fits(geometry) -> bool:
    """Whether the keys of every rank are as many, and one piece of consecutive positions or two of
    one length; where nothing is masked by position any keys are one piece."""
    if not isinstance(geometry, Geometry):
        return False
    lengths = {geometry.key_length(rank) for rank in range(geometry.world_size)}
    return len(lengths) == 1 and min(lengths) > 0 and _pieces(geometry) <= 2


def _pieces(geometry: Geometry) -> int:
    if not geometry.causal:
        return 1
    size = math.gcd(*(span.length for own in geometry.key_spans for span in own))
    return geometry.key_length(0) // size


class _Gather:
    """``mirrored``: queries in natural order are exchanged with the mirror rank."""

    def __init__(self, mirrored: bool):
        self.mirrored = mirrored

    def geometry(
        self, query_length: int, key_length: int, ring_shape: tuple[int, ...], causal: bool, layout
    ) -> Geometry:
        if not self.mirrored:
            return laid_out(query_length, key_length, ring_shape, causal, layout)
        queries = pair_spans(int(query_length), math.prod(ring_shape))
        return Geometry(queries, chunk_spans(key_length, ring_shape), causal)

    def forward(self, job: Job, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """As :func:`cp_dispatch.schedules.ring.forward`."""
        plan = plan_of(job.geometry, job.rank)
        if self.mirrored:
            (query,) = to_pairs(job.ring, query)
        keys = GatheredKeys(key, value, plan.pieces, job.ring)
        own, rest = plan.own, plan.rest
        if query.numel() == 0:
            own, rest = (), ()
        dtype = job.backend.output_dtype(query.dtype)
        lse_dtype = job.backend.logsumexp_dtype(query.dtype)
        halves = _are_halves(own, query, key) and job.dropout is None
        done = (Tile(0, query.size(2), 0, query.size(2), True, (), ()),) if halves else own
        result = OutputAccumulator(query, value.size(-1), done + rest, dtype, lse_dtype)
        with keys.coming(), part("gather[home]"):
            if halves:
                _forward_halves(job, query, key, value, result, *done)
            else:
                forward_block(job, query, key, value, own, result)
        with part("gather[gathered]"):
            forward_block(job, query, *keys.wait(), rest, result)
        output, logsumexp = result.finish()
        if not self.mirrored:
            return output, logsumexp
        output, logsumexp = to_natural(job.ring, output, logsumexp.unsqueeze(-1))
        return output, logsumexp.squeeze(-1).contiguous()

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
        plan = plan_of(job.geometry, job.rank)
        if self.mirrored:
            grad_output, query, output, logsumexp = to_pairs(
                job.ring, grad_output, query, output, logsumexp.unsqueeze(-1)
            )
            logsumexp = logsumexp.squeeze(-1).contiguous()
        keys = GatheredKeys(key, value, plan.pieces, job.ring)
        own, rest = plan.own, plan.rest
        if query.numel() == 0:
            own, rest = (), ()
        query_grad = QueryGradient(query, own + rest)
        grad_mask = mask_gradient(job.mask, query.dtype) if mask_grad else None

        def block(block_key, block_value, block_tiles):
            return backward_block(
                job, grad_output, query, block_key, block_value, output, logsumexp, block_tiles,
                query_grad, grad_mask,
            )  # fmt: skip

        # Half of what is at home hides the gather, the other half the sum of dK and dV.
        first, second = own[: len(own) // 2], own[len(own) // 2 :]
        with keys.coming(), part("gather_backward[home]"):
            shares = block(key, value, first)
        sums = KeyGradient(key, value, plan.pieces, job.ring) if key_grad else None
        with part("gather_backward[gathered]"):
            gathered = keys.wait()
            for tile in rest:
                for share in block(*gathered, (tile,)):
                    if sums is not None:
                        sums.add(share)
        del gathered, keys
        if sums is not None:
            sums.start()
        with part("gather_backward[home]"):
            shares += block(key, value, second)
        dk, dv = sums.finish(shares) if sums is not None else (None, None)
        dq = query_grad.finish()
        if self.mirrored:
            (dq,) = to_natural(job.ring, dq)
        return dq, dk, dv, grad_mask


class Plan(NamedTuple):
    """What a rank computes: with its own keys, and with all of them as gathered; and in how many
    pieces, last one first, each rank's keys are gathered."""

    own: tuple[Tile, ...]
    rest: tuple[Tile, ...]
    pieces: int


@functools.lru_cache(maxsize=256)
def plan_of(geometry: Geometry, rank: int) -> Plan:
    """The tiles of a rank, those that its own keys suffice for apart."""
    world_size = geometry.world_size
    length = geometry.key_length(0)
    queries = geometry.query_spans[rank]
    if not geometry.causal:
        spans = sum(geometry.key_spans, ())
        (whole,) = tiles(queries, spans, False, 0) or (None,)
        if whole is None:
            return Plan((), (), 1)
        own = _of_keys(whole, spans, rank * length, length)
        before = _of_keys(whole, spans, 0, rank * length)
        after = _of_keys(whole, spans, (rank + 1) * length, (world_size - 1 - rank) * length)
        return Plan(
            (own._replace(key_start=0),),
            tuple(tile for tile in (before, after) if tile.key_length),
            1,
        )
    pieces = _pieces(geometry)
    size = length // pieces
    spans = [
        part
        for piece in reversed(range(pieces))
        for keys in geometry.key_spans
        for part in cut(keys, piece * size, size)
    ]
    own, rest = [], []
    for tile in tiles(queries, _joined(spans), True, 0):
        for piece in range(pieces):
            begin = ((pieces - 1 - piece) * world_size + rank) * size
            if begin <= tile.key_start and tile.key_start + tile.key_length <= begin + size:
                own.append(tile._replace(key_start=tile.key_start - begin + piece * size))
                break
        else:
            rest.append(tile)
    return Plan(tuple(own), tuple(rest), pieces)


def _of_keys(tile: Tile, spans: tuple[Span, ...], start: int, length: int) -> Tile:
    """A tile of all keys cut to a range of them."""
    return tile._replace(
        key_start=start, key_length=length, key_place=start, key_spans=cut(spans, start, length)
    )


def _joined(spans: list[Span]) -> tuple[Span, ...]:
    """The same positions in the same order, in as few spans as there can be."""
    joined: list[Span] = []
    for span in spans:
        if joined and sum(joined[-1]) == span.position:
            joined[-1] = Span(joined[-1].position, joined[-1].length + span.length)
        else:
            joined.append(span)
    return tuple(joined)


def _are_halves(own: tuple[Tile, ...], query: Tensor, key: Tensor) -> bool:
    """Whether the tiles at home are each half of the rows with themselves, so that the halves can
    be two rows of a batch."""
    half = query.size(2) // 2
    return [tile[:5] for tile in own] == [
        (start, half, start, half, True) for start in (0, half)
    ] and all(x.transpose(1, 2).is_contiguous() for x in (query, key))


def _forward_halves(job: Job, query, key, value, result: OutputAccumulator, tile: Tile) -> None:
    """The causal tiles of both halves as one kernel call."""
    batch, _, length, _ = query.shape

    def halves(x: Tensor) -> Tensor:
        return x.transpose(1, 2).unflatten(1, (2, length // 2)).flatten(0, 1).transpose(1, 2)

    out, lse = job.backend.forward(*map(halves, (query, key, value)), None, True, job.scale)
    out = out.transpose(1, 2).unflatten(0, (batch, 2)).flatten(1, 2).transpose(1, 2)
    lse = lse.unflatten(0, (batch, 2)).transpose(1, 2).flatten(2, 3)
    result.add(out, lse, tile)


Gather = _Gather(mirrored=False)
MirroredGather = _Gather(mirrored=True)
