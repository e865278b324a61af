"""Prefixes of the keys for ``"one_call"``: the keys, in natural order, that each run of rows sees.

A run of consecutive positions ``[start, stop)`` sees the keys ``[0, stop)``, under a causal mask
whose diagonal ends at the bottom right. In head-tail order, where rank r owns pieces r and
2W - 1 - r, there are two runs and two prefixes. Without a causal mask all rows see all keys.
"""

from __future__ import annotations

import functools
from itertools import accumulate
from typing import NamedTuple

from cp_dispatch.layouts import Geometry
from cp_dispatch.schedules.gather_plan import Parcel

#: Each run needs memory for its prefix.
MOST_RUNS = 4


class Prefix(NamedTuple):
    """The rows of a run, and the number of keys that its last row sees."""

    rows: int
    keys: int


def reasons_against(geometry, backend) -> list[str]:
    """Why a call cannot be a single kernel call on each rank; empty if it can."""
    if not isinstance(geometry, Geometry):
        return ["each batch row has its own layout"]
    ranks = range(geometry.world_size)
    lengths = {geometry.key_length(rank) for rank in ranks}
    against = []
    if len(lengths) > 1 or 0 in lengths or not all(map(geometry.query_length, ranks)):
        against.append("the ranks' shards of keys differ in length, or some are empty")
    if not geometry.causal:
        return against
    runs = max(map(len, geometry.query_spans))
    if not backend.takes_prefixes:
        against.append(f"the {backend.name} kernel has no causal mask aligned to the bottom right")
    if runs > MOST_RUNS:
        against.append(
            f"a rank's rows are {runs} runs of consecutive positions, more than {MOST_RUNS}"
        )
    elif not all(_are_prefixes(geometry, rank) for rank in ranks):
        against.append("some rows see only part of a run of keys that a rank owns")
    return against


def _are_prefixes(geometry: Geometry, rank: int) -> bool:
    total = sum(map(geometry.key_length, range(geometry.world_size)))
    return all(
        prefix.keys <= total
        and all(
            span.position + span.length <= prefix.keys or span.position >= prefix.keys
            for own in geometry.key_spans
            for span in own
        )
        for prefix in prefixes_of(geometry, rank)
    )


@functools.lru_cache(maxsize=1024)
def prefixes_of(geometry: Geometry, rank: int) -> tuple[Prefix, ...]:
    """The prefixes of a rank's runs, in the order of its rows."""
    if geometry.causal:
        return tuple(Prefix(x.length, x.position + x.length) for x in geometry.query_spans[rank])
    total = sum(map(geometry.key_length, range(geometry.world_size)))
    return (Prefix(geometry.query_length(rank), total),)


@functools.lru_cache(maxsize=1024)
def prefix_starts(geometry: Geometry, rank: int) -> tuple[int, ...]:
    """Where a rank's prefixes start in their concatenation."""
    return tuple(accumulate([0, *(x.keys for x in prefixes_of(geometry, rank)[:-1])]))


@functools.lru_cache(maxsize=1024)
def keys_of(geometry: Geometry, rank: int) -> int:
    """Total number of keys in all prefixes of a rank."""
    return sum(prefix.keys for prefix in prefixes_of(geometry, rank))


@functools.lru_cache(maxsize=256)
def most_keys(geometry: Geometry) -> int:
    """The largest :func:`keys_of` of any rank."""
    return max(keys_of(geometry, rank) for rank in range(geometry.world_size))


@functools.lru_cache(maxsize=4096)
def prefix_parcels(geometry: Geometry, rank: int, owner: int) -> tuple[Parcel, ...]:
    """The parts of ``owner``'s keys in each prefix of ``rank``, and their places; the same for keys
    and for the gradients that are sent back."""
    parcels, place = [], 0
    for span in geometry.key_spans[owner]:
        # Unless the mask depends on positions, keys may be in the order of the ranks.
        before = sum(map(geometry.key_length, range(owner)))
        start = span.position if geometry.causal else before + place
        parcels += [
            Parcel(index, start, span.length, place)
            for index, prefix in enumerate(prefixes_of(geometry, rank))
            if start + span.length <= prefix.keys
        ]
        place += span.length
    return tuple(parcels)


@functools.lru_cache(maxsize=4096)
def gradient_parcels(geometry: Geometry, rank: int, owner: int) -> tuple[Parcel, ...]:
    """:func:`prefix_parcels` for gradients, which are one tensor for all prefixes."""
    starts = prefix_starts(geometry, rank)
    return tuple(
        parcel._replace(tile=0, start=starts[parcel.tile] + parcel.start)
        for parcel in prefix_parcels(geometry, rank, owner)
    )


def pairs_of(geometry: Geometry, rank: int) -> int:
    """The number of (query, key) pairs that a rank's kernel computes."""
    return sum(
        rows * keys - (rows * (rows - 1) // 2 if geometry.causal else 0)
        for rows, keys in prefixes_of(geometry, rank)
    )
