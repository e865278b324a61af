"""``MaskJob``: arguments about the mask and the ranks that all FlexAttention ops share."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cp_dispatch._compat import all_gather_single, resolve_group
from cp_dispatch.by_need.kept import Kept, KeptByAll
from cp_dispatch.by_need.ownership import Ownership, lanes_of, ownership
from cp_dispatch.flex import needs as needs_
from cp_dispatch.flex.cut import Blocks, cut, dense, own_part, pack, packed_shapes, touched
from cp_dispatch.flex.exchange import Exchange
from cp_dispatch.flex.hops import Hop, Window, window
from cp_dispatch.flex.own_rows import check_order
from cp_dispatch.layouts import from_text

kept, told = Kept(), KeptByAll()


def key_of(arguments: Sequence) -> tuple:
    """A key of the shared arguments, as ops get them, that distinguishes calls with the same mask
    tensors."""
    _, _, _, _, queries, keys, blocks, part, ring_shape, *rest = arguments
    # A flat tuple, which is fast to create and look up; all but the ring's shape have a fixed
    # length.
    return (queries, keys, *blocks, *part, *ring_shape, *rest)


class Known:
    """What was worked out about a mask for a rank: one object, because each op has to make sure
    that the mask is still the same."""

    def __init__(self):
        #: None until :meth:`find_exchange`.
        self.exchange: Exchange | None = None
        self._cuts: dict[tuple[int, bool], Tensor] = {}

    def find_exchange(self, arguments: Sequence, device: torch.device, check=None) -> Exchange:
        self.exchange = _new_exchange(arguments, device, check)
        return self.exchange

    def cut(self, arguments: Sequence, hop: int, order: bool) -> Tensor:
        """As :meth:`MaskJob.packed`; must not be written to."""
        found = self._cuts.get((hop, order))
        if found is None:
            found = self._cuts[hop, order] = MaskJob(*arguments).packed(hop, order)
        return found


def known_of(arguments: Sequence, device: torch.device) -> Known:
    """What is known about a mask with these contents."""
    return kept.get(arguments[:4], (key_of(arguments), device), Known)


def exchange_of(arguments: Sequence, device: torch.device, check=None) -> Exchange:
    """Which rank sends what to which. If the mask has only this rank's rows, this is exchanged with
    the other ranks, after ``check(job)``, which may raise."""
    if arguments[-1]:
        return _new_exchange(arguments, device, check)
    known = known_of(arguments, device)
    return known.exchange or known.find_exchange(arguments, device, check)


def _new_exchange(arguments: Sequence, device: torch.device, check) -> Exchange:
    def make() -> Exchange:
        job = MaskJob(*arguments)
        if check is not None:
            check(job)
        return job.new_exchange(device)

    local_rows, whole = arguments[-2:]
    if not whole:
        return make()
    if local_rows:  # make() would do it for the first of all masks
        MaskJob(*arguments).check_order()
    # All keys go to all ranks, whatever the mask.
    return kept.get((), (key_of(arguments), device, "exchange"), make)


def order_table(device: torch.device, layout: str, ring_rank: int, part) -> Tensor:
    """The result of ``flex_order``; must not be written to."""

    def make() -> Tensor:
        balancer = from_text(layout)
        if ring_rank >= 0:
            order = balancer.positions(ring_rank)
        else:
            order = balancer.inverse if ring_rank == -1 else balancer.indices
        if order.size(0) > 1:
            order = order[part[0] : part[0] + part[1]]
        return order.to(device, torch.int32)

    return kept.get((), (layout, ring_rank, tuple(map(int, part)), str(device), "order"), make)


@functools.lru_cache(maxsize=16)
def _exchange(needs, keys: Ownership, rank: int, device: torch.device) -> Exchange:
    """The same object for masks with the same needs, such as a window that every step recreates."""
    return Exchange(needs, keys, rank, device)


@dataclass(frozen=True)
class MaskJob:
    """The arguments that all ops share; lengths may be symbolic where no tensor has data."""

    kv_num: Tensor
    kv_indices: Tensor
    full_kv_num: Tensor | None
    full_kv_indices: Tensor | None
    query_length: int
    key_length: int
    blocks: tuple[int, int]
    part: tuple[int, int, int, int]
    ring_shape: tuple[int, ...]
    ring_rank: int
    group_name: str
    layout: str
    local_rows: bool
    whole: bool

    @property
    def tensors(self) -> tuple:
        return self.kv_num, self.kv_indices, self.full_kv_num, self.full_kv_indices

    @property
    def lanes(self) -> int:
        """Number of sets of this rank's batch rows that have the same order."""
        own = self.layout and from_text(self.layout).rows > 1
        return max(1, int(self.part[1])) if own else 1

    @property
    def columns(self):
        return (self.key_length + self.blocks[1] - 1) // self.blocks[1]

    @property
    def queries(self) -> Ownership:
        return self._owned(self.query_length)

    @property
    def keys(self) -> Ownership:
        return self._owned(self.key_length)

    def _owned(self, length: int) -> Ownership:
        first, batch, *_ = self.part
        # Also for a single batch row, whose order is its own row of the layout.
        own = self.layout and from_text(self.layout).rows > 1
        lanes = lanes_of(int(first), int(batch)) if own else None
        return ownership(int(length), tuple(self.ring_shape), self.layout, lanes)

    def own_part(self) -> Blocks:
        """The mask of this rank's batch rows and heads."""
        return own_part(self.tensors, self.part)

    @property
    def _key(self) -> tuple:
        return key_of(
            (
                *self.tensors, int(self.query_length), int(self.key_length), self.blocks,
                map(int, self.part), self.ring_shape, self.ring_rank, self.group_name,
                self.layout, self.local_rows, self.whole,
            )
        )  # fmt: skip

    def hop(self, hop: int, device: torch.device) -> Hop:
        """What moves at one hop of the ring."""

        def make() -> Hop:
            needs = kept.get(self.tensors, (self._key, "needs"), self._find_needs)
            return Hop(needs, self.keys, self.ring_rank, hop, self.blocks[1], device)

        return kept.get(self.tensors, (self._key, str(device), hop), make)

    def window(self, hop: int) -> Window:
        """The key blocks of the owner at a hop."""
        owner = (self.ring_rank - hop) % self.keys.world_size
        return window(self.keys, owner, self.blocks[1])

    def new_exchange(self, device: torch.device) -> Exchange:
        """As :func:`exchange_of`, which caches it."""
        return _exchange(self._find_needs(), self.keys, self.ring_rank, device)

    def check_order(self) -> None:
        """Refuse a mask of this rank's rows in another order."""
        if self.local_rows:
            check_order(self.kv_num, self.queries)

    def _find_needs(self) -> needs_.Needs:
        self.check_order()
        if self.whole:
            return needs_.everything(self.queries, self.keys)
        if not self.local_rows:
            return self.needs()
        return told.get(self.tensors, self._key, lambda: self._needs_of_all(self.keys))

    def needs(self) -> needs_.Needs:
        """The keys that every rank needs, from a mask of all rows."""
        tables = self._tables().cpu()
        return needs_.needs_of(tables, self.queries, self.keys, tuple(self.blocks))

    def _tables(self) -> Tensor:
        """``(lanes, query blocks, key blocks)``: which blocks are computed."""
        mask = self.own_part()
        table = dense(mask.kv_num, mask.kv_indices, int(self.columns))
        if mask.full_kv_num is not None:
            table = table | dense(mask.full_kv_num, mask.full_kv_indices, int(self.columns))
        table = table.any(1)
        if self.lanes > 1:
            return table.expand(self.lanes, *table.shape[1:])
        return table.any(0, keepdim=True)

    def _needs_of_all(self, keys: Ownership):
        """Exchange which key blocks every rank's rows compute."""
        own = self._tables().any(1).to(torch.uint8)
        every = own.new_empty((keys.world_size, *own.shape))
        all_gather_single(
            every.view(-1), own.contiguous().view(-1), group=resolve_group(self.group_name)
        )
        return tuple(
            tuple(needs_.runs(lane, self.blocks[1], keys) for lane in rank) for rank in every.cpu()
        )

    @torch.inference_mode(False)  # a backward may read it later
    def packed(self, hop: int, order: bool) -> Tensor:
        """This rank's rows of the mask, at a hop or (-1) for all keys, followed by the true
        positions of the rows if ``order``; see :mod:`cp_dispatch.flex.cut`."""
        self.check_order()
        chosen = None if hop < 0 else self.window(hop)
        where = self.queries, self.ring_rank, self.blocks[0], int(self.columns)
        packed = pack(cut(self.own_part(), *where, chosen, self.local_rows))
        if not order:
            return packed
        table = order_table(packed.device, self.layout, self.ring_rank, self.part)
        return torch.cat([packed, table.flatten()])

    def packed_shapes(self, hop: int) -> list[tuple | None]:
        """Shapes of the tensors of the cut mask."""
        columns = self.columns if hop < 0 else len(self.window(hop).blocks)
        batch = max(self.lanes, _part_size(self.kv_num.size(0), self.part[1]))
        heads = _part_size(self.kv_num.size(1), self.part[3])
        rows = len(touched(self.queries, self.ring_rank, self.blocks[0]).complete)
        return packed_shapes(batch, heads, rows, columns, self.full_kv_num is not None)


def _part_size(size, part):
    return part if size > 1 else 1
