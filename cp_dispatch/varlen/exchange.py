"""Moves the keys that a rank's rows attend to it, and shares of their gradients back."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from cp_dispatch.backends import wide_dtype
from cp_dispatch.by_need.here import MOST_RUNS
from cp_dispatch.by_need.ownership import Ownership
from cp_dispatch.by_need.selector import Selector
from cp_dispatch.layouts import Span
from cp_dispatch.layouts.spans import append
from cp_dispatch.native.parts import add_up
from cp_dispatch.schedules.comm import Ring
from cp_dispatch.varlen.keys import Arrived, add, as_batch, in_turn
from cp_dispatch.varlen.pulled import Pulled, Pulls, pulled
from cp_dispatch.varlen.traffic import Traffic, table_of

# Up to this many runs of rows are summed in one pass over memory.
_MOST_SUMS = 32


class Exchange:
    """The transfers of one rank in forward and backward, or none if no rank needs keys of another.

    ``order`` is the ``sums`` of the only kernel call's :class:`~cp_dispatch.varlen.keys.CallKeys`
    if that takes each of the rank's keys once, else None.
    """

    def __init__(
        self, traffic: Traffic, keys: Ownership, rank: int, order: Sequence | None,
        device: torch.device,
    ):  # fmt: skip
        self.traffic, self.rank = traffic, rank
        self.home = Selector(traffic.home, device)
        self.gives = [Selector(spans, device) for spans in traffic.gives]
        self.given = [sum(span.length for span in spans) for spans in traffic.gives]
        self._has_all_at_home = traffic.takes[rank] == traffic.rows
        self._keys, self._order, self._device = keys, order, device
        self._own_places: dict[tuple, Selector] = {}  # for at most two orders

    @functools.cached_property
    def _pulls(self) -> Pulls | None:
        """What copy engines move; None if some rank would need too many copies, on every rank."""
        table = table_of(self.traffic.needs, self._keys, MOST_RUNS)
        if table is None:
            return None
        rows = max(map(self._keys.rows, range(self._keys.world_size)))
        return Pulls(table, rows, self.rank, self._order)

    def transfers(
        self, ring: Ring | None, key: Tensor, value: Tensor, dtype: torch.dtype | None = None
    ) -> contextlib.AbstractContextManager[Collectives | Pulled]:
        """The transfers of a call with shards like these, ``(rows, Hkv, D)``; ``dtype`` is that of
        the gradients that it returns, None if there are none."""
        if self.traffic.moves and ring.may_push and self._pulls is not None:
            found = pulled(self._pulls, ring, key, value, dtype, self.add_up)
            if found is not None:
                return found
        return contextlib.nullcontext(Collectives(self, ring if self.traffic.moves else None))

    def add_up(
        self,
        grads: Sequence[Tensor],
        own: Sequence[tuple[int, int, int]],
        came: Sequence[dict[int, Tensor]],
        like: Sequence[Tensor],
    ) -> list[Tensor]:
        """The sums of gradients for this rank's shards, which are ``like`` these, rounded once.

        Args:
            grads: dK and dV of this rank's compact keys, in any order.
            own: runs of its own rows: the place in the shard, the length, the place in ``grads``.
            came: those that other ranks computed, by rank in ascending order.
            like: key and value.
        """
        takers = [taker for taker, count in enumerate(self.given) if count]
        if self._has_all_at_home and not takers and len(own) <= 1:
            _, count, start = own[0] if own else (0, 0, 0)
            return [
                grad[start : start + count].to(x.dtype).contiguous()
                for grad, x in zip(grads, like, strict=True)
            ]
        parts = [[x, *(of[taker] for taker in takers)] for x, of in zip(grads, came, strict=True)]
        if len(own) + sum(len(self.traffic.gives[taker]) for taker in takers) > _MOST_SUMS:
            places = self._places(tuple(own))
            return [self._wide_sum(*x, takers, places) for x in zip(parts, like, strict=True)]
        runs = [own, *(tuple(in_turn(self.traffic.gives[taker])) for taker in takers)]
        sums = [x.new_empty(x.shape) for x in like]
        views = [
            [as_batch(part) for part, places in zip(of_one, runs, strict=True) for _ in places]
            for of_one in parts
        ]
        add_up([as_batch(x) for x in sums], views, tuple(place for of in runs for place in of))
        return sums

    def _wide_sum(self, parts: Sequence[Tensor], like: Tensor, takers, places: Selector) -> Tensor:
        total = like.new_zeros(like.shape, dtype=wide_dtype(like.dtype))
        add(self.home, total, places.take(parts[0]))
        for taker, part in zip(takers, parts[1:], strict=True):
            add(self.gives[taker], total, part)
        return total.to(like.dtype)

    def _places(self, own: tuple[tuple[int, int, int], ...]) -> Selector:
        """This rank's own rows among its compact keys."""
        if own not in self._own_places:
            spans: list[Span] = []
            for _, count, start in own:
                append(spans, start, count)
            self._own_places[own] = Selector(tuple(spans), self._device)
        return self._own_places[own]


class Collectives:
    """One all-to-all in each direction; none if ``ring`` is None, because nothing moves."""

    def __init__(self, exchange: Exchange, ring: Ring | None):
        self._exchange, self._ring = exchange, ring
        self._owners = range(len(exchange.traffic.takes))

    def bring(self, key: Tensor, value: Tensor) -> Arrived:
        """This rank's compact keys and compact values."""
        of, tensors = self._exchange, (key, value)
        own = [of.home.take(x) for x in tensors]
        if self._ring is None:
            return Arrived(
                [[x if owner == of.rank else x[:0] for owner in self._owners] for x in own]
            )
        send = [[place.take(x) for x in tensors] for place in of.gives]
        takes = [0 if owner == of.rank else n for owner, n in enumerate(of.traffic.takes)]
        came = self._swap(send, takes, tensors)
        came[of.rank] = own
        return Arrived([list(parts) for parts in zip(*came, strict=True)])

    def bring_back(
        self, grads: Sequence[Tensor], like: Sequence[Tensor], are_ordered: bool = False
    ) -> list[Tensor]:
        """Send the gradients of this rank's compact keys, in the order in which these arrived, to
        their owners. Returns the sums of all ranks' gradients for this rank's own keys, like its
        shards ``like``, rounded once. (``are_ordered`` is for copy engines.)"""
        of = self._exchange
        parts = [list(grad.split(list(of.traffic.takes))) for grad in grads]
        came: list[dict[int, Tensor]] = [{}, {}]
        if self._ring is not None:
            empty = [grad[:0] for grad in grads]
            send = [
                empty if owner == of.rank else list(of_both)
                for owner, of_both in enumerate(zip(*parts, strict=True))
            ]
            received = self._swap(send, of.given, grads)
            came = [dict(enumerate(of_one)) for of_one in zip(*received, strict=True)]
        start = sum(of.traffic.takes[: of.rank])
        own = [(row, count, start + first) for row, count, first in in_turn(of.traffic.home)]
        return of.add_up(grads, own, came, like)

    def _swap(
        self, send: list[list[Tensor]], counts: Sequence[int], like: Sequence[Tensor]
    ) -> list[list[Tensor]]:
        """Send rows of both tensors to every rank; receive ``counts`` rows of both from each."""
        widths = [math.prod(x.shape[1:]) for x in like]
        flat = torch.cat([x.reshape(-1) for both in send for x in both])
        sizes = [sum(x.numel() for x in both) for both in send]
        coming = [count * sum(widths) for count in counts]
        receive = flat.new_empty(sum(coming))
        self._ring.exchange_all(flat, sizes, receive, coming).wait()
        return [
            [
                part.view(count, *x.shape[1:])
                for part, x in zip(both.split([count * w for w in widths]), like, strict=True)
            ]
            for both, count in zip(receive.split(coming), counts, strict=True)
        ]
