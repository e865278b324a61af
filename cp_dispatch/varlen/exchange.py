"""Moves the keys that a rank's rows attend to it, and shares of their gradients back."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from cp_dispatch.backends import wide_dtype
from cp_dispatch.by_need.selector import Selector
from cp_dispatch.native.parts import add_up
from cp_dispatch.schedules.comm import Ring
from cp_dispatch.varlen.keys import add, as_batch, in_turn
from cp_dispatch.varlen.traffic import Traffic

# Up to this many runs of rows are summed in one pass over memory.
_MOST_SUMS = 32


class Exchange:
    """The transfers of one rank in forward and backward: one all-to-all each, or none if no rank
    needs keys of another."""

    def __init__(self, traffic: Traffic, rank: int, device: torch.device):
        self._rank, self.moves, self._takes = rank, traffic.moves, traffic.takes
        self._home = Selector(traffic.home, device)
        self._has_all_at_home = traffic.takes[rank] == traffic.rows
        self._gives = [Selector(spans, device) for spans in traffic.gives]
        self._owners = range(len(traffic.takes))
        self._given = [sum(span.length for span in spans) for spans in traffic.gives]
        # The parts of the sums: this rank's first, then those of other ranks in ascending order.
        self._takers = [taker for taker, count in enumerate(self._given) if count]
        self._runs = [traffic.home, *(traffic.gives[taker] for taker in self._takers)]

    @functools.cached_property
    def _places(self) -> tuple:
        """Those of the sums, if these are few."""
        return tuple(place for runs in self._runs for place in in_turn(runs))

    def bring(self, ring: Ring | None, key: Tensor, value: Tensor) -> list[list[Tensor]]:
        """This rank's compact keys and compact values, each as the parts from every rank; ``key``
        and ``value`` are its shards ``(rows, Hkv, D)``."""
        tensors = key, value
        own = [self._home.take(x) for x in tensors]
        if not self.moves:
            return [[x if owner == self._rank else x[:0] for owner in self._owners] for x in own]
        send = [[place.take(x) for x in tensors] for place in self._gives]
        takes = [0 if owner == self._rank else n for owner, n in enumerate(self._takes)]
        came = self._swap(ring, send, takes, tensors)
        came[self._rank] = own
        return [list(parts) for parts in zip(*came, strict=True)]

    def bring_back(
        self, ring: Ring | None, grads: Sequence[Tensor], like: Sequence[Tensor]
    ) -> list[Tensor]:
        """Send the gradients of this rank's compact keys to their owners. Returns the sums of all
        ranks' gradients for this rank's own keys, like its shards ``like``, rounded once."""
        parts = [list(grad.split(list(self._takes))) for grad in grads]
        own = [of_owners[self._rank] for of_owners in parts]
        came = []
        if self.moves:
            empty = [grad[:0] for grad in grads]
            send = [
                empty if owner == self._rank else list(of_both)
                for owner, of_both in enumerate(zip(*parts, strict=True))
            ]
            came = self._swap(ring, send, self._given, grads)
        if self._has_all_at_home and not any(self._given):
            return [part.to(x.dtype).contiguous() for part, x in zip(own, like, strict=True)]
        parts = [[part, *(came[taker][i] for taker in self._takers)] for i, part in enumerate(own)]
        if sum(map(len, self._runs)) > _MOST_SUMS:
            return [self._wide_sum(of_one, x) for of_one, x in zip(parts, like, strict=True)]
        sums = [x.new_empty(x.shape) for x in like]
        views = [
            [as_batch(part) for part, runs in zip(of_one, self._runs, strict=True) for _ in runs]
            for of_one in parts
        ]
        add_up([as_batch(x) for x in sums], views, self._places)
        return sums

    def _wide_sum(self, parts: Sequence[Tensor], like: Tensor) -> Tensor:
        total = like.new_zeros(like.shape, dtype=wide_dtype(like.dtype))
        places = self._home, *(self._gives[taker] for taker in self._takers)
        for part, place in zip(parts, places, strict=True):
            add(place, total, part)
        return total.to(like.dtype)

    def _swap(
        self, ring: Ring, send: list[list[Tensor]], counts: Sequence[int], like: Sequence[Tensor]
    ) -> list[list[Tensor]]:
        """Send rows of both tensors to every rank; receive ``counts`` rows of both from each."""
        widths = [math.prod(x.shape[1:]) for x in like]
        flat = torch.cat([x.reshape(-1) for both in send for x in both])
        sizes = [sum(x.numel() for x in both) for both in send]
        coming = [count * sum(widths) for count in counts]
        receive = flat.new_empty(sum(coming))
        ring.exchange_all(flat, sizes, receive, coming).wait()
        return [
            [
                part.view(count, *x.shape[1:])
                for part, x in zip(both.split([count * w for w in widths]), like, strict=True)
            ]
            for both, count in zip(receive.split(coming), counts, strict=True)
        ]
