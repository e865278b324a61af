"""Deals equal numbers of blocks with equal work so that few keys have to travel.

Note [Near blocks]
~~~~~~~~~~~~~~~~~~
Arrange the documents on a circle, in any order. Among all windows over half of the blocks, one has
half of the work, to within a block: a window that moves half way round becomes its complement. So
two cuts halve both the blocks and the work. The halves are halved again, until each rank has its
share::

    causal documents of 6, 2 and 4, W = 2    a a a a a a c c b b b b
    work                                     1 2 3 4 5 6 1 2 1 2 3 4
    a window of 6 with half of it            1 1 1 1 0 0 0 0 0 0 1 1

A cut between documents is free. A cut within a document costs the keys before it, which the rows
after it need, so it is cheapest near the start. About a dozen orders are tried, and of all windows
with nearly half the work the cheapest is taken. Then the rank with the most traffic redistributes
its blocks with one other rank, for as long as that helps.
"""

from __future__ import annotations

import bisect
import itertools
import random
from collections.abc import Iterator, Sequence

from cp_dispatch.layouts.near_keys import NearKeys, Runs, Traffic

# More of each find little more, and take their time.
_ORDERS = 24
_PAIR_ORDERS, _PAIR_WINDOWS, _PAIRS = 8, 2, 96
# Runs of blocks that pairs share anew, of all together: work that looks like no documents has a run
# for each block or two.
_PAIR_RUNS = 2**14
# The share of a rank's blocks that may travel without a further search.
_LITTLE = 1 / 32


def near_blocks(
    work: Sequence[float], keys: NearKeys, wanted: Sequence[float], room: float
) -> list[list[Runs]]:
    """Proposals for the runs of blocks that each rank owns, with equal numbers of blocks.

    Args:
        wanted: the work that each rank should have; the sum is the work of all blocks.
        room: by how much a rank may exceed it; some may still exceed it by more.
    """
    found = []
    for part in (1 / 2, 1):
        search = _Search(work, keys, wanted, room * part)
        search.halve(keys.documents, range(len(wanted)), 1)
        moved = search.improve()
        found.append(search.owned)
        if moved <= search.each * 2 * _LITTLE:  # more room would save next to nothing
            break
    return found


class _Search:
    def __init__(self, work, keys, wanted, room):
        self.work, self.keys, self.wanted, self.room = work, keys, wanted, room
        self.each = len(work) // len(wanted)
        self.levels = (len(wanted) - 1).bit_length()
        self.owned: list[Runs] = [()] * len(wanted)
        self.random = random.Random(0)  # the same on every rank

    def halve(self, runs: Runs, ranks: Sequence[int], level: int) -> None:
        """Give ``runs`` to ``ranks``. If a half has too much work, its own halves cannot correct
        that, so the tolerance grows from level to level."""
        if len(ranks) == 1:
            self.owned[ranks[0]] = runs
            return
        some, others = ranks[: len(ranks) // 2], ranks[len(ranks) // 2 :]
        best = None
        for order in self.orders(runs, _ORDERS):
            miss, found = self.windows(order, some, others, self.room * level / self.levels)
            price, start = min(found)
            if best is None or (miss, price) < best[:2]:
                best = miss, price, order, start
            if best[:2] == (0, 0):
                break
        _, _, order, start = best
        inside, outside = self.cut(order, start, len(some) * self.each)
        self.halve(inside, some, level + 1)
        self.halve(outside, others, level + 1)

    def improve(self) -> int:
        """Redistribute blocks between the rank with the most traffic and others, those with the
        least traffic first. Returns how many blocks that rank moves in the end."""
        traffic = Traffic(self.keys, self.owned)
        pairs, runs = _PAIRS, _PAIR_RUNS
        while min(pairs, runs) > 0 and traffic.price[0] > self.each * _LITTLE:
            moved = [max(both) for both in zip(traffic.got, traffic.sent, strict=True)]
            *others, busiest = sorted(range(len(moved)), key=lambda rank: (moved[rank], rank))
            for other in others[:pairs]:
                pairs -= 1
                runs -= len(self.owned[busiest]) + len(self.owned[other])
                if self.share_anew(busiest, other, traffic) or runs <= 0:
                    break
            else:
                break
        return traffic.price[0]

    def share_anew(self, rank: int, other: int, traffic: Traffic) -> bool:
        """Redistribute the blocks of two ranks. Returns whether that reduced the largest traffic of
        a rank or, if that is unchanged, the sum."""
        before = {rank: self.owned[rank], other: self.owned[other]}
        price, best = traffic.price, before
        runs = self.keys.join(before[rank] + before[other])
        for order in self.orders(runs, _PAIR_ORDERS, chopped=True):
            miss, found = self.windows(order, [rank], [other], self.room)
            for _, start in [] if miss else sorted(found)[:_PAIR_WINDOWS]:
                shares = dict(zip(before, self.cut(order, start, self.each), strict=True))
                traffic.give(shares)
                if traffic.price < price:
                    price, best = traffic.price, shares
        traffic.give(best)
        for rank, runs in best.items():
            self.owned[rank] = runs
        return best is not before

    def orders(self, runs: Runs, count: int, chopped: bool = False) -> Iterator[list]:
        """The given order and shuffled ones; half of them with the longest run in two pieces, if
        ``chopped``: keys that many ranks need then come from several owners."""
        yield list(runs)
        longest = max(runs, key=lambda run: run[1] - run[0])
        for i in range(1, count):
            order = list(runs)
            if chopped and i % 2 == 0 and longest[1] - longest[0] > 1:
                start, stop = longest
                middle = self.random.randrange(start + 1, stop)
                order.remove(longest)
                order += [(start, middle), (middle, stop)]
            self.random.shuffle(order)
            yield order

    def windows(self, order: list, some: Sequence[int], others: Sequence[int], room: float):
        """Prices and starts of the windows for ``some`` that leave no rank with more than ``room``
        over what it wants, and 0; or of the one closest to that, and how far it is off."""
        work, size = self.work, len(some) * self.each
        weights = itertools.chain.from_iterable(work[start:stop] for start, stop in order)
        sums = list(itertools.accumulate(weights, initial=0))
        total, length = sums[-1], len(sums) - 1
        inside = [b - a for a, b in zip(sums, sums[size:], strict=False)]
        around = zip(sums[1:size], sums[length - size + 1 : -1], strict=True)
        inside += [total - b + a for a, b in around]
        most = sum(self.wanted[rank] for rank in some) + room * len(some)
        least = total - sum(self.wanted[rank] for rank in others) - room * len(others)
        miss, fits = 0, [at for at, load in enumerate(inside) if least <= load <= most]
        if not fits:
            off = [abs(2 * load - least - most) for load in inside]
            miss = min(off)
            fits = [off.index(miss)]
        prices = self.prices(order)
        return miss, [(prices[at] + prices[(at + size) % length], at) for at in fits]

    def prices(self, order: list) -> list[int]:
        """What a cut before each block of the circle costs."""
        prices: list[int] = []
        last = order[-1][1]
        for start, stop in order:
            prices.append(self.keys.cut[start] if last == start else 0)
            prices += self.keys.cut[start + 1 : stop]
            last = stop
        return prices

    def cut(self, order: list, start: int, size: int) -> tuple[Runs, Runs]:
        """What is in the window of ``size`` blocks from ``start``, and what is not."""
        order, ends = list(order), list(itertools.accumulate(b - a for a, b in order))
        places = sorted((start, (start + size) % ends[-1]))
        for place in places:
            at = bisect.bisect_right(ends, place)
            first, last = order[at]
            middle = last - (ends[at] - place)
            if first < middle:
                order[at : at + 1] = (first, middle), (middle, last)
                ends.insert(at, place)
        low, high = (bisect.bisect_right(ends, place) for place in places)
        parts = order[low:high], order[:low] + order[high:]
        inside, outside = parts if start == places[0] else reversed(parts)
        return self.keys.join(inside), self.keys.join(outside)
