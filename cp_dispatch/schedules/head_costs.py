"""The bytes that ``"ulysses"`` and ``"hybrid"`` send and hold, for plans."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import TYPE_CHECKING, NamedTuple

import torch

from cp_dispatch.backends import BACKENDS, wide_dtype
from cp_dispatch.backends.parts import LONG_PART
from cp_dispatch.layouts import Geometry, RowGeometry, Span
from cp_dispatch.schedules.head_shares import Segment, Share, head_shares, most_stages
from cp_dispatch.schedules.transfer import Transfer
from cp_dispatch.schedules.wire import Part, wire

if TYPE_CHECKING:
    from cp_dispatch.plan import Plan

# The least bytes of query, key and value of a stage, forward and backward. Each stage cost the host
# almost a millisecond (2 H200s, before numbers of messages were cached), which is about the kernel
# time for this many bytes. With more stages the kernels become small, while only the first and the
# last message remain exposed. A backward computes 2.5 times as much, and its kernels take memory
# for a stage's heads: for 96 MiB, two stages took 1% less time and 110 MiB less in a backward,
# while a forward took up to 8% more time.
_LEAST_BYTES = 160 * 2**20, 48 * 2**20
_MOST_STAGES = 4


def one_side(geometry: Geometry | RowGeometry) -> bool:
    """Whether queries and keys have the same owners, so that one message carries both."""
    rows = geometry.rows if isinstance(geometry, RowGeometry) else (geometry,)
    return all(row.query_spans == row.key_spans for row in rows)


def stages(
    geometry: Geometry | RowGeometry, batch: int, shapes: tuple[tuple[int, int], ...],
    dtype: torch.dtype, ranks: int, backward: bool,
) -> int:  # fmt: skip
    """The number of stages. ``shapes`` are heads and head dim of query, key and value."""
    (heads, dim), (key_heads, key_dim), (_, value_dim) = shapes
    length = max(
        max(geometry.query_length(r), geometry.key_length(r)) for r in range(geometry.world_size)
    )
    row = (heads * dim + key_heads * (key_dim + value_dim)) * dtype.itemsize
    keys = sum(map(geometry.key_length, range(geometry.world_size)))
    wanted = _wanted(batch * length * row, batch * heads * length * keys, backward)
    return most_stages(heads, key_heads, ranks, wanted)


def _wanted(size: int, pairs: int, backward: bool) -> int:
    """The number of stages for ``size`` bytes and ``pairs`` (query, key) pairs."""
    found = min(size // _LEAST_BYTES[backward], _MOST_STAGES)
    # For short rows with many heads, this many bytes are little work.
    return min(found, pairs // LONG_PART) if backward else found


def key_grad_dtype(stage: tuple[Share, ...], key_heads: int, dtype: torch.dtype) -> torch.dtype:
    """The dtype in which dK and dV are sent back: wide if several ranks share a key head."""
    return wide_dtype(dtype) if are_shared(stage, key_heads) else dtype


def are_shared(stage: tuple[Share, ...], key_heads: int) -> bool:
    """Whether some key head goes to several ranks."""
    return sum(share.key.length for share in stage) > key_heads


def joins(geometry: Geometry | RowGeometry, stage: tuple[Share, ...], key_heads: int) -> bool:
    """Whether dQ, dK and dV are sent back in one message, because nothing has to be summed."""
    return one_side(geometry) and not are_shared(stage, key_heads)


class Deal(NamedTuple):
    """How a call that exchanges heads runs, derived from its shapes.

    Attributes:
        lengths: of queries (False) and of keys (True), rows of each rank of the group.
        one_side: see :func:`one_side`.
        stages: the shares of all ranks, stage by stage.
        heads: ``[stage][of keys]``: each rank's heads.
        key_grad_dtype: see there.
        joins: see there.
        are_shared: see there.
    """

    lengths: tuple[tuple[int, ...], tuple[int, ...]]
    one_side: bool
    stages: tuple[tuple[Share, ...], ...]
    heads: tuple[tuple[tuple[Span, ...], tuple[Span, ...]], ...]
    key_grad_dtype: torch.dtype
    joins: bool
    are_shared: bool


@functools.lru_cache(maxsize=256)
def deal(
    geometry: Geometry | RowGeometry, first: int, ranks: int, batch: int,
    shapes: tuple[tuple[int, int], ...], dtype: torch.dtype, backward: bool,
) -> Deal:  # fmt: skip
    """The deal of the group of ``ranks`` ranks from ``first`` on; ``shapes`` as for
    :func:`stages`."""
    (heads, _), (key_heads, _), _ = shapes
    members = range(first, first + ranks)
    count = stages(geometry, batch, shapes, dtype, ranks, backward)
    shares = head_shares(heads, key_heads, ranks, count)
    return Deal(
        (tuple(map(geometry.query_length, members)), tuple(map(geometry.key_length, members))),
        one_side(geometry),
        shares,
        tuple((tuple(x.query for x in s), tuple(x.key for x in s)) for s in shares),
        key_grad_dtype(shares[0], key_heads, dtype),
        joins(geometry, shares[0], key_heads),
        are_shared(shares[0], key_heads),
    )


class Messages:
    """The messages of one rank of a plan that exchanges heads, forward or backward."""

    def __init__(self, schedule, plan: Plan, rank: int, backward: bool):
        self.plan, self._schedule, self._backward = plan, schedule, backward
        geometry = plan.geometry
        self._dims = tuple(shape[3] for shape in plan.padded_shards)
        ranks = schedule.ranks or plan.world_size
        first = rank // ranks * ranks
        self._rank, self.group = rank - first, rank // ranks
        self._batch = plan.shards[0][0]
        heads, key_heads = plan.shards[0][1], plan.shards[1][1]
        shapes = tuple(zip((heads, key_heads, key_heads), self._dims, strict=True))
        found = deal(geometry, first, ranks, self._batch, shapes, plan.dtype, backward)
        self._lengths, self._one_side, self.stages = found.lengths, found.one_side, found.stages
        #: Whether repeated calls can use :mod:`~cp_dispatch.schedules.known_heads` if ranks write
        #: to each other's memory.
        self.are_known = found.one_side and found.joins and len(found.stages) == 1
        self.are_known &= heads % ranks == 0 and schedule.across is None

    def key_grad_dtype(self, stage) -> torch.dtype:
        return key_grad_dtype(stage, self.plan.shards[1][1], self.plan.dtype)

    def of_stage(self, stage) -> tuple[list[Transfer], list[Transfer]]:
        """The messages of a stage in both directions, in order."""
        dtype, (dim, _, value_dim) = self.plan.dtype, self._dims
        backend = BACKENDS[self.plan.backend]
        out = backend.output_dtype(dtype), value_dim
        rows, keys = [(dtype, dim)], [(dtype, dim), (dtype, value_dim)]
        names = "query"
        back = [("output, logsumexp", [out, self._lse], [], False)]
        if self._backward:
            rows += [out, out, self._lse]
            names = "query, its output, gradient and logsumexp"
            of_keys = self.key_grad_dtype(stage)
            sums = [(of_keys, dim), (of_keys, value_dim)]
            back = [("dQ", rows[:1], [], False), ("dK, dV", [], sums, True)]
            if joins(self.plan.geometry, stage, self.plan.shards[1][1]):
                back = [("dQ, dK, dV", rows[:1], sums, False)]
        if self._one_side:
            there = [(f"{names}, key, value", rows, keys, False)]
        else:
            there = [(names, rows, [], False), ("key, value", [], keys, True)]
        return (
            [self._transfer(stage, name, a, b, side, True) for name, a, b, side in there],
            [self._transfer(stage, name, a, b, side, False) for name, a, b, side in back],
        )

    @property
    def _lse(self):
        return BACKENDS[self.plan.backend].logsumexp_dtype(self.plan.dtype), 1

    def _transfer(self, stage, what, rows, keys, keys_rows: bool, there: bool) -> Transfer:
        spans: dict[bool, tuple[Span, ...]] = {
            False: tuple(share.query for share in stage), True: tuple(share.key for share in stage)
        }  # fmt: skip
        parts = [Part(*x, spans[False]) for x in rows] + [Part(*x, spans[True]) for x in keys]
        shape = wire(self._batch, self._lengths[keys_rows], self._rank, tuple(parts))
        sizes = shape.own if there else shape.all
        what = f"heads of {what}"
        return Transfer("all_to_all", what, sum(sizes) - sizes[self._rank])

    def segments(self, stage) -> tuple[Segment, ...]:
        """This rank's kernel calls of a stage."""
        return stage[self._rank].segments

    def across(self, stage) -> list[Plan]:
        """The plans of the schedule among groups, one for each kernel call of a stage."""
        if self._schedule.across is None:
            return []
        plan, found = self.plan, []
        coarse = self._schedule.coarse(plan.geometry)
        rows, keys = (
            max(length(r) for r in range(coarse.world_size))
            for length in (coarse.query_length, coarse.key_length)
        )
        for query, key in self.segments(stage):
            shards = tuple(
                (self._batch, heads, length, shape[3])
                for heads, length, shape in zip(
                    (query.length, key.length, key.length), (rows, keys, keys), plan.shards,
                    strict=True,
                )
            )  # fmt: skip
            found.append(
                dataclasses.replace(
                    plan, schedule=self._schedule.across_name, ring_shape=(coarse.world_size,),
                    shards=shards, owners=coarse, head_ranks=1,
                    wide_key_grads=self.key_grad_dtype(stage) is not plan.dtype,
                )
            )  # fmt: skip
        return found


def transfers(schedule, plan: Plan, rank: int) -> tuple[list[Transfer], list[Transfer]]:
    """The collectives of a forward and a backward on ``rank``, in order."""
    both = []
    for backward in (False, True):
        messages = Messages(schedule, plan, rank, backward)
        moves = [messages.of_stage(stage) for stage in messages.stages]
        found = list(moves[0][0])
        for number, stage in enumerate(messages.stages):
            if number + 1 < len(moves):
                found += moves[number + 1][0]
            for across in messages.across(stage):
                found += across.transfers(messages.group)[backward]
            found += moves[number][1]
        both.append(found)
    return both[0], both[1]


def extra_bytes(schedule, plan: Plan) -> tuple[int, int]:
    """As :func:`cp_dispatch.planning.collectives.extra_bytes`."""
    forward, backward = (_extra_bytes(schedule, plan, backward) for backward in (False, True))
    return forward, backward


def _extra_bytes(schedule, plan: Plan, backward: bool) -> int:
    query, key, value = plan.padded_shards
    messages = Messages(schedule, plan, 0, backward)
    ranks, count = schedule.ranks or plan.world_size, len(messages.stages)
    # For the group's rows and this rank's heads: about as much as for its own rows and all heads.
    share = max(s.key.length for s in messages.stages[0]) * count * ranks / key[1]
    narrow = plan.dtype.itemsize
    dq, output = math.prod(query), math.prod(query[:3]) * value[3]
    dkv = math.prod(key) + math.prod(value)
    results = output * plan.kernel_itemsize + math.prod(query[:3]) * plan.lse_itemsize
    of_keys = messages.key_grad_dtype(messages.stages[0]).itemsize
    inputs, gradients = (dq + dkv * share) * narrow, dq * narrow + dkv * share * of_keys
    permuted = plan.layout is not None and plan.is_causal
    sums = dkv * of_keys + dq * narrow
    if backward:
        arriving, leaving, final = inputs + 2 * results, gradients, sums
    else:
        arriving, leaving, final = inputs, results, results
    # One stage's memory, on arrival, in the kernels or on the way back, whichever is largest, plus
    # the arrival of the next stage.
    coming = 2 * arriving / count if count > 1 else 0
    home = leaving / count * (2 + permuted) + final
    extra = max(2 * arriving / count, (arriving + leaving) / count, home) + coming
    if schedule.across is not None:
        inside = (plan.extra_bytes() for plan in messages.across(messages.stages[0]))
        extra += max(both[backward] for both in inside)
    return int(extra)


def blocks(schedule, plan: Plan, rank: int) -> tuple[int, int]:
    """The number of blocks (a group with a group) that ``rank`` computes, and of all blocks."""
    if schedule.across is None:
        return 1, 1
    coarse = schedule.coarse(plan.geometry)
    groups, own = coarse.world_size, rank // schedule.ranks
    return sum(coarse.sees(own, owner) for owner in range(groups)), groups
