"""Copies, sums and indices of rows: the small ops below :mod:`cp_dispatch.native.permute`.

Each op is defined here with its fake and its implementation in plain torch (its "twin"), which is
its specification and runs on every device for which the extension (``csrc/``) has no kernel. The
ops write into tensors of the caller where possible, and have no autograd, which is one level up.

An index has shape ``(N,)`` or ``(1, N)`` for all batch rows, or ``(B, N)`` with a row for each, and
-1 means no row: it reads zeros and writes nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cp_dispatch import extension as _extension  # noqa: F401  loads the kernels
from cp_dispatch.errors import ContextParallelError

library = torch.library.Library("cp_dispatch", "FRAGMENT")

_SCHEMAS = (
    # Gather: target[..., i, ...] = source[..., index[i], ...] along each pair's dim; scatter: the
    # other way round. Without an index, a plain copy. All pairs in one launch.
    "copy_rows(Tensor(a!)[] targets, Tensor[] sources, Tensor? index, int[] dims, bool scatter)"
    " -> ()",
    # Row r of each target is the sum of its source's rows order[offsets[r]:offsets[r + 1]], added
    # one after the other in float32 (float64) and rounded once. Offsets (N + 1,) or (B, N + 1)
    # into one order. All pairs of one dtype in one launch.
    "sum_rows(Tensor(a!)[] targets, Tensor[] sources, Tensor order, Tensor offsets, int[] dims)"
    " -> ()",
    # The positions of spans (position, length), one after the other.
    "span_indices(Tensor spans, int total) -> Tensor",
    # Where each of `size` rows went: inverse[index[i]] = i, -1 for a row that went nowhere.
    "invert_index(Tensor index, int size) -> Tensor",
)
for _schema in _SCHEMAS:
    library.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))

copy_rows = torch.ops.cp_dispatch.copy_rows.default
sum_rows = torch.ops.cp_dispatch.sum_rows.default
span_indices = torch.ops.cp_dispatch.span_indices.default
invert_index = torch.ops.cp_dispatch.invert_index.default

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def copy_rows_eager(
    targets: list[Tensor], sources: list[Tensor], index: Tensor | None, dims: list[int], scatter
) -> None:
    """The specification of ``copy_rows``."""
    if index is not None and index.device.type == "cpu":
        indexed = targets if scatter else sources
        check_values(index, min((x.size(d) for x, d in zip(indexed, dims, strict=True)), default=0))
    for target, source, dim in zip(targets, sources, dims, strict=True):
        if index is None:
            target.copy_(source)
            continue
        bits = _BITS.get(source.itemsize, source.dtype)  # torch gathers not every dtype
        target, source = target.view(bits), source.view(bits)
        if scatter:
            _scatter(target, source, index, dim)
        else:
            target.copy_(_gather(source, index, dim))


def check_values(index: Tensor, rows: int) -> None:
    """Raise unless all of an index is -1 or a row. Waits for the device."""
    if index.numel() == 0:
        return
    low, high = (int(x) for x in index.aminmax())
    if low < -1 or high >= rows:
        raise ContextParallelError(
            f"index {low if low < -1 else high} is out of range: expected -1 (no row) or "
            f"0 to {rows - 1}"
        )


def _gather(source: Tensor, index: Tensor, dim: int) -> Tensor:
    index = index.long()
    if source.size(dim) == 0:
        return source.new_zeros(_shape(source, dim, index.size(-1)))
    rows = _expand(index.clamp(min=0), source, dim)
    if rows.dim() == 1:
        found = source.index_select(dim, rows)
    else:
        found = source.gather(dim, rows.expand(*_shape(source, dim, index.size(-1))))
    missing = _expand(index < 0, source, dim)
    if missing.dim() == 1:
        missing = missing.view(-1, *[1] * (source.dim() - dim - 1))
    return found.masked_fill_(missing, 0)


def _scatter(target: Tensor, source: Tensor, index: Tensor, dim: int) -> None:
    index = index.long()
    rows = _by_batch(index)
    for batch, row in enumerate(rows):
        # Batches of an index (B, N) are written one by one: each skips rows of its own.
        into, out_of = (target, source) if len(rows) == 1 else (target[batch], source[batch])
        along = dim if len(rows) == 1 else dim - 1
        keep = (row >= 0).nonzero().squeeze(1)
        into.index_copy_(along, row[keep], out_of.index_select(along, keep))


def _by_batch(index: Tensor) -> Tensor:
    return index if index.dim() == 2 else index.unsqueeze(0)


def _expand(index: Tensor, source: Tensor, dim: int) -> Tensor:
    """An index (N,) as it is, one of (B, N) with its N at ``dim`` and 1 in between."""
    if index.dim() == 1 or index.size(0) == 1:
        return index.reshape(-1)
    between, after = dim - 1, source.dim() - dim - 1
    return index.view(index.size(0), *[1] * between, index.size(1), *[1] * after)


def _shape(source: Tensor, dim: int, length: int) -> list[int]:
    return [length if d == dim else n for d, n in enumerate(source.shape)]


def sum_rows_eager(
    targets: list[Tensor], sources: list[Tensor], order: Tensor, offsets: Tensor, dims: list[int]
) -> None:
    """The specification of ``sum_rows``."""
    pairs = zip(targets, sources, dims, strict=True)
    # All sums before the first is written: what does not fit together raises and leaves no traces.
    totals = [_sum(target, source, order, offsets, dim) for target, source, dim in pairs]
    for target, total in zip(targets, totals, strict=True):
        target.copy_(total)


def _sum(target: Tensor, source: Tensor, order: Tensor, offsets: Tensor, dim: int) -> Tensor:
    wide = torch.float64 if source.dtype is torch.float64 else torch.float32
    total = torch.zeros(target.shape, dtype=wide, device=target.device)
    many = offsets.dim() == 2 and offsets.size(0) > 1
    for batch, bounds in enumerate(_by_batch(offsets)):
        into, out_of, along = (total[batch], source[batch], dim - 1) if many else (
            total, source, dim,
        )  # fmt: skip
        rows = torch.repeat_interleave(bounds.diff())
        from_rows = order[int(bounds[0]) : int(bounds[-1])]
        into.index_add_(along, rows, out_of.index_select(along, from_rows).to(wide))
    return total


def span_indices_eager(spans: Tensor, total: int) -> Tensor:
    """The specification of ``span_indices``."""
    if bool((spans[:, 1] < 0).any()) or int(spans[:, 1].sum()) != total:
        raise ContextParallelError(
            f"spans must have lengths >= 0 that sum to {total}, got {spans[:, 1].tolist()}"
        )
    positions, lengths = spans.unbind(1)
    starts = lengths.cumsum(0) - lengths
    shift = torch.repeat_interleave(positions - starts, lengths, output_size=total)
    return shift + torch.arange(total, device=spans.device)


def invert_index_eager(index: Tensor, size: int) -> Tensor:
    """The specification of ``invert_index``."""
    rows = _by_batch(index)
    if index.device.type == "cpu":
        check_values(index, size)
    # One slot more than asked for takes what -1 stands for.
    slots = rows.long().where((rows >= 0) & (rows < size), size)
    places = torch.arange(index.size(-1), dtype=index.dtype, device=index.device)
    inverse = index.new_full((rows.size(0), size + 1), -1)
    inverse.scatter_(1, slots, places.expand(rows.shape))
    return inverse[:, :size].reshape(*index.shape[:-1], size)


def _nothing(*args) -> None:
    pass


for _name, _twin, _fake in (
    ("copy_rows", copy_rows_eager, _nothing),
    ("sum_rows", sum_rows_eager, _nothing),
    ("span_indices", span_indices_eager, lambda spans, total: spans.new_empty(total)),
    (
        "invert_index",
        invert_index_eager,
        lambda index, size: index.new_empty((*index.shape[:-1], size)),
    ),
):
    # Used where the extension has no kernel.
    library.impl(_name, _twin, "CompositeExplicitAutograd")
    torch.library.register_fake(f"cp_dispatch::{_name}", _fake, lib=library)
