"""``LocalFlex``: this rank's part of a call, with local tensors, mask and arguments of the ops."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from cp_dispatch._compat import compiles_for_inductor, is_tracing, local_tensor
from cp_dispatch.by_need.ownership import Ownership, lanes_of, ownership, rank_at
from cp_dispatch.call import sharded_dims
from cp_dispatch.errors import ContextParallelError
from cp_dispatch.flex import captured
from cp_dispatch.flex.call import FlexCall
from cp_dispatch.flex.cut import Blocks, own_part, packed_shapes, touched, unpack
from cp_dispatch.flex.hops import Window, window
from cp_dispatch.flex.mods import Listed, Place, pieces
from cp_dispatch.flex.own_rows import check_order
from cp_dispatch.flex.plan import FlexPlan
from cp_dispatch.flex.results import not_before
from cp_dispatch.flex.rows import apart, split_rows
from cp_dispatch.graphs.compile_cache import note_groups
from cp_dispatch.graphs.order import stay_in_backward
from cp_dispatch.groups import ring_group_name
from cp_dispatch.layouts import Span
from cp_dispatch.layouts.spans import chunk
from cp_dispatch.once import once

_OPS = torch.ops.cp_dispatch


@dataclass
class LocalFlex:
    """A call on one rank; see Note [Rows in place] and Note [Cutting]."""

    call: FlexCall
    plan: FlexPlan
    #: What :meth:`keys` got together with the keys.
    _cut_with_keys: Tensor | None = None

    @functools.cached_property
    def _coordinate(self) -> list[int]:
        mesh = self.call.query.device_mesh
        return mesh.get_coordinate() or [0] * mesh.ndim

    @functools.cached_property
    def rank(self) -> int:
        """This rank's place among the ranks that share the sequence."""
        return rank_at([self._coordinate[dim] for dim in self.plan.mesh_dims], self.plan.ring_shape)

    @functools.cached_property
    def part(self) -> list[int]:
        """This rank's first batch row, number of batch rows, first head and number of heads, all
        global."""
        query = self.call.query
        mesh, part = query.device_mesh, []
        for tensor_dim in (0, 1):
            span = Span(0, int(query.shape[tensor_dim]))
            for mesh_dim in sharded_dims(query, tensor_dim):
                span = chunk(span, mesh.size(mesh_dim))[self._coordinate[mesh_dim]]
            part += span
        return part

    @property
    def layout(self) -> str:
        return "" if self.plan.layout is None else self.plan.layout.text

    @functools.cached_property
    def _lanes(self) -> int:
        layout = self.plan.layout
        return max(1, self.part[1]) if layout is not None and layout.rows > 1 else 1

    @functools.cached_property
    def queries(self) -> Ownership:
        layout = self.plan.layout
        # Also for a single batch row, whose order is its own row of the layout.
        own = layout is not None and layout.rows > 1
        batch = lanes_of(*self.part[:2]) if own else None
        return ownership(int(self.plan.query_length), self.plan.ring_shape, self.layout, batch)

    @once
    def group_name(self) -> str:
        # If no keys move, ranks without rows would not take part in creating the group.
        if not self._moves_keys:
            return ""
        return ring_group_name(self.call.query.device_mesh, self.plan.mesh_dims)

    @property
    def _moves_keys(self) -> bool:
        return self.plan.schedule in ("exchange", "gather", "ring") and self.plan.world_size > 1

    @property
    def rings(self) -> bool:
        """Whether keys arrive owner by owner (:mod:`cp_dispatch.flex.ring`)."""
        return self.plan.schedule == "ring" and self.plan.world_size > 1

    @property
    def is_grouped(self) -> bool:
        """Whether keys arrive by groups of heads (:mod:`cp_dispatch.flex.grouped`)."""
        return self._moves_keys and self.plan.groups > 1

    @property
    def is_empty(self) -> bool:
        """Whether this rank has nothing to compute, because it has no row, head or batch row."""
        return 0 in local_tensor(self.call.query).shape

    def note_trace(self, state) -> None:
        """Put what a traced graph holds about this rank into the keys of on-disk caches."""
        note_groups(self.call.query, self.group_name, state)

    # -- The mask ---------------------------------------------------------------------------

    @functools.cached_property
    def has_local_rows(self) -> bool:
        """Whether there are only this rank's rows (:func:`cp_dispatch.create_cp_block_mask`)."""
        if not is_tracing():  # in a trace, ops check it when the graph runs
            check_order(self.call.mask.lists.kv_num, self.queries)
        rows, whole, own = self._block_rows
        if rows == whole or self.plan.world_size == 1:
            return False
        if rows != (own + 1 if own == whole else own):
            raise ContextParallelError(
                f"block_mask has {rows} rows of blocks, but the whole sequence has {whole} and "
                f"this rank has {own} (rank {self.rank} of {self.plan.world_size}). Make it with "
                "create_block_mask for the whole sequence, or with "
                "cp_dispatch.create_cp_block_mask for this mesh and layout."
            )
        return True

    @property
    def _block_rows(self) -> tuple[int, int, int]:
        block = self.call.mask.block_size[0]
        own = len(touched(self.queries, self.rank, block).complete)
        whole = -(-int(self.plan.query_length) // block)
        return int(self.call.mask.lists.kv_num.shape[2]), whole, own

    @once
    def mask_arguments(self) -> tuple:
        """The arguments that all ops share, see :class:`cp_dispatch.flex.mask_job.MaskJob`."""
        return (
            *self.call.mask.tensors, self.plan.query_length, self.plan.key_length,
            list(self.call.mask.block_size), self.part, list(self.plan.ring_shape), self.rank,
            self.group_name, self.layout, self.has_local_rows, self.plan.schedule == "gather",
        )  # fmt: skip

    def mask(self, mask_mod, hop: int = -1, heads: Span | None = None) -> tuple:
        """The block mask of this rank's rows for the higher-order op. At a hop it is for the
        owner's window of keys. With ``heads`` it is for these heads alone, counted from this rank's
        first."""
        mask, rows = self.call.mask, local_tensor(self.call.query).shape[2]
        blocks = self._whole_blocks if hop < 0 else self._cut(hop)[0]
        if heads is not None and blocks.kv_num.size(1) > 1:
            parts = [x if x is None else x.narrow(1, *heads).contiguous() for x in blocks]
            blocks = Blocks(*apart(parts))
        keys = None if hop < 0 else self.window(hop).length
        return mask.of_rows(rows, blocks, mask_mod, keys)

    @property
    def _cuts(self) -> bool:
        """Whether this rank's rows are a part of the mask's; or in a graph, where an op has to
        check their order, the mask's own, if no other op reads the mask."""
        no_other = is_tracing() and not self._moves_keys
        return self.plan.world_size > 1 and (no_other or not self.has_local_rows)

    @once
    def _whole_blocks(self) -> Blocks:
        if self._cuts:
            return self._cut_all[0]
        # Triton's kernels assume that batch rows and entries of a list are contiguous.
        own = own_part(self.call.mask.lists, self.part)
        return Blocks(*(x if x is None else x.contiguous() for x in own))

    @once
    def _cut_all(self) -> tuple[Blocks, Tensor | None]:
        return self._cut(-1)

    def window(self, hop: int) -> Window:
        keys = ownership(int(self.plan.key_length), self.plan.ring_shape, self.layout)
        owner = (self.rank - hop) % self.plan.world_size
        return window(keys, owner, self.call.mask.block_size[1])

    def _cut(self, hop: int) -> tuple[Blocks, Tensor | None]:
        """The lists of blocks. Those of all keys come with the table of positions, if the mods take
        one."""
        lists, order = self.call.mask.lists, hop < 0 and self.place.table_lanes > 0
        packed = self._cut_with_keys if hop < 0 else None
        if packed is None:
            packed = _OPS.flex_cut(*self.mask_arguments, hop, order)
        batch, heads = lists.kv_num.shape[:2]
        batch = max(self._lanes, self.part[1] if batch > 1 else 1)
        heads = self.part[3] if heads > 1 else 1
        columns = -(-self.plan.key_length // self.call.mask.block_size[1])
        if hop >= 0:
            columns = len(self.window(hop).blocks)
        shapes = packed_shapes(
            batch, heads, self._block_rows[2], columns, lists.full_kv_num is not None
        )
        if order:
            lanes, rows = self.place.table_lanes, self.queries.rows(self.rank)
            shapes.append((lanes, rows) if lanes > 1 else (rows,))
        parts = apart(unpack(packed, shapes))
        return Blocks(*parts[:8]), parts[8] if order else None

    # -- The mods ---------------------------------------------------------------------------

    @functools.cached_property
    def place(self) -> Place:
        found = None
        lanes = self.queries.lanes
        if self.plan.world_size > 1 and lanes == 1:
            found = pieces(self.queries.spans(self.rank))
        table = lanes if self.plan.world_size > 1 and found is None else 0
        return Place(self.part[0], self.part[2], found, table, listed=self._listed)

    @functools.cached_property
    def _listed(self) -> Listed | None:
        """See Note [Lists in dense kernels]."""
        if compiles_for_inductor():
            return None
        batch, heads = self.call.mask.lists.kv_num.shape[:2]
        return Listed(self.call.mask.block_size, batch > 1, heads > 1, self.has_local_rows)

    def place_of(self, heads: Span) -> Place:
        """As :attr:`place`, for some heads, counted from this rank's first."""
        return dataclasses.replace(self.place, first_head=self.part[2] + heads.position)

    def place_at(self, hop: int) -> Place:
        """As :attr:`place`, for the keys of a hop."""
        window = self.window(hop)
        owned = None if all(window.own) else window.spans
        return dataclasses.replace(self.place, keys=window.pieces, owned=owned)

    @once
    def _table(self) -> Tensor | None:
        if not self.place.table_lanes:
            return None
        if self._cuts:
            return self._cut_all[1]
        query = local_tensor(self.call.query)
        table = _OPS.flex_order(query, self.layout, self.rank, self.part, query.shape[2])
        return table if self.place.table_lanes > 1 else table[0]

    def buffers(self) -> tuple[tuple, tuple]:
        """The captured buffers of :attr:`place`'s mods: those of ``score_mod``, and those of
        ``mask_mod``."""
        of_score, of_mask = (
            self.place.buffers(captured.for_kernel(given, self.plan, self.part), self._table)
            for given in (self.call.score_buffers, self.call.mask_buffers)
        )
        return of_score, of_mask if self._listed is None else (*of_mask, self._listed_table)

    @functools.cached_property
    def _listed_table(self) -> Tensor:
        columns = -(-self.plan.key_length // self.call.mask.block_size[1])
        return self._listed.table(_OPS.flex_listed(*self.call.mask.tensors, columns))

    # -- Keys and their gradients -----------------------------------------------------------

    def own_keys(self, waited=()) -> tuple[Tensor, Tensor]:
        """This rank's keys and values. ``waited``: gradients that must come first, as a dependency
        in the graph of a rank without rows."""
        key, value = (local_tensor(x) for x in (self.call.key, self.call.value))
        if waited and self.is_empty:
            (key,) = not_before([key], *waited)
        return key, value

    def keys(self, backward: bool, waited=()) -> tuple[Tensor, Tensor]:
        """Keys and values of all positions, as far as this rank's rows need them."""
        key, value = self.own_keys(waited)
        if not self._moves_keys:
            return key, value
        if self._cuts and not backward and not self.call.needs_gradients:
            buffer, self._cut_with_keys = _OPS.flex_bring_and_cut(
                key, value, *self.mask_arguments, self.must_fill, self.place.table_lanes > 0
            )
        else:
            buffer = _OPS.flex_bring(key, value, *self.mask_arguments, self.must_fill, backward)
        if backward:
            stay_in_backward(_OPS.flex_bring.default)
        return tuple(apart(split_rows(buffer, [key.shape[3], value.shape[3]])))

    @property
    def must_fill(self) -> bool:
        """Whether keys that are not sent must be zeros: Triton's kernels skip blocks that the mask
        does not list, all other kernels read every block."""
        return not (local_tensor(self.call.key).device.type == "cuda" and compiles_for_inductor())

    def key_gradients(self, grad_key: Tensor, grad_value: Tensor) -> tuple[Tensor, Tensor]:
        """dK and dV of this rank's own keys, summed over the ranks that computed them; if every
        rank has all keys, this rank's share."""
        if not self._moves_keys:
            return grad_key, grad_value
        key, value = (local_tensor(x) for x in (self.call.key, self.call.value))
        return _OPS.flex_bring_back(grad_key, grad_value, key, value, *self.mask_arguments)

    @property
    def key_shares(self) -> bool:
        """Whether each rank has all keys, and the gradients of the keys are its share."""
        return self.plan.schedule == "replicated_keys" and self.plan.world_size > 1
