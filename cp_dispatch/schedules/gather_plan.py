"""Plans a gather: what a rank computes with the gathered keys, and whose gradients result."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

from cp_dispatch.layouts import Geometry, Span, Tile
from cp_dispatch.layouts.spans import append
from cp_dispatch.layouts.tiles import cut, tiles

#: For a geometry, a rank and an owner: the pieces of the owner's keys that the rank needs, each
#: with its place among all pieces.
Slots = Callable[[Geometry, int, int], tuple[tuple[int, int], ...]]


def fits(geometry) -> bool:
    """Whether all ranks have the same number of keys, in one range of consecutive positions or in
    two of equal length. If the mask does not depend on positions, any keys count as one range."""
    if not isinstance(geometry, Geometry):
        return False
    lengths = {geometry.key_length(rank) for rank in range(geometry.world_size)}
    return len(lengths) == 1 and min(lengths) > 0 and _pieces(geometry) <= 2


def _pieces(geometry: Geometry) -> int:
    if not geometry.causal:
        return 1
    size = math.gcd(*(span.length for own in geometry.key_spans for span in own))
    return geometry.key_length(0) // size


class Plan(NamedTuple):
    """What a rank computes with its own keys and with the gathered keys, and the number of pieces
    in which each rank's keys are gathered, last piece first."""

    own: tuple[Tile, ...]
    rest: tuple[Tile, ...]
    pieces: int


@functools.lru_cache(maxsize=256)
def plan_of(geometry: Geometry, rank: int) -> Plan:
    """The tiles of a rank; those that need only its own keys are separate."""
    world_size = geometry.world_size
    length = geometry.key_length(0)
    queries = geometry.query_spans[rank]
    if not geometry.causal:
        spans = sum(geometry.key_spans, ())
        (whole,) = tiles(queries, spans, False, 0) or (None,)
        if whole is None:
            return Plan((), (), 1)
        own = _of_keys(whole, rank * length, length)
        before = _of_keys(whole, 0, rank * length)
        after = _of_keys(whole, (rank + 1) * length, (world_size - 1 - rank) * length)
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


@functools.lru_cache(maxsize=256)
def plan_apart(geometry: Geometry, rank: int) -> Plan:
    """As :func:`plan_of`, but every tile with the rank's own keys is separate, and the gathered
    keys are only those of the other ranks, in the order of their positions, so that the keys that
    rows see come first."""
    spans = _joined([span for spans, _, _ in _of_others(geometry, rank) for span in spans])
    rest = tiles(geometry.query_spans[rank], spans, geometry.causal, 0)
    return Plan(geometry.tiles(rank, rank), rest, _pieces(geometry))


def _of_others(geometry: Geometry, rank: int) -> list[tuple[tuple[Span, ...], int, int]]:
    """The pieces of the other ranks' keys, ``(spans, owner, piece)``; under a causal mask in the
    order of their positions."""
    pieces = _pieces(geometry)
    size = geometry.key_length(0) // pieces
    found = [
        (cut(geometry.key_spans[owner], piece * size, size), owner, piece)
        for owner in range(geometry.world_size)
        if owner != rank
        for piece in range(pieces)
    ]
    return sorted(found) if geometry.causal else found


def _of_keys(tile: Tile, start: int, length: int) -> Tile:
    """Cuts a tile of all keys to a range of them."""
    key = tile.key._replace(start=start, length=length)
    return tile._replace(key_start=start, key_length=length, key_place=start, key=key)


def _joined(spans: list[Span]) -> tuple[Span, ...]:
    """The same positions in the same order, in as few spans as possible."""
    joined: list[Span] = []
    for span in spans:
        append(joined, *span)
    return tuple(joined)


class Parcel(NamedTuple):
    """Keys of one owner that one tile of a rank's ``rest`` covers."""

    #: The index of the tile, and the parcel's first key in it.
    tile: int
    start: int
    length: int
    #: The parcel's first key among the owner's keys.
    place: int


@functools.lru_cache(maxsize=4096)
def parcels_of(geometry: Geometry, rank: int, owner: int) -> tuple[Parcel, ...]:
    """Which gradients of ``owner``'s keys ``rank`` computes with gathered keys, in the order in
    which it sends them."""
    plan = plan_of(geometry, rank)
    slots = [
        (plan.pieces - 1 - region, region * geometry.world_size + owner)
        for region in range(plan.pieces)
    ]
    return _parcels(plan.rest, slots, geometry.key_length(0) // plan.pieces)


@functools.lru_cache(maxsize=4096)
def parcels_apart(geometry: Geometry, rank: int, owner: int) -> tuple[Parcel, ...]:
    """As :func:`parcels_of`, for :func:`plan_apart`."""
    plan = plan_apart(geometry, rank)
    found = enumerate(_of_others(geometry, rank))
    slots = [(piece, i) for i, (_, of, piece) in found if of == owner]
    return _parcels(plan.rest, slots, geometry.key_length(0) // plan.pieces)


def _parcels(rest: tuple[Tile, ...], slots, size: int) -> tuple[Parcel, ...]:
    """``slots`` are the pieces of one owner, ``size`` keys each, with their places."""
    parcels = []
    for index, tile in enumerate(rest):
        for piece, slot in slots:
            start = max(tile.key_start, slot * size)
            length = min(tile.key_start + tile.key_length, (slot + 1) * size) - start
            if length > 0:
                place = piece * size + start - slot * size
                parcels.append(Parcel(index, start - tile.key_start, length, place))
    return tuple(parcels)


@functools.lru_cache(maxsize=4096)
def slots_of(geometry: Geometry, rank: int, owner: int) -> tuple[tuple[int, int], ...]:
    """The pieces of ``owner``'s gathered keys that ``rank`` needs, each with its place among all
    pieces."""
    pieces = plan_of(geometry, rank).pieces
    size = geometry.key_length(0) // pieces
    seen = sorted({parcel.place // size for parcel in parcels_of(geometry, rank, owner)})
    return tuple((piece, (pieces - 1 - piece) * geometry.world_size + owner) for piece in seen)


@functools.lru_cache(maxsize=4096)
def slots_apart(geometry: Geometry, rank: int, owner: int) -> tuple[tuple[int, int], ...]:
    """As :func:`slots_of`, for :func:`plan_apart`."""
    size = geometry.key_length(0) // _pieces(geometry)
    seen = max((x.key_start + x.key_length for x in plan_apart(geometry, rank).rest), default=0)
    found = enumerate(_of_others(geometry, rank))
    return tuple((piece, i) for i, (_, of, piece) in found if of == owner and i * size < seen)


#: For a geometry, a rank and an owner: which gradients of the owner's keys the rank computes.
Parcels = Callable[[Geometry, int, int], tuple[Parcel, ...]]


class Order(NamedTuple):
    """In which order gathered keys lie: the functions that plan a gather."""

    plan: Callable[[Geometry, int], Plan]
    slots: Slots
    parcels: Parcels


#: The keys of all ranks, and those of the other ranks by position.
TOGETHER = Order(plan_of, slots_of, parcels_of)
APART = Order(plan_apart, slots_apart, parcels_apart)
