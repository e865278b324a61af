"""How long a plan's forward and backward take, from the constants of a kind of GPU.

A schedule is a few phases. In each, kernels of the compute stream and moves of the other one run
side by side, and the longer one counts; a rank's time is the sum of its phases, and the slowest
rank's is that of the call. Calls with little work take as long as the host and the latencies: the
measured floor. What is left out: the fabric's contention between ranks, power limits, other work.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from cp_dispatch.backends import wide_dtype
from cp_dispatch.costs.constants import Constants
from cp_dispatch.schedules import SCHEDULES
from cp_dispatch.schedules.gather_plan import plan_of
from cp_dispatch.schedules.prefix_plan import prefixes_of

if TYPE_CHECKING:
    from cp_dispatch.plan import Plan


class Prediction(NamedTuple):
    """Seconds."""

    forward: float
    backward: float


@dataclass(frozen=True)
class Links:
    """How ranks are connected: ``node`` of them as those that were measured, and nodes by one link
    for each rank. For extrapolation; the numbers are the cluster's, not measured."""

    node: int
    bandwidth: float
    latency: float


def predict(plan: Plan, constants: Constants, links: Links | None = None) -> Prediction | None:
    """Seconds of a plan that cp_dispatch handles; None where no constants say how fast its kernel
    is, or where it is not one of the schedules between which there is a choice."""
    kernels = constants.kernels.get(plan.backend, {})
    dim = max(plan.shards[0][3], plan.shards[2][3])
    fitting = sorted(d for d in kernels if d >= dim)
    if plan.schedule not in _PHASES or plan.dtype.itemsize != 2 or not fitting:
        return None
    found = []
    for direction in ("forward", "backward"):
        model = _Model(plan, constants, links, fitting[0], direction)
        seconds = max(_PHASES[plan.schedule](model, rank) for rank in _looked_at(plan.world_size))
        found.append(max(seconds, _floor(plan, constants, direction) * _stages(plan)))
    return Prediction(*found)


def _floor(plan: Plan, constants: Constants, direction: str) -> float:
    """What the host takes. A hybrid, which two ranks have none of, is both of its schedules."""
    found = constants.floor(plan.schedule, direction, plan.world_size)
    if found or plan.schedule != "hybrid":
        return found
    parts = "ulysses", plan.across
    return sum(constants.floor(name, direction, plan.world_size) for name in parts)


def _stages(plan: Plan) -> int:
    """Each is as much for the host as a call of one."""
    schedule = SCHEDULES[plan.op_schedule]
    return len(schedule.messages(plan, 0).stages) if hasattr(schedule, "messages") else 1


def _looked_at(ranks: int) -> list[int]:
    """The ranks whose time is added up: all of few; of many, the ends and the middle."""
    if ranks <= 16:
        return list(range(ranks))
    return [0, 1, ranks // 2, ranks - 2, ranks - 1]


class _Model:
    """One direction of one plan."""

    def __init__(self, plan: Plan, constants: Constants, links, dim: int, direction: str):
        self.plan, self.constants, self.links = plan, constants, links
        self.dim, self.direction = dim, direction
        self.backward = direction == "backward"
        (batch, heads, _, dim), (_, key_heads, _, _), (_, _, _, value_dim) = plan.shards
        size = plan.dtype.itemsize
        self._heads = batch * heads
        #: Bytes of a position: query, output, key and value, and dK and dV as they travel.
        self.query_row = batch * heads * dim * size
        self.output_row = batch * heads * value_dim * size
        self.key_row = plan.key_row_bytes
        wide = wide_dtype(plan.dtype).itemsize
        self.sums_row = self.key_row // size * wide
        self._pairs = 2 * batch * heads * (dim + value_dim) * (2.5 if self.backward else 1)

    def kernels(self, tiles) -> float:
        """Of tiles, one call each."""
        return sum(self.kernel(x.query_length, x.key_length, x.causal) for x in tiles)

    def kernel(self, rows: int, keys: int, causal: bool, share: float = 1.0) -> float:
        """Of one call, with a share of the heads."""
        flops = self._pairs * rows * keys * share * (0.5 if causal else 1)
        name = f"{self.direction} causal" if causal else self.direction
        heads = self._heads * share
        return self.constants.kernel(self.plan.backend, self.dim, name, heads, flops)

    def merges(self, tiles, first: bool) -> float:
        """Of what tiles give with what there is already: outputs, or dQ."""
        curve = self.constants.copy if self.backward else self.constants.merge
        row = self.query_row if self.backward else self.output_row
        return sum(curve(tile.query_length * row) for tile in tiles[first:])

    def copy(self, size: float) -> float:
        return self.constants.copy(size)

    @property
    def pushed(self) -> bool:
        """Whether copy engines move what the plan's ranks send each other. A ring among groups has
        no mailboxes."""
        return self.plan.owners is None and self.pushes(self.plan.world_size)

    def push(self, size: float, otherwise: str) -> float:
        """Of ``size`` bytes by copy engines, or the collective that is there without them."""
        return self.move("push" if self.pushed else otherwise, size, self.plan.world_size)

    def move(self, name: str, size: float, ranks: int) -> float:
        """Of ``size`` bytes that reach a rank from ``ranks - 1`` others (a shift: from one)."""
        moves = self.constants.moves
        seconds = moves[name](size)
        if size <= 0 or not self._spans_nodes(ranks):
            return seconds
        links = self.links
        if name == "all_gather":  # once into each node, by the links of all its ranks
            outside = size * (1 - links.node / ranks) / links.node
        elif name == "shift":
            outside = size
        else:
            outside = size * (ranks - links.node) / (ranks - 1)
        return max(seconds, outside / links.bandwidth + links.latency)

    def pushes(self, ranks: int) -> bool:
        """Whether copy engines move what these ranks send each other."""
        return "push" in self.constants.moves and not self._spans_nodes(ranks)

    def _spans_nodes(self, ranks: int) -> bool:
        return self.links is not None and ranks > self.links.node

    def beside(self, compute: float, moving: float, pushed: bool = False) -> float:
        """Both at once. Copy engines take nothing from kernels."""
        if not moving or (pushed and self.pushed):
            return max(compute, moving)
        return max(compute + min(compute, moving) * (self.constants.slowdown - 1), moving)


def _ring(model: _Model, rank: int) -> float:
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


def _exchange(model: _Model, rank: int, row: float) -> float:
    """Halves of a rank's rows with the mirror rank: packed, moved, and put together."""
    rows = model.plan.geometry.query_length(rank)
    return model.push(rows * row / 2, "shift") + 2 * model.copy(rows * row)


def _mirrored_ring(model: _Model, rank: int) -> float:
    inputs = model.query_row + model.key_row
    there = inputs + (2 * model.output_row if model.backward else 0)
    back = inputs if model.backward else model.output_row
    return _exchange(model, rank, there) + _ring(model, rank) + _exchange(model, rank, back)


def _gather(model: _Model, rank: int) -> float:
    plan, geometry = model.plan, model.plan.geometry
    found = plan_of(geometry, rank)
    ranks, length = plan.world_size, geometry.key_length(rank)
    coming = model.push((ranks - 1) * length * model.key_row, "all_gather")
    own, rest = list(found.own), list(found.rest)
    if not model.backward:
        home = model.kernels(own) if len(own) < 2 else model.kernel(
            sum(t.query_length for t in own), own[0].key_length, own[0].causal
        )  # fmt: skip
        return model.beside(home, coming, True) + model.kernels(rest) + model.merges(rest, False)
    mirrored = plan.schedule == "mirrored_gather"
    half = (len(own) + mirrored) // 2
    sums = ranks * length * model.key_row / plan.dtype.itemsize * plan.gradient_itemsize
    going = model.push(sums * (ranks - 1) / ranks, "all_to_all")
    parts = model.beside(model.kernels(own[:half]), coming, True)
    # Pushed, shares of tiles under a diagonal go last, while the others are under way.
    diagonal, late = [tile for tile in rest if tile.causal], going
    if diagonal and model.pushed:
        late *= sum(t.key_length for t in diagonal) / sum(t.key_length for t in rest)
    parts += model.kernels([tile for tile in rest if not tile.causal])
    parts += model.beside(model.kernels(diagonal), going - late, True)
    parts += model.beside(model.kernels(own[half:]), late, True)
    return parts + model.merges(own + rest, True) + model.copy(sums)


def _one_call(model: _Model, rank: int) -> float:
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


def _mirrored_gather(model: _Model, rank: int) -> float:
    there = model.query_row + (2 * model.output_row if model.backward else 0)
    back = model.query_row if model.backward else model.output_row
    half = model.plan.geometry.query_length(rank) / 2
    # Halves are used where they come; results are put in their place.
    swaps = model.push(half * there, "shift") + model.push(half * back, "shift")
    return swaps + _gather(model, rank) + model.copy(half * back)


def _heads(model: _Model, rank: int) -> float:
    """Stages of moving there, computing, and moving back: of the middle ones the longer counts."""
    plan = model.plan
    schedule = SCHEDULES[plan.op_schedule]
    ranks = schedule.ranks or plan.world_size
    messages = schedule.messages(plan, rank)
    # Copy engines pack nothing on the way out; on the way home all is copied out of the room.
    pushed = schedule.ranks is None and model.pushes(ranks)
    name = "push" if pushed else "all_to_all"
    there, compute, back = [], [], []
    for stage in messages.stages:
        moves = messages.of_stage(stage, model.backward)
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


def _of_stage(model: _Model, messages, stage) -> tuple[float, float]:
    """The kernels of one stage, or the ring among groups, and for how long that moves keys."""
    across = messages.across(stage)
    if across:
        links = model.links
        if links is not None:
            shared = SCHEDULES[model.plan.op_schedule].ranks
            links = Links(max(1, links.node // shared), links.bandwidth, links.latency)
        inner = [_Model(x, model.constants, links, model.dim, model.direction) for x in across]
        moves = [(m, t) for m in inner for t in m.plan.transfers(messages.group)[model.backward]]
        return (
            sum(_PHASES[m.plan.schedule](m, messages.group) for m in inner),
            sum(m.move("shift", t.bytes, m.plan.world_size) for m, t in moves),
        )
    plan = model.plan
    coarse = SCHEDULES[plan.op_schedule].coarse(plan.geometry)
    heads = plan.shards[0][1]
    seconds = sum(
        model.kernel(tile.query_length, tile.key_length, tile.causal, segment.query.length / heads)
        for segment in messages.segments(stage)
        for tile in coarse.tiles(0, 0)
    )
    return seconds, 0.0


_PHASES = {
    "ring": _ring,
    "mirrored_ring": _mirrored_ring,
    "gather": _gather,
    "one_call": _one_call,
    "mirrored_gather": _mirrored_gather,
    "ulysses": _heads,
    "hybrid": _heads,
}
