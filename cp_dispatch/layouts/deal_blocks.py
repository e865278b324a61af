"""Assigns blocks to ranks by their work: heaviest first, or so that few keys travel."""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence

from cp_dispatch.layouts.balancer import head_tail
from cp_dispatch.layouts.near_blocks import near_blocks
from cp_dispatch.layouts.near_keys import NearKeys, Traffic
from cp_dispatch.layouts.spans import Span

# With few keys to travel, the largest accepted work of a rank over the mean.
_NEAR_ENOUGH = 1.01
# The cost of moving a key block, in units of a query block's work with a key block: 0.5 MiB against
# 0.27 GFLOP with 8 key and 32 query heads of 128 in bfloat16, if nothing overlaps.
_TRAVEL = 3
# Blocks that are looked at for swaps until ranks are near enough, at a microsecond each.
_MOST_LOOKS = 2**19


def deal_rows(work: Sequence[tuple[float, ...]], world_size: int, near: bool) -> list[list]:
    """Blocks of each rank, for each batch row; later rows even out what earlier ones left."""
    rows, total = _deal_rows(work, world_size, near)
    most = _NEAR_ENOUGH * sum(total) / world_size
    if near and max(total) > most:
        # Each row was judged by those before it; all of them may be evened out otherwise.
        evenly, loads = _deal_rows(work, world_size, False)
        if max(loads) <= most:
            return evenly
    return rows


def _deal_rows(work, world_size: int, near: bool):
    total = [0] * world_size
    rows = []
    for own in work:
        owned, total = _deal(own, world_size, total, near)
        rows.append(owned)
    return rows, total


def _deal(work: Sequence[float], world_size: int, base: Sequence[float], near: bool):
    """Blocks of each rank, and the ranks' work with what they had before."""
    if near:
        owned = _deal_near(work, world_size, tuple(base))
    else:
        owned = _deal_evenly(work, world_size, base)
    return owned, _loads(owned, work, base)


def _deal_evenly(work: Sequence[float], world_size: int, base: Sequence[float]):
    """Head-tail where that is balanced best, else heaviest blocks first."""
    greedy = _even_out(_sorted_greedy(work, world_size, base), work, base)
    spans = head_tail(Span(0, len(work)), [len(work) // world_size] * world_size)
    zigzag = [[p + i for p, length in pair for i in range(length)] for pair in spans]
    return min(zigzag, greedy, key=lambda candidate: max(_loads(candidate, work, base)))


def _loads(owned: Sequence[Sequence[int]], work: Sequence[float], base: Sequence[float]):
    return [
        had + sum(work[block] for block in blocks) for had, blocks in zip(base, owned, strict=True)
    ]


def _deal_near(work: tuple[float, ...], world_size: int, base: tuple[float, ...]):
    """Natural order if it is balanced, else the deal for which the fewest keys travel."""
    each = len(work) // world_size
    mean = (sum(base) + sum(work)) / world_size
    most = _NEAR_ENOUGH * mean
    natural = [list(range(rank * each, (rank + 1) * each)) for rank in range(world_size)]
    if max(_loads(natural, work, base)) <= most:
        return natural
    keys = NearKeys(work)
    proposed = near_blocks(work, keys, [mean - had for had in base], most - mean)
    packed = [[[i for run in runs for i in range(*run)] for runs in ranks] for ranks in proposed]

    def moved(owned):
        """What matters more than traffic, and traffic."""
        runs = [keys.join((block, block + 1) for block in blocks) for blocks in owned]
        return max(*_loads(owned, work, base), most), Traffic(keys, runs).price

    def cost(owned):
        over, (blocks, _) = moved(owned)
        return over, max(_loads(owned, work, base)) + _TRAVEL * keys.unit * blocks

    swapped, *packed = (
        _even_out(owned, work, base, len(work), _NEAR_ENOUGH) for owned in (natural, *packed)
    )
    # Where blocks are few or the guess at documents is wrong, swaps alone may move less.
    best = min(swapped, min(packed, key=cost), key=moved)
    if max(_loads(best, work, base)) > most:
        even = _deal_evenly(work, world_size, base)
        if max(_loads(even, work, base)) <= most:
            return even
    return best


def _sorted_greedy(work: Sequence[float], world_size: int, base: Sequence[float]):
    """Heaviest block first, each to the rank with the least work that has room."""
    owned: list[list[int]] = [[] for _ in range(world_size)]
    loads = list(base)
    each = len(work) // world_size
    for block in sorted(range(len(work)), key=lambda block: (-work[block], block)):
        room = (rank for rank in range(world_size) if len(owned[rank]) < each)
        rank = min(room, key=lambda rank: (loads[rank], rank))
        owned[rank].append(block)
        loads[rank] += work[block]
    return owned


def _even_out(
    owned: list[list[int]], work: Sequence[float], base: Sequence[float], swaps=None, enough=1.0
):
    """Swap blocks of the heaviest rank for lighter ones of others while that helps, and the
    heaviest has more than ``enough`` times the mean."""
    ranks = range(len(owned))
    # (work, block) in ascending order, so that a partner for a swap is found by bisection.
    piles = [sorted((work[block], block) for block in blocks) for blocks in owned]
    loads = [base[r] + sum(weight for weight, _ in piles[r]) for r in ranks]
    # Each swap takes work off the heaviest rank; the limit is for long tails of tiny gains.
    looks = math.inf if swaps is None else _MOST_LOOKS
    for _ in range(16 * len(owned) if swaps is None else swaps):
        heavy = max(ranks, key=lambda r: (loads[r], -r))
        if loads[heavy] * len(owned) <= enough * sum(loads):
            break
        others = sorted((r for r in ranks if r != heavy), key=lambda r: (loads[r], r))
        swap = None
        for light in others:
            gap = loads[heavy] - loads[light]
            swap = _largest_swap(piles[heavy], piles[light], gap)
            if swap is None and looks > 0:
                looks -= len(piles[heavy])
                swap = _best_swap(piles[heavy], piles[light], gap)
            if swap:
                break
        if not swap:
            break
        mine, theirs = swap
        piles[heavy].remove(mine)
        piles[light].remove(theirs)
        bisect.insort(piles[heavy], theirs)
        bisect.insort(piles[light], mine)
        loads[heavy] += theirs[0] - mine[0]
        loads[light] += mine[0] - theirs[0]
    return [[block for _, block in pile] for pile in piles]


def _largest_swap(heavy: list, light: list, gap: float):
    """What :func:`_best_swap` finds where no swap is too large, else None."""
    most = heavy[-1][0]
    if gap / 2 * 1e-9 < most - light[0][0] <= gap / 2:
        return heavy[bisect.bisect_left(heavy, (most, -1))], light[0]
    return None


def _best_swap(heavy: list, light: list, gap: float):
    """The two entries whose swap leaves the smaller of the two new maxima, None if none helps."""
    best, swap = gap / 2 * (1 - 1e-9), None
    for mine in heavy:
        # Moving d = mine - theirs leaves the ranks |gap / 2 - d| from their mean.
        near = bisect.bisect_left(light, (mine[0] - gap / 2, -1))
        for theirs in light[max(near - 1, 0) : near + 1]:
            left = abs(gap / 2 - (mine[0] - theirs[0]))
            if left < best:
                best, swap = left, (mine, theirs)
    return swap
