"""The custom ops of FlexAttention that run before and after the local kernel, on local tensors.

The kernel itself stays a ``flex_attention`` higher-order op between them, so inductor compiles it
with the user's mods. All ops are functional, and communicate on the current stream.

Note [Masks are data]
~~~~~~~~~~~~~~~~~~~~~
In a compiled graph the contents of a block mask are unknown, and have to be, or documents of
different lengths would be recompiled. So the ops take the mask's tensors and read them when they
run. All shapes depend only on lengths, and the buffer for keys has a place for every position. The
rows that travel are computed on the host, once for each new mask (one copy of a small table from
the device), and cached while the mask's tensors live (:mod:`cp_dispatch.by_need.kept`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cp_dispatch._compat import resolve_group, run_uncompiled
from cp_dispatch.backends import wide_dtype
from cp_dispatch.by_need.ownership import Ownership
from cp_dispatch.by_need.to_the_end import finish
from cp_dispatch.errors import ContextParallelError
from cp_dispatch.flex.cut import Blocks, listed, packed_size
from cp_dispatch.flex.exchange import Exchange
from cp_dispatch.flex.mask_job import MaskJob, exchange_of, known_of, order_table
from cp_dispatch.flex.prepared import find, keep_gradients, keep_keys
from cp_dispatch.flex.pulled import PulledKeys, keys_by, sums_by
from cp_dispatch.flex.rows import rows_of, split_rows
from cp_dispatch.flex.to_the_end import ToTheEnd
from cp_dispatch.graphs.checkpoints import attends_in
from cp_dispatch.layouts import from_text
from cp_dispatch.ops import NAMESPACE
from cp_dispatch.schedules.comm import Ring

library = torch.library.Library(NAMESPACE, "FRAGMENT")

# Shapes, for a rank with L of query_length rows and M of key_length keys, R query blocks of
# blocks[0] rows and C key blocks of blocks[1] keys:
#   key, value                    (B, Hkv, M, D), (B, Hkv, M, Dv)
#   kv_num, kv_indices, full_*    int32 (Bm, Hm, R), (Bm, Hm, R, C), global in batch and heads;
#                                 of all rows, or, with local_rows, of this rank's alone
# part is [first batch row, batch rows, first head, heads] of this rank. layout is the text of a
# balancer, "" for natural order. This rank is ring_rank among the ranks of ring_shape, whose group
# is group_name. whole: all keys go to all ranks, and the mask is not read.
MASK = (
    "Tensor kv_num, Tensor kv_indices, Tensor? full_kv_num, Tensor? full_kv_indices, "
    "SymInt query_length, SymInt key_length, int[] blocks, SymInt[] part, "
    "int[] ring_shape, int ring_rank, str group_name, str layout, bool local_rows, bool whole"
)
# fill: put zeros in the places of keys that are not sent, for kernels that read all of them.
# hop: only the keys of the rank this many places before, in their window; -1 for all keys.
# order: append the true positions of this rank's rows to the lists.
# backward: distinguishes the two calls of a graph; otherwise torch would keep the first buffer.
SCHEMAS = (
    f"flex_cut({MASK}, int hop, bool order) -> Tensor",
    f"flex_bring(Tensor key, Tensor value, {MASK}, bool fill, bool backward) -> Tensor",
    "flex_bring_back(Tensor grad_key, Tensor grad_value, Tensor key, Tensor value, "
    f"{MASK}) -> (Tensor, Tensor)",
    f"flex_hop(Tensor key, Tensor value, {MASK}, int hop, bool fill, bool backward) -> Tensor",
    "flex_hop_back(Tensor grad_key, Tensor grad_value, Tensor key, Tensor value, "
    f"{MASK}, int hop) -> (Tensor, Tensor)",
    "flex_order(Tensor like, str layout, int ring_rank, SymInt[] part, SymInt rows) -> Tensor",
    "flex_apart(Tensor[] parts) -> Tensor[]",
    "flex_listed(Tensor kv_num, Tensor kv_indices, Tensor? full_kv_num, Tensor? full_kv_indices, "
    "SymInt columns) -> Tensor",
)


def _flex_cut(*args) -> Tensor:
    """This rank's rows of a mask, packed; see :mod:`cp_dispatch.flex.cut`."""
    mask, hop, order = args[:-2], args[-2], args[-1]
    tell_order(mask)
    # A copy, because the graph may overwrite what an op returns.
    return known_of(mask, mask[0].device).cut(mask, hop, order).clone()


def cut_fake(*args) -> Tensor:
    *mask, hop, order = args
    job = MaskJob(*mask)
    size = packed_size(job.packed_shapes(hop))
    if order:
        size = size + job.queries.lanes * job.queries.rows(job.ring_rank)
    return job.kv_num.new_empty(size, dtype=torch.int32)


def _flex_bring(key: Tensor, value: Tensor, *args) -> Tensor:
    """Keys and values side by side in natural order, ``(lanes, positions, B / lanes, Hkv, D +
    Dv)``. See Note [Rows in place]."""
    mask, fill, backward = args[:-2], args[-2], args[-1]
    if not backward:
        tell_order(mask)
    exchange = exchange_of(mask, key.device, lambda job: check_rows(job, key))
    return bring(exchange, key, value, mask, fill)


def bring(exchange: Exchange, key: Tensor, value: Tensor, mask: Sequence, fill: bool) -> Tensor:
    """The result of ``flex_bring``."""
    group = _group_of(mask)
    way, box = find(exchange, group, key, value)
    if way is not None:
        before = box.pulls
        try:  # not a with block, for which every call would pay
            return way.run(box, key, value, fill)
        except BaseException:
            finish(box, before)
            raise
    job = MaskJob(*mask)
    check_rows(job, key)
    carrier = None
    if group is not None:
        carrier = keys_by(exchange, Ring.of(group, key.device), key, value, 1)
    pulled = isinstance(carrier, PulledKeys)
    with ToTheEnd(carrier.box if pulled else None):
        buffer = bring_buffer(job, key, value)
        if fill:
            buffer.zero_()
        if pulled:
            carrier.bring(key, value, buffer)
    if pulled:
        keep_keys(exchange, carrier, group, key, value, buffer)
    else:
        exchange.bring(group, key, value, buffer)
    return buffer


def _group_of(mask):
    name = mask[10]
    return resolve_group(name) if name else None


def bring_buffer(job: MaskJob, key: Tensor, value: Tensor) -> Tensor:
    """The buffer for keys and values of all positions."""
    batch, heads, _, dim = key.shape
    lanes = job.lanes
    return key.new_empty((lanes, job.key_length, batch // lanes, heads, dim + value.size(3)))


def bring_fake(key, value, *args):
    return bring_buffer(MaskJob(*args[:-2]), key, value)


def _flex_bring_back(grad_key, grad_value, key, value, *args) -> tuple[Tensor, Tensor]:
    """dK and dV of this rank's keys, with the keys' strides, summed over all ranks."""
    exchange = exchange_of(args, key.device, lambda job: check_rows(job, key))
    group = _group_of(args)
    tensors = grad_key, grad_value, key, value
    way, box = find(exchange, group, *tensors)
    if way is not None:
        before = box.pulls
        try:
            return way.run(box, *tensors)
        except BaseException:
            finish(box, before)
            raise
    job = MaskJob(*args)
    check_rows(job, key)
    carrier = None
    if group is not None:
        carrier = sums_by(exchange, Ring.of(group, key.device), key, value)
    with ToTheEnd(None if carrier is None else carrier.box):
        grads = torch.empty_like(key), torch.empty_like(value)
        if carrier is not None:
            carrier.bring_back(grad_key, grad_value, grads)
    if carrier is not None:
        keep_gradients(exchange, carrier, group, *tensors, grads)
        return grads
    lanes, wide = job.lanes, wide_dtype(key.dtype) if exchange.adds_up else key.dtype
    batch, heads, length, _ = key.shape
    sums = [
        x.new_empty((lanes, length, batch // lanes, heads, x.size(3)), dtype=wide)
        for x in (key, value)
    ]
    exchange.bring_back(
        group,
        [rows_of(grad_key, lanes), rows_of(grad_value, lanes)],
        [total.flatten(2).flatten(0, 1) for total in sums],
    )
    for grad, total in zip(grads, sums, strict=True):
        grad.copy_(split_rows(total, [grad.size(3)])[0])
    return grads


def _flex_bring_back_fake(grad_key, grad_value, key, value, *args):
    return torch.empty_like(key), torch.empty_like(value)


def _flex_hop(key: Tensor, value: Tensor, *args) -> Tensor:
    """Keys and values of the owner at a hop, ``(1, keys of its window, B, Hkv, D + Dv)``."""
    *mask, hop, fill, backward = args
    if not backward:
        tell_order(mask)
    job = MaskJob(*mask)
    check_rows(job, key)
    buffer = _hop_buffer(job, key, value, hop)
    if fill:
        buffer.zero_()
    into = buffer.flatten(2).flatten(0, 1)
    job.hop(hop, key.device).bring(resolve_group(job.group_name), key, value, into)
    return buffer


def _hop_buffer(job: MaskJob, key: Tensor, value: Tensor, hop: int) -> Tensor:
    batch, heads, _, dim = key.shape
    return key.new_empty((1, job.window(hop).length, batch, heads, dim + value.size(3)))


def _flex_hop_fake(key, value, *args):
    return _hop_buffer(MaskJob(*args[:-3]), key, value, args[-3])


def _flex_hop_back(grad_key, grad_value, key, value, *args) -> tuple[Tensor, Tensor]:
    """Send the gradients of the keys that this rank used at a hop to their owner. Returns the
    shares for this rank's keys from the rank that used them, wide, ``(1, L, B, Hkv, D)``."""
    *mask, hop = args
    job = MaskJob(*mask)
    shares = tuple(x.zero_() for x in _hop_shares(key, value))
    into = [x.flatten(2).flatten(0, 1) for x in shares]
    group = resolve_group(job.group_name)
    job.hop(hop, key.device).bring_back(group, [grad_key, grad_value], into)
    return shares


def _hop_shares(*keys: Tensor) -> tuple[Tensor, ...]:
    return tuple(
        x.new_empty((1, x.size(2), x.size(0), x.size(1), x.size(3)), dtype=wide_dtype(x.dtype))
        for x in keys
    )


def _flex_hop_back_fake(grad_key, grad_value, key, value, *args):
    return _hop_shares(key, value)


def _flex_order(like: Tensor, layout: str, ring_rank: int, part, rows) -> Tensor:
    """True positions of a rank's rows ``(lanes, rows)`` int32. For rank -1: the place of each
    position in the permuted sequence. For rank -2: the inverse of that."""
    return order_table(like.device, layout, ring_rank, part).clone()


def _flex_order_fake(like, layout, ring_rank, part, rows):
    lanes = part[1] if from_text(layout).rows > 1 else 1
    return like.new_empty((lanes, rows), dtype=torch.int32)


def _flex_apart(parts: list[Tensor]) -> list[Tensor]:
    """Copies, each with its own memory."""
    return [x.clone() for x in parts]


def _flex_listed(kv_num, kv_indices, full_kv_num, full_kv_indices, columns) -> Tensor:
    """A table of how every block is listed; see :func:`cp_dispatch.flex.cut.listed`."""
    return listed(Blocks(kv_num, kv_indices, full_kv_num, full_kv_indices), columns)


def _flex_listed_fake(kv_num, kv_indices, full_kv_num, full_kv_indices, columns):
    return kv_num.new_empty((*kv_num.shape, columns), dtype=torch.int8)


def tell_order(mask: Sequence) -> None:
    """Tell checkpoints that a forward is about to run with these arguments of :data:`MASK`."""
    queries, keys, _, _, ring_shape, _, _, layout = mask[4:12]
    if ring_shape:
        attends_in(layout, queries, keys)


def check_rows(job: MaskJob, key: Tensor) -> None:
    """Refuse shards of other lengths, for example in a graph compiled for a different length."""
    check_length("keys", key.size(2), job.keys, job.ring_rank)


def check_length(what: str, length: int, owned: Ownership, rank: int) -> None:
    """Refuse a shard with another length than ``rank`` owns; ``what`` names its rows."""
    if length != owned.rows(rank):
        raise ContextParallelError(
            f"rank {rank} of {owned.world_size} holds {length} {what}, but by length and layout it "
            f"should hold {owned.rows(rank)}. Were the DTensors made from uneven shards without "
            "their global shape? Or was the call compiled for a different length or layout? Then "
            "recompile it after torch._dynamo.reset()."
        )


def define(schemas, kernels, fakes) -> None:
    """Add ops to the library."""
    for schema, kernel, fake in zip(schemas, kernels, fakes, strict=True):
        name = schema.split("(")[0]
        # They wait for the host.
        tags = (torch.Tag.pt2_compliant_tag, torch.Tag.cudagraph_unsafe)
        library.define(schema, tags=tags)
        for device in ("CPU", "CUDA"):
            library.impl(name, run_uncompiled(kernel), device)
        torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=library)


define(
    SCHEMAS,
    (
        _flex_cut, _flex_bring, _flex_bring_back, _flex_hop, _flex_hop_back, _flex_order,
        _flex_apart, _flex_listed,
    ),
    (
        cut_fake, bring_fake, _flex_bring_back_fake, _flex_hop_fake,
        _flex_hop_back_fake, _flex_order_fake, _flex_apart, _flex_listed_fake,
    ),
)  # fmt: skip
