"""The ring schedule: key/value shards travel, queries stay.

After Liu et al., "Ring Attention with Blockwise Transformers" (arXiv:2310.01889). With W ranks,
hop h finds the keys of owner ``(rank - h) % W`` on each rank::

    hop      rank 0   rank 1   rank 2   rank 3
     0         kv0      kv1      kv2      kv3     no communication
     1         kv3      kv0      kv1      kv2
     2         kv2      kv3      kv0      kv1
     3         kv1      kv2      kv3      kv0

Each transfer starts together with the current block, so the two overlap. Keys stop moving when no
later rank needs them: for a causal mask in natural order, ``kv3`` never leaves rank 3, and nothing
goes around the end of the ring.

In the backward, an owner's dK and dV follow its keys one hop behind. While a rank computes its
block, the sum so far arrives from the previous rank; the rank adds its share and passes the sum on,
and the last of W moves brings it back to the owner.
"""

from __future__ import annotations

import contextlib

from torch import Tensor

from cp_dispatch.backends import wide_dtype
from cp_dispatch.layouts import Tile, laid_out
from cp_dispatch.schedules.accumulate import OutputAccumulator, QueryGradient
from cp_dispatch.schedules.blocks import Rows, backward_block, forward_block
from cp_dispatch.schedules.gradients import TravellingGradient, mask_gradient
from cp_dispatch.schedules.job import Job
from cp_dispatch.schedules.pair import Pair
from cp_dispatch.schedules.pushed_ring import (
    PushedShards,
    ReturnedShares,
    places,
    shares_overlap,
)
from cp_dispatch.schedules.ranges import each_hop

geometry = laid_out


def forward(job: Job, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Attention of this rank's rows over all keys.

    Args:
        job: the rest of the call.
        query: ``(B, H, Sq, D)``, this rank's shard; key, value: ``(B, Hkv, Sk, D or Dv)``.

    Returns:
        output ``(B, H, Sq, Dv)`` in the backend's output dtype, and logsumexp ``(B, H, Sq)``.
    """
    hops = _hops(job, query)
    dtype = job.backend.output_dtype(query.dtype)
    lse_dtype = job.backend.logsumexp_dtype(query.dtype)
    result = OutputAccumulator(query, value.size(-1), sum(hops, ()), dtype, lse_dtype)
    keys = _keys(key, value, job)
    for tiles in each_hop("ring", hops):
        with keys.moving_on():
            forward_block(job, query, keys.key, keys.value, tiles, result)
    return result.finish()


def backward(
    job: Job,
    grad_output: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    logsumexp: Tensor,
    key_grad: bool,
    mask_grad: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of this rank's query, key and value shards and of its part of the bias.

    ``key_grad=False`` computes dQ alone, and no dK/dV travel. Shapes as in :func:`forward`.
    """
    hops = _hops(job, query)
    rows = Rows(grad_output, query, output, logsumexp)
    query_grad = QueryGradient(query, sum(hops, ()))
    grad_mask = mask_gradient(job.mask, query.dtype) if mask_grad else None
    keys = _keys(key, value, job)
    pushed = isinstance(keys, PushedShards)
    travelling = _key_gradient(key, value, job, pushed) if key_grad else None
    for tiles in each_hop("ring_backward", hops):
        with keys.moving_on():
            shares = backward_block(job, rows, keys.key, keys.value, tiles, query_grad, grad_mask)
            if travelling is not None:
                travelling.add(shares)
        if travelling is not None:
            travelling.pass_on()
    dk, dv = travelling.finish() if travelling is not None else (None, None)
    return query_grad.finish(), dk, dv, grad_mask


def _hops(job: Job, query: Tensor) -> list[tuple[Tile, ...]]:
    """The tiles that this rank computes at each hop."""
    world_size = job.geometry.world_size
    return [job.tiles((job.rank - hop) % world_size, query) for hop in range(world_size)]


def _keys(key: Tensor, value: Tensor, job: Job) -> TravellingKeys | PushedShards:
    box = _box("ring keys", Pair(key, value), job)
    return TravellingKeys(key, value, job) if box is None else PushedShards(key, value, job, box)


def _key_gradient(
    key: Tensor, value: Tensor, job: Job, pushed: bool
) -> TravellingGradient | ReturnedShares:
    """``pushed``: whether copy engines move the keys; if not, they do not move gradients either."""
    dtype, box = job.backend.gradient_dtype(key.dtype), None
    if pushed:
        # This looks at all pairs of ranks, which are few: the ranks of one host.
        dtype = wide_dtype(dtype) if shares_overlap(job.geometry) else dtype
        box = _box("ring gradients", Pair(key, value, dtype), job)
    if box is None:
        return TravellingGradient(key, value, job.geometry, job.rank, job.ring, job.key_grad_dtype)
    return ReturnedShares(key, value, job, box, dtype)


def _box(name: str, pair: Pair, job: Job):
    """The mailbox for the shards in transit."""
    if job.ring is None:
        return None
    world_size = job.geometry.world_size
    longest = max(map(job.geometry.key_length, range(world_size)))
    return job.ring.mailbox(name, places(world_size) * pair.numel(longest) * pair.dtype.itemsize)


class TravellingKeys:
    """The current key/value shard, and the next one in transit.

    Holds two buffers of one key/value shard each, in addition to the rank's own tensors.
    """

    def __init__(self, key: Tensor, value: Tensor, job: Job):
        self.key, self.value = key, value
        self._pair = Pair(key, value)
        self._geometry = geometry = job.geometry
        self._ring = ring = job.ring
        self._hop = 0
        self._transitions = geometry.key_transitions if ring is not None else 0
        # Allocated on the current stream, although the side stream may fill them: the current
        # stream has waited for every move before they are freed.
        length = max(map(geometry.key_length, range(geometry.world_size)))
        self._buffers = [self._pair.buffer(length) for _ in range(2 if self._transitions else 0)]

    @contextlib.contextmanager
    def moving_on(self):
        """In this context, compute with ``key`` and ``value`` while the shard of the next hop
        arrives, if some rank still needs one. Afterwards that shard is the current one."""
        if self._hop >= self._transitions:
            yield
            self._hop += 1
            return
        mark = self._ring.mark()
        if mark is None:
            work, there, length = self._post()
            yield
        else:
            yield
            with self._ring.after(mark):
                work, there, length = self._post()
        work.wait()
        self.key, self.value = self._pair.views(there, length)
        self._hop += 1

    def _post(self):
        """Start the move to the next hop. Returns its work, where it arrives, and the number of
        rows."""
        rank, previous = (
            self._ring.rank,
            (self._ring.rank - 1) % self._geometry.world_size,
        )
        here, there = self._buffers[self._hop % 2], self._buffers[(self._hop + 1) % 2]
        if self._hop == 0 and self._leaves(rank):
            self._pair.pack(self.key, self.value, here)
        outgoing, incoming = (self._moving(r) for r in (rank, previous))
        send, receive = (
            here[: self._pair.numel(outgoing)],
            there[: self._pair.numel(incoming)],
        )
        return self._ring.shift(send, receive), there, incoming

    def _owner(self, rank: int) -> int:
        return (rank - self._hop) % self._geometry.world_size

    def _moving(self, rank: int) -> int:
        """The number of rows that ``rank`` passes on in this move."""
        return self._geometry.key_length(self._owner(rank)) if self._leaves(rank) else 0

    def _leaves(self, rank: int) -> bool:
        """Whether the keys that ``rank`` holds are needed at a later hop."""
        return self._geometry.last_hop(self._owner(rank)) > self._hop
