"""Predicts how long a rank takes with each schedule, as the sum of its phases."""

from __future__ import annotations

from cp_dispatch.costs.pieces import Links, Pieces
from cp_dispatch.schedules import SCHEDULES
from cp_dispatch.schedules.gather_plan import plan_apart, plan_of
from cp_dispatch.schedules.mirrored_gather import parcels_before, shares_of, slots_before
from cp_dispatch.schedules.prefix_plan import prefixes_of


def _ring(model: Pieces, rank: int) -> float:
    plan, geometry = model.plan, model.plan.geometry
    ranks, total, incoming_sums = plan.world_size, 0.0, 0.0
    # Pushed, dK and dV are shares as the kernels give them; passed on, they are sums.
    sums_row = model.sums_row
    if model.pushed:
        sums_row = model.key_row // plan.dtype.itemsize * plan.gradient_itemsize
    for hop in range(ranks):
        owner = (rank - hop) % ranks
        tiles = geometry.tiles(rank, owner)
        compute = model.kernels(tiles) + model.merges(tiles, first=hop == 0)
        moving = incoming_sums
        if hop < geometry.key_transitions:
            coming = geometry.key_length((owner - 1) % ranks) * model.key_row
            moving += model.push(coming, "shift")
        if model.backward:
            sums = geometry.key_length(owner) * sums_row
            compute += model.copy(sums) if tiles else 0.0
            if hop or not model.pushed:
                incoming_sums = model.push(sums, "shift")
        total += model.beside(compute, moving, model.pushed)
    if model.backward:
        own = geometry.key_length(rank) * model.key_row
        home = incoming_sums if model.pushed else model.move("shift", own, ranks)
        total += home + model.copy(own)
    return total


def _exchange(model: Pieces, rank: int, row: float) -> float:
    """Seconds of exchanging half a rank's rows with the mirror rank: packing, moving, joining."""
    rows = model.plan.geometry.query_length(rank)
    return model.push(rows * row / 2, "shift") + 2 * model.copy(rows * row)


def _mirrored_ring(model: Pieces, rank: int) -> float:
    inputs = model.query_row + model.key_row
    there = inputs + (2 * model.output_row if model.backward else 0)
    back = inputs if model.backward else model.output_row
    return _exchange(model, rank, there) + _ring(model, rank) + _exchange(model, rank, back)


def _gather(model: Pieces, rank: int) -> float:
    plan, geometry = model.plan, model.plan.geometry
    found = (plan_apart if model.pushed else plan_of)(geometry, rank)
    ranks, length = plan.world_size, geometry.key_length(rank)
    coming = model.push((ranks - 1) * length * model.key_row, "all_gather")
    own, rest = list(found.own), list(found.rest)
    if not model.backward:
        home = model.kernels(own) if len(own) < 2 else model.kernel(
            sum(t.query_length for t in own), own[0].key_length, own[0].causal
        )  # fmt: skip
        return model.beside(home, coming, True) + model.kernels(rest) + model.merges(rest, False)
    sums = ranks * length * model.key_row / plan.dtype.itemsize * plan.gradient_itemsize
    going = model.push(sums * (ranks - 1) / ranks, "all_to_all")
    early, late = _divided(model, own)
    parts = model.beside(early, coming, True) + model.kernels(rest)
    return (
        parts + model.beside(late, going, True) + model.merges(own + rest, True) + model.copy(sums)
    )


def _divided(model: Pieces, own) -> tuple[float, float]:
    """Seconds of the two parts of the work with own keys, see :mod:`cp_dispatch.schedules.home`."""
    if len(own) > 1:
        half = len(own) // 2
        return model.kernels(own[:half]), model.kernels(own[half:])
    half = sum(model.kernel(x.query_length, x.key_length, x.causal, 0.5) for x in own)
    return half, half


def _one_call(model: Pieces, rank: int) -> float:
    plan, geometry = model.plan, model.plan.geometry
    ranks = plan.world_size
    prefixes = prefixes_of(geometry, rank)
    coming = sum(prefix.keys for prefix in prefixes) * model.key_row * (ranks - 1) / ranks
    total = model.push(coming, "all_gather")
    for rows, keys in prefixes:
        # The rows' own keys under the diagonal, and all before them.
        if not geometry.causal:
            total += model.kernel(rows, keys, False)
            continue
        total += model.kernel(rows, rows, True)
        total += model.kernel(rows, keys - rows, False) if keys > rows else 0.0
    if model.backward:
        sums = coming / plan.dtype.itemsize * plan.gradient_itemsize
        total += model.push(sums, "all_to_all") + model.copy(sums)
    return total


def _mirrored_gather(model: Pieces, rank: int) -> float:
    geometry, backward = model.plan.geometry, model.backward
    mirror = model.plan.world_size - 1 - rank
    shares = shares_of(geometry, rank, backward)
    row = model.query_row if backward else model.output_row
    back = model.push(geometry.query_length(rank) / 2 * row, "shift")
    late, copied = _home(model, rank)[1], 0.0
    if backward:
        # Shares of dK and dV that a rank sends, or that come to it, whichever are more.
        ranks = range(model.plan.world_size)
        sent = max(_shares(model, (rank,), ranks), _shares(model, ranks, (rank,)))
        late = model.beside(late, model.push(sent, "all_to_all"), True)
        copied = model.copy(_shares(model, ranks, (rank,)))
    own = _until_sent(model, rank) + model.kernels(shares.own) + late
    if shares.given:
        own = max(own, _until_sent(model, mirror) + back)
    return own + model.merges(shares.of_rows, True) + copied


def _home(model: Pieces, rank: int) -> tuple[float, float]:
    """Seconds of both parts of the work of a mirrored gather with own keys."""
    shares = shares_of(model.plan.geometry, rank, model.backward)
    if model.backward:
        return _divided(model, shares.home)
    return model.kernels(shares.home), model.kernels(shares.late)


def _shares(model: Pieces, ranks, owners) -> float:
    """Bytes of dK and dV that some ranks compute of the keys of others."""
    plan = model.plan
    found = sum(
        parcel.length
        for rank in ranks
        for owner in owners
        for parcel in parcels_before(plan.geometry, rank, owner)
        if rank != owner
    )
    return found * model.key_row / plan.dtype.itemsize * plan.gradient_itemsize


def _until_sent(model: Pieces, rank: int) -> float:
    """Seconds until a rank has computed its mirror's rows."""
    plan, geometry = model.plan, model.plan.geometry
    shares, others = shares_of(geometry, rank, model.backward), plan.world_size - 1
    if model.pushed:
        owners = (owner for owner in range(plan.world_size) if owner != rank)
        others = sum(bool(slots_before(geometry, rank, owner)) for owner in owners)
    coming = model.push(others * geometry.key_length(rank) * model.key_row, "all_gather")
    if shares.mirrors:
        rows = model.query_row + (2 * model.output_row if model.backward else 0)
        coming += model.push(geometry.query_length(rank) / 2 * rows, "shift")
    return model.beside(_home(model, rank)[0], coming, True) + model.kernels(shares.mirrors)


def _heads(model: Pieces, rank: int) -> float:
    """Stages of moving there, computing, and moving back. In overlapping phases the longer part
    counts."""
    plan = model.plan
    schedule = SCHEDULES[plan.schedule_name]
    ranks = schedule.ranks or plan.world_size
    messages = schedule.messages(plan, rank, model.backward)
    # Copy engines pack nothing on the way out; on the way home all is copied out of the room.
    pushed = schedule.ranks is None and model.pushes(ranks)
    name = "push" if pushed else "all_to_all"
    there, compute, back = [], [], []
    for stage in messages.stages:
        moves = messages.of_stage(stage)
        for found, parts in zip((there, back), moves, strict=True):
            sizes = [move.bytes for move in parts]
            copied = sum(sizes) * ranks / (ranks - 1)
            seconds = sum(model.move(name, size, ranks) for size in sizes)
            found.append(seconds + model.copy(0 if pushed and found is there else copied))
        compute.append(_of_stage(model, messages, stage))
    total, count = there[0] + back[-1], len(there)
    for i in range(count):
        moving = (there[i + 1] if i + 1 < count else 0.0) + (back[i - 1] if i else 0.0)
        seconds, links_busy = compute[i]
        total += max(model.beside(seconds, moving, pushed), moving + links_busy)
    return total


def _of_stage(model: Pieces, messages, stage) -> tuple[float, float]:
    """The kernels of one stage, or the ring among groups, and for how long that moves keys."""
    across = messages.across(stage)
    if across:
        links = model.links
        if links is not None:
            shared = SCHEDULES[model.plan.schedule_name].ranks
            links = Links(max(1, links.node // shared), links.bandwidth, links.latency)
        inner = [Pieces(x, model.constants, links, model.dim, model.direction) for x in across]
        moves = [(m, t) for m in inner for t in m.plan.transfers(messages.group)[model.backward]]
        return (
            sum(PHASES[m.plan.schedule](m, messages.group) for m in inner),
            sum(m.move("shift", t.bytes, m.plan.world_size) for m, t in moves),
        )
    plan = model.plan
    coarse = SCHEDULES[plan.schedule_name].coarse(plan.geometry)
    heads = plan.shards[0][1]
    seconds = sum(
        model.kernel(tile.query_length, tile.key_length, tile.causal, segment.query.length / heads)
        for segment in messages.segments(stage)
        for tile in coarse.tiles(0, 0)
    )
    return seconds, 0.0


PHASES = {
    "ring": _ring,
    "mirrored_ring": _mirrored_ring,
    "gather": _gather,
    "one_call": _one_call,
    "mirrored_gather": _mirrored_gather,
    "ulysses": _heads,
    "hybrid": _heads,
}
