"""The ranks that exchange heads in one call (:mod:`heads`), and the messages between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from torch import Tensor

from cp_dispatch.schedules import alone, gathered, half_swap, head_costs
from cp_dispatch.schedules.comm import SubRing
from cp_dispatch.schedules.head_moves import moves_of, runs_of
from cp_dispatch.schedules.head_shares import Segment, Share, true_order
from cp_dispatch.schedules.job import Job
from cp_dispatch.schedules.pushed_heads import MOST_COPIES, PushedHomeward, PushedOutward
from cp_dispatch.schedules.ranges import part
from cp_dispatch.schedules.wire import Homeward, Outward, Part, wire

if TYPE_CHECKING:
    from cp_dispatch.schedules.heads import Heads


class Team:
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
        # With one stage, messages cannot overlap with anything.
        self._at_once = self._one_side and len(self._stages) == 1
        # If several ranks have shares of a key head's gradient, a kernel would round each share
        # once more than on one device. So every query head gets its own key head, to sum in wide
        # dtype.
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
        """Yield what is sent back from each stage, one stage later, so that it can arrive
        meanwhile.

        ``compute`` takes a stage and all rows of its heads. It returns the messages to send back:
        for each, its tensors for :class:`Homeward`, and whether they have the keys' heads. Every
        rank makes the same collectives in the same order.
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
        """The parts of a message; ``dealt`` has ``(dtype, dim, whether it has the keys'
        heads)``."""
        heads = self._heads[number]
        return tuple(Part(dtype, dim, heads[of_key]) for dtype, dim, of_key in dealt)

    def only_messages(self, there, home):
        """If the whole call is two messages and one kernel call: whether the kernel is causal, the
        box, the moves out and back, and the parts that go out; otherwise None.

        ``there`` and ``home`` are as for :meth:`_parts`. Call it after a call, which has made the
        box.
        """
        tiles = self._across.geometry.tiles_of(0, 0, self._job.batch_start, self._batch)
        # If messages join, no key head is shared, and each share is one segment.
        if not (self._at_once and self.joins and len(tiles) == 1):
            return None
        parts = self._parts(0, there)
        box, out = self._mailbox(self._room(0, False), True, parts, False)
        room, back = self._mailbox(self._room_home(0, 0), False, self._parts(0, home), False)
        if box is None or box is not room or not back.is_even:
            return None
        return tiles[0].causal, box, out, back, parts

    def _mailbox(self, name: str, outward: bool, parts: tuple[Part, ...], of_keys: bool):
        """A mailbox for a message, and its moves; None if copy engines cannot carry it."""
        ring, job = self._ring, self._job
        if not ring.may_push:
            return None, None
        runs = runs_of(job.geometry, of_keys, job.batch_start, self._batch)
        if sum(len(rank) for row in runs for rank in row) > MOST_COPIES * ring.world_size:
            return None, None
        moves = moves_of(self._rank, outward, self._batch, self._lengths[of_keys], runs, parts)
        return ring.mailbox(name, moves.size), moves

    def _room(self, number: int, keys_rows: bool) -> str:
        """The mailbox for the data that arrives for a stage; two are used in turn. The first is
        shared with another schedule, because no call leaves anything in it, and a backward may have
        a different schedule than its forward."""
        if keys_rows or number % 2:
            return f"heads {keys_rows:d}{number % 2}"
        return gathered.ROOM

    def _room_home(self, number: int, which: int) -> str:
        """The mailbox for the data that is sent back from a stage, likewise."""
        if which == 0 and len(self._stages) <= 2:
            return self._room(number, False)  # which nothing reads any more
        return half_swap.ROOM if which and number % 2 == 0 else f"heads home {which}{number % 2}"

    def _order(self, of_keys: bool):
        """The reordering of rows to natural order, for messages that do not do it themselves."""
        job, ranks = self._job, self._ring.world_size
        return true_order(
            job.geometry, of_keys, self._first, ranks, job.batch_start, self._batch, self._device
        )

    def segments(self, stage: Sequence[Share]) -> list[tuple[Segment, Job]]:
        """This rank's kernel calls of a stage, each with a job for its heads."""
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
