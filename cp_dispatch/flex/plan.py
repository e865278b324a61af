"""Makes the plan of a FlexAttention call: what handles it and how, or every reason why not."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from torch.distributed.tensor import Shard

from cp_dispatch.by_need.ownership import ownership
from cp_dispatch.by_need.plan import PlanByNeed
from cp_dispatch.call import sharded_dims
from cp_dispatch.flex.call import FlexCall
from cp_dispatch.flex.groups import count_groups, keys_travel
from cp_dispatch.flex.hops import MAX_RUNS, fits
from cp_dispatch.flex.refusal import refusals
from cp_dispatch.layouts import Balancer, Span
from cp_dispatch.layouts.spans import chunk
from cp_dispatch.options import Options

_RINGS = ("ring", "natural_ring", "mirrored_ring")
#: Above this many bytes of keys and values of the whole sequence, "auto" takes a ring where
#: possible: a backward holds twice as much, and a graph cannot know that its masks need fewer.
RING_FROM = 2**33
_WHY = {
    "exchange": "each rank is sent only the keys that its rows attend, or all keys are sent to all "
    "ranks if most are needed",
    "gather": "all keys are sent to all ranks",
    "ring": "one kernel call for each owner of keys, merged by their logsumexp",
}


@dataclass(frozen=True)
class FlexPlan(PlanByNeed):
    """How one call of ``flex_attention`` is handled.

    Attributes:
        handler: ``"cp_dispatch"``, ``"stock"`` (unmodified torch) or ``"refused"``.
        schedule: ``"exchange"``: ranks send each other the keys that their rows attend.
            ``"gather"``: all keys go to all ranks. ``"ring"``: like an exchange, but with one
            owner's keys at a time. ``"replicated_keys"``: each rank has all keys. ``"local"``: the
            sequence is not sharded.
        layout: the order of the shards, None for natural order.
        mesh_dims: mesh dims whose ranks share the sequence; ``ring_shape`` has their sizes.
        query_length, key_length: global lengths in positions.
        groups: number of groups of key heads. The keys of one group travel while the kernel of
            another computes (:mod:`cp_dispatch.flex.groups`). With 1, nothing overlaps.
        key_row_bytes: bytes of one position of key and value on a rank.
        reasons: why this plan was made; for ``"refused"`` all the reasons, each with what to do.
        rows_sent: key rows that each rank sends in a forward; None unless the block mask was read
            (:func:`cp_dispatch.explain_flex`). A row covers all batch rows of a rank or, if each
            batch row has its own layout, a single one; ``lanes`` is then their number.
        call: the call in words.
    """

    handler: str
    schedule: str | None = None
    layout: Balancer | None = None
    mesh_dims: tuple[int, ...] = ()
    ring_shape: tuple[int, ...] = ()
    query_length: int = 0
    key_length: int = 0
    key_row_bytes: int = 0
    groups: int = 1
    reasons: tuple[str, ...] = ()
    rows_sent: tuple[int, ...] | None = None
    lanes: int = 1
    call: str = field(default="", compare=False)

    @property
    def sent_row_bytes(self) -> int:
        return self.key_row_bytes // self.lanes

    def extra_bytes(self) -> tuple[int, int]:
        """Bytes that a forward and a backward need beyond inputs and results: the keys and values
        of the whole sequence and, in a backward, their gradients. With groups of heads: the keys
        of the computing group and of the next one, and the gradients of one. In a ring: the shard
        in use and the incoming one; in a backward also the outgoing one, and sums in float32."""
        if self.schedule not in _WHY or self.world_size == 1:
            return 0, 0
        size = self.key_length * self.key_row_bytes
        if self.schedule == "ring":
            shard = -(-self.key_length // self.world_size) * self.key_row_bytes
            return 2 * shard, 6 * shard
        group = size // self.groups
        return (size, 2 * size) if self.groups == 1 else (2 * group, 3 * group)

    def __str__(self) -> str:
        words = self._words_of_others("flex_attention")
        if words is not None:
            return words
        lines = self._head("flex_attention")
        mib = 2**20
        if self.rows_sent is not None:
            lines += [
                f"  rank {rank:4d} sends {rows:7d} rows of keys, "
                f"{rows * self.sent_row_bytes / mib:.3f} MiB forward"
                for rank, rows in enumerate(self.rows_sent)
            ]
        forward, backward = (size / mib for size in self.extra_bytes())
        lines.append(f"  extra memory: {forward:.3f} MiB forward, {backward:.3f} MiB backward")
        return "\n".join([*lines, *self._why])


def make_plan(options: Options, call: FlexCall) -> FlexPlan:
    """Plan a call that involves a DTensor, without reading any data."""
    reasons = refusals(call, options.layout)
    if reasons:
        return FlexPlan("refused", reasons=tuple(reasons), call=call.describe())
    query, key = call.query, call.key
    mesh = query.device_mesh
    ring = sharded_dims(query, 2)
    if not ring:
        schedule, why = "local", "the sequence is not sharded"
    elif Shard(2) not in key.placements:
        schedule, why = "replicated_keys", "each rank has all keys"
    else:
        schedule, why = _moving(options, call, ring)
    count, *why_groups = _groups(options, call, schedule, ring)
    return FlexPlan(
        "cp_dispatch",
        schedule=schedule,
        layout=options.order if ring else None,
        mesh_dims=ring,
        ring_shape=tuple(map(mesh.size, ring)),
        query_length=query.shape[2],
        key_length=key.shape[2],
        key_row_bytes=_key_row_bytes(call),
        groups=count,
        reasons=(why, *why_groups),
        lanes=_lanes(query, options.layout),
    )


def _groups(options: Options, call: FlexCall, schedule: str, ring: tuple[int, ...]) -> tuple:
    """The number of groups of heads, from what all ranks and a graph know, and the reason."""
    mesh = call.query.device_mesh
    ranks = math.prod(map(mesh.size, ring))
    if schedule not in ("exchange", "gather") or ranks == 1:
        return (1,)
    if not keys_travel(schedule, options.layout, call.is_masked):
        where = "natural order" if options.layout is None else "an order close to natural order"
        return 1, (
            "one kernel, which waits for keys: groups of heads are chosen without reading the "
            f"mask, and in {where} it is assumed to be a window or short documents; if it needs "
            'most keys, a layout or schedule="gather" may overlap them'
        )
    sharers = math.prod(mesh.size(dim) for dim in sharded_dims(call.query, 1))
    heads, key_heads = int(call.query.shape[1]), int(call.key.shape[1])
    count, key_length = 1, int(call.key.shape[2])
    if heads % sharers == key_heads % sharers == 0:
        count = count_groups(
            _largest_share(call.query, 0) * (int(call.query.shape[2]) // ranks), heads // sharers,
            key_heads // sharers, (key_length - key_length // ranks) * _key_row_bytes(call),
        )  # fmt: skip
    if count == 1:
        return 1, "one kernel, which waits for keys: too few rows, key heads or bytes for several"
    return count, (
        f"{count} groups of key heads: the keys of one travel while the kernel of another "
        "computes, and so do the gradients on their way back"
    )


def _largest_share(tensor, tensor_dim: int) -> int:
    """The largest number of batch rows or heads on any rank."""
    ranks = math.prod(tensor.device_mesh.size(dim) for dim in sharded_dims(tensor, tensor_dim))
    return -(-int(tensor.shape[tensor_dim]) // ranks)


def _lanes(query, layout: Balancer | None) -> int:
    """The largest number of batch rows on any rank that each have their own order; else 1."""
    return max(1, _largest_share(query, 0)) if layout is not None and layout.rows > 1 else 1


def _moving(options: Options, call: FlexCall, ring: tuple[int, ...]) -> tuple[str, str]:
    """The schedule of a call whose keys are sharded, and why."""
    if options.schedule == "gather":
        return "gather", _WHY["gather"]
    size, why = int(call.key.shape[2]) * _key_row_bytes(call), ""
    if options.schedule == "auto" and size > RING_FROM:
        why = f"{size / 2**30:.1f} GiB of keys and values are too much to hold at once; "
    elif options.schedule not in _RINGS:
        return "exchange", _WHY["exchange"]
    mesh = call.query.device_mesh
    shape = tuple(map(mesh.size, ring))
    layout = "" if options.order is None else options.order.text
    lengths = int(call.query.shape[2]), int(call.key.shape[2])
    if not all(fits(ownership(length, shape, layout)) for length in lengths):
        why += f"no ring, because some rank has no rows or more than {MAX_RUNS} runs of them"
        return "exchange", f"{why}; {_WHY['exchange']}"
    if not all(_everyone_has_some(call.query, dim) for dim in (0, 1)):
        why += "no ring, because some rank has no batch row or head"
        return "exchange", f"{why}; {_WHY['exchange']}"
    return "ring", why + _WHY["ring"]


def _everyone_has_some(query, tensor_dim: int) -> bool:
    span = Span(0, int(query.shape[tensor_dim]))
    for mesh_dim in sharded_dims(query, tensor_dim):
        span = chunk(span, query.device_mesh.size(mesh_dim))[-1]
    return span.length > 0


def _key_row_bytes(call: FlexCall) -> int:
    key, dims = call.key, int(call.key.shape[3]) + int(call.value.shape[3])
    return _largest_share(key, 0) * _largest_share(key, 1) * dims * key.dtype.itemsize
