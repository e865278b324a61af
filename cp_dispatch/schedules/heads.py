"""Heads by all-to-all: a rank attends with some heads over all rows, not all heads over some.

After Jacobs et al., "DeepSpeed Ulysses" (arXiv:2309.14509). In a group of U ranks one all-to-all
takes query, key and value from ``S/U rows x H heads`` to ``S rows x H/U heads``; kernels then see
the whole sequence of the group, with no hops, no merge and no unequal work under a causal mask;
another all-to-all takes the output back. The backward moves its inputs again and keeps nothing
beside the tensors that autograd has saved anyway.

- ``ulysses``: the group is all ranks, and a kernel call is what one device would do.
- ``hybrid``: the group is U consecutive ranks. Each share of the heads has a sequence over W/U
  groups left, which a ring of the ranks with that share attends to (as "USP" of Fang and Zhao,
  arXiv:2405.07719)::

      W = 4, U = 2        rank 0       rank 1       rank 2       rank 3
      its rows            0            1            2            3
      computes with       rows 0 1     rows 0 1     rows 2 3     rows 2 3
                          even heads   odd heads    even heads   odd heads
      ring                even         odd          even         odd

Where shards are long enough and ranks have several key heads to themselves, heads go in stages:
while one is computed the next comes and the one before goes home.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from cp_dispatch.backends.base import repeat_heads
from cp_dispatch.layouts import Geometry, RowGeometry, Span, laid_out
from cp_dispatch.merge import token_major
from cp_dispatch.schedules import alone, gathered, half_swap, head_costs
from cp_dispatch.schedules.comm import SubRing
from cp_dispatch.schedules.gradients import mask_gradient
from cp_dispatch.schedules.head_moves import moves_of, runs_of
from cp_dispatch.schedules.head_shares import Segment, Share, grouped, true_order
from cp_dispatch.schedules.job import Job
from cp_dispatch.schedules.known_heads import KnownHeads
from cp_dispatch.schedules.pushed_heads import MOST_COPIES, PushedHomeward, PushedOutward
from cp_dispatch.schedules.ranges import part
from cp_dispatch.schedules.wire import Homeward, Outward, Part, wire


class Heads:
    """A schedule, see :mod:`cp_dispatch.schedules`.

    ``ranks`` consecutive ranks share heads, all of them for None; ``across``, ``"ring"`` or
    ``"mirrored_ring"`` in ``SCHEDULES``, is the schedule among the groups.
    """

    def __init__(self, ranks: int | None = None, across_name: str = "", across=None):
        self.ranks, self.across_name, self.across = ranks, across_name, across

    def geometry(
        self, query_length: int, key_length: int, ring_shape: tuple[int, ...], causal: bool, layout
    ) -> Geometry | RowGeometry:
        """Who owns which rows, before and after."""
        return laid_out(query_length, key_length, ring_shape, causal, layout)

    def coarse(self, geometry: Geometry | RowGeometry) -> Geometry | RowGeometry:
        """Who computes what among the groups, or in the one group that there is."""
        if self.across_name == "mirrored_ring":
            length = sum(map(geometry.query_length, range(geometry.world_size)))
            shape = (geometry.world_size // self.ranks,)
            return self.across.geometry(length, length, shape, geometry.causal, None)
        return grouped(geometry, self.ranks or geometry.world_size)

    def forward(self, job: Job, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """As :func:`cp_dispatch.schedules.ring.forward`."""
        team = _Team(self, job, query, key, value, backward=False)

        def compute(stage: Sequence[Share], q: Tensor, k: Tensor, v: Tensor):
            outs, lses = [], []
            for segment, own in team.segments(stage):
                parts = _heads(q, segment.query), _heads(k, segment.key), _heads(v, segment.key)
                out, lse = team.schedule.forward(own, *parts)
                outs.append(out)
                lses.append(lse.unsqueeze(-1))
            return [[(outs, False), (lses, False)]]

        output = logsumexp = None
        for (going,) in team.run("heads", (query,), (key, value), compute):
            if output is None:  # not before, when most is under way
                dtype = job.backend.output_dtype(query.dtype)
                output = token_major(*query.shape[:3], value.size(-1), like=query, dtype=dtype)
                dtype = job.backend.logsumexp_dtype(query.dtype)
                logsumexp = query.new_empty((*query.shape[:3], 1), dtype=dtype)
            going.wait(output, logsumexp)
        return output, logsumexp.squeeze(-1)

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
        team = _Team(self, job, query, key, value, backward=True)
        grad_mask = mask_gradient(job.mask, query.dtype) if mask_grad else None

        def compute(stage: Sequence[Share], q, go, out, lse, k, v):
            of_query, of_key, of_value = [], [], []
            for segment, own in team.segments(stage):
                rows = (_heads(x, segment.query) for x in (go, q, out, lse))
                go_, q_, out_, lse_ = rows
                k_, v_ = _heads(k, segment.key), _heads(v, segment.key)
                groups = q_.size(1) // max(1, k_.size(1)) if team.repeats_keys else 1
                k_, v_ = repeat_heads(k_, groups), repeat_heads(v_, groups)
                dq, dk, dv, dmask = team.schedule.backward(
                    own, go_, q_, k_, v_, out_, lse_.squeeze(-1), key_grad, mask_grad
                )
                if groups > 1 and key_grad:
                    dk, dv = (
                        x.unflatten(1, (-1, groups)).sum(2, dtype=team.key_grad_dtype)
                        for x in (dk, dv)
                    )
                of_query.append(dq)
                of_key.append(dk)
                of_value.append(dv)
                if mask_grad:
                    team.own_mask(grad_mask, stage, segment).add_(dmask)
            rows, keys = [(of_query, False)], [(of_key, True), (of_value, True)]
            if not key_grad:
                return [rows]
            return [rows + keys] if team.joins else [rows, keys]

        dq = dk = dv = None
        of_rows = query, grad_output, output, logsumexp.unsqueeze(-1)
        for going in team.run("heads_backward", of_rows, (key, value), compute):
            if dq is None:
                dq = token_major(*query.shape, like=query)
                dk, dv = (
                    token_major(*x.shape, like=x, dtype=team.key_grad_dtype) if key_grad else None
                    for x in (key, value)
                )
            results = [(dq, dk, dv)] if len(going) == 1 and key_grad else [(dq,), (dk, dv)]
            for message, into in zip(going, results, strict=False):  # no gradients of keys: one
                message.wait(*into)
        if not key_grad:
            return dq, None, None, grad_mask
        if team.key_grad_dtype is not key.dtype:
            narrow = (token_major(*x.shape, like=x) for x in (key, value))
            dk, dv = (x.copy_(total) for x, total in zip(narrow, (dk, dv), strict=True))
        return dq, dk, dv, grad_mask

    def messages(self, plan, rank: int, backward: bool) -> head_costs.Messages:
        """What a plan with this schedule moves on a rank."""
        return head_costs.Messages(self, plan, rank, backward)

    @property
    def KnownCalls(self):  # noqa: N802  as modules name theirs
        """See :mod:`cp_dispatch.schedules.known_heads`; of a hybrid, whose parts are schedules of
        their own, nothing is known."""
        return None if self.ranks else functools.partial(KnownHeads, functools.partial(_Team, self))

    transfers = head_costs.transfers
    extra_bytes = head_costs.extra_bytes
    blocks = head_costs.blocks


class _Team:
    """The group that shares heads on this rank, and what it does with them."""

    def __init__(self, schedule: Heads, job: Job, query, key, value, backward: bool):
        ring, geometry = job.ring, job.geometry
        ranks = schedule.ranks or ring.world_size
        self._rank = ring.rank % ranks
        self._first = first = ring.rank - self._rank
        self._job, self._device = job, query.device
        everyone = ranks == ring.world_size
        self._ring = ring if everyone else SubRing(ring, range(first, first + ranks))
        self._batch = query.size(0)
        shapes = tuple((x.size(1), x.size(3)) for x in (query, key, value))
        deal = head_costs.deal(geometry, first, ranks, self._batch, shapes, query.dtype, backward)
        self._lengths, self._one_side, self._stages, self._heads = deal[:4]
        self.key_grad_dtype, self.joins = deal.key_grad_dtype, deal.joins
        # One stage's messages have nothing to be hidden behind.
        self._at_once = self._one_side and len(self._stages) == 1
        # A kernel would round a rank's share of a head's gradient, of which there are several, once
        # more than on one device: it gets every query head its own key head, to be added up wide.
        self.repeats_keys = (
            everyone
            and deal.are_shared
            and job.backend.gradient_dtype(key.dtype) is not self.key_grad_dtype
        )
        # The sequence of the groups, and this rank's place in it.
        self.schedule, across = alone, None
        if not everyone:
            self.schedule = schedule.across
            across = SubRing(ring, range(self._rank, ring.world_size, ranks))
        self._across = replace(
            job, ring=across, geometry=schedule.coarse(geometry), key_grad_dtype=self.key_grad_dtype
        )

    def run(self, name: str, of_rows: Sequence[Tensor], of_keys: Sequence[Tensor], compute):
        """Yield what goes home from each stage, a stage later, so that it may be there.

        ``compute`` gets a stage and all rows of its heads, and gives what goes home: messages, each
        of tensors for :class:`Homeward` and whether they have the keys' heads. Every rank comes by
        the same collectives in the same order.
        """
        arriving, going = self._start(0, of_rows, of_keys), None
        for number, stage in enumerate(self._stages):
            here, arriving = arriving, None
            if number + 1 < len(self._stages):
                arriving = self._start(number + 1, of_rows, of_keys)
            tensors = [x for message in here for x in message.wait()]
            with part(f"{name}[stage {number + 1}/{len(self._stages)}]"):
                results = compute(stage, *tensors)
            for message in here:
                message.release()
            del here, message, tensors
            started = [self._home(number, i, result) for i, result in enumerate(results)]
            del results
            if going is not None:
                yield going
            going = started
        yield going

    def _start(self, number: int, of_rows, of_keys) -> list[Outward | PushedOutward]:
        rows, keys = [(x, False) for x in of_rows], [(x, True) for x in of_keys]
        if self._one_side:
            return [self._outward(number, rows + keys, False)]
        return [self._outward(number, rows, False), self._outward(number, keys, True)]

    def _outward(self, number: int, dealt, keys_rows: bool) -> Outward | PushedOutward:
        tensors = [x for x, _ in dealt]
        parts = self._parts(number, ((x.dtype, x.size(3), of_key) for x, of_key in dealt))
        box, moves = self._mailbox(self._room(number, keys_rows), True, parts, keys_rows)
        if box is not None:
            return PushedOutward(self._ring, box, moves, parts, tensors, self._at_once)
        shape = wire(self._batch, self._lengths[keys_rows], self._rank, parts)
        return Outward(self._ring, shape, tensors, self._order(keys_rows))

    def _home(self, number: int, which: int, results) -> Homeward | PushedHomeward:
        pieces = [x for x, _ in results]
        dealt = (
            (self.key_grad_dtype if of_key else x.dtype, x.size(3), of_key)
            for (x, *_), of_key in results
        )
        parts = self._parts(number, dealt)
        of_keys = results[0][1]
        box, moves = self._mailbox(self._room_home(number, which), False, parts, of_keys)
        if box is not None:
            return PushedHomeward(self._ring, box, moves, parts, pieces, self._at_once)
        shape = wire(self._batch, self._lengths[of_keys], self._rank, parts)
        return Homeward(self._ring, shape, pieces, self._order(of_keys))

    def _parts(self, number: int, dealt) -> tuple[Part, ...]:
        """Of ``(dtype, dim, whether it has the keys' heads)``."""
        heads = self._heads[number]
        return tuple(Part(dtype, dim, heads[of_key]) for dtype, dim, of_key in dealt)

    def only_messages(self, there, home):
        """Whether the kernel is causal, and ``(box, moves, parts)`` of what goes out and of what
        comes home, as for :meth:`_parts`, where that and one kernel call is all of the call; else
        None. After a call, which has made the rooms."""
        tiles = self._across.geometry.tiles_of(0, 0, self._job.batch_start, self._batch)
        # Where messages join no key head is shared, and a share is one segment.
        if not (self._at_once and self.joins and len(tiles) == 1):
            return None
        found = []
        for name, outward, dealt in (
            (self._room(0, False), True, there), (self._room_home(0, 0), False, home)
        ):  # fmt: skip
            parts = self._parts(0, dealt)
            found.append((*self._mailbox(name, outward, parts, False), parts))
        return None if found[0][0] is None else (tiles[0].causal, *found)

    def _mailbox(self, name: str, outward: bool, parts: tuple[Part, ...], of_keys: bool):
        """A box for a message and how it moves; None where copy engines cannot carry it."""
        ring, job = self._ring, self._job
        if not ring.may_push:
            return None, None
        runs = runs_of(job.geometry, of_keys, job.batch_start, self._batch)
        if sum(len(rank) for row in runs for rank in row) > MOST_COPIES * ring.world_size:
            return None, None
        moves = moves_of(self._rank, outward, self._batch, self._lengths[of_keys], runs, parts)
        return ring.mailbox(name, moves.size), moves

    def _room(self, number: int, keys_rows: bool) -> str:
        """The mailbox of what comes for a stage, of two that take turns. The first is another
        schedule's too: no call leaves anything there, and a backward may go by another schedule
        than its forward."""
        if keys_rows or number % 2:
            return f"heads {keys_rows:d}{number % 2}"
        return gathered.ROOM

    def _room_home(self, number: int, which: int) -> str:
        """The mailbox of what goes home from a stage, likewise."""
        if which == 0 and len(self._stages) <= 2:
            return self._room(number, False)  # from which nobody reads any more
        return half_swap.ROOM if which and number % 2 == 0 else f"heads home {which}{number % 2}"

    def _order(self, of_keys: bool):
        """How rows come in true order, for messages that do not put them there."""
        job, ranks = self._job, self._ring.world_size
        return true_order(
            job.geometry, of_keys, self._first, ranks, job.batch_start, self._batch, self._device
        )

    def segments(self, stage: Sequence[Share]) -> list[tuple[Segment, Job]]:
        """This rank's kernel calls of a stage, each with a job of its own heads."""
        share, job = stage[self._rank], self._across
        found = []
        for segment in share.segments:
            own, start = job, share.query.position + segment.query.position
            if job.mask is not None:
                own = replace(own, mask=self.own_mask(job.mask, stage, segment))
            if job.dropout is not None:
                first = job.dropout.head_start + start
                own = replace(own, dropout=replace(job.dropout, head_start=first))
            found.append((segment, own))
        return found

    def own_mask(self, mask: Tensor, stage: Sequence[Share], segment: Segment) -> Tensor:
        """A segment's heads of the mask, or of its gradient."""
        if mask.size(1) == 1:
            return mask
        start = stage[self._rank].query.position + segment.query.position
        return mask[:, start : start + segment.query.length]


def _heads(tensor: Tensor, heads: Span) -> Tensor:
    if heads.length == tensor.size(1):
        return tensor
    return tensor[:, heads.position : heads.position + heads.length]
