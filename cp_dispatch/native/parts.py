"""Sums several tensors in one pass over memory, rounding once.

Shares of dK and dV come from several tiles and ranks in the kernels' dtype. Adding them pairwise
would round each time, or write float32 each time.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from cp_dispatch.extension import has_kernel

library = torch.library.Library("cp_dispatch", "FRAGMENT")
# ``pieces`` holds for each run of rows of a sum: which sum, its first row, how many; the number of
# parts, and for each part which one and its first row.
library.define(
    "sum_parts(Tensor[] parts, int[] pieces, Tensor(a!)[] outs) -> ()",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_op = torch.ops.cp_dispatch.sum_parts.default

#: The most parts of a piece that a kernel takes.
_MOST = 48


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which sums over blocks are kept, and the logsumexp."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def sum_parts(parts: Sequence[Tensor], out: Tensor) -> None:
    """Write the sum of ``parts``, added in their order in float32 (float64), into ``out``.

    Args:
        parts: at least one, each ``(B, H, S, D)`` with any strides and of one dtype, that of
            ``out``, wider or narrower.
        out: ``(B, H, S, D)``, any strides. May be one of the parts.
    """
    length = out.size(2)
    add_up((out,), (parts,), ((0, length, 0),) * len(parts))


def add_up(
    totals: Sequence[Tensor],
    parts: Sequence[Sequence[Tensor]],
    places: tuple[tuple[int, int, int], ...],
) -> None:
    """Write into each total the sum of its parts, as :func:`sum_parts`; zeros where there is none.

    ``places`` holds for each part, alike in all totals: the first row of the total, how many rows,
    and its own first row.
    """
    flat = [part for own in parts for part in own]
    add, pieces = way_to_add(flat, totals, places)
    add(flat, pieces, totals)


def way_to_add(flat: Sequence[Tensor], totals: Sequence[Tensor], places):
    """The function that :func:`add_up` calls with ``(flat, pieces, totals)``, and the pieces. Both
    are the same for all parts and totals of these shapes, strides and dtypes."""
    pieces, most = _pieces(places, totals[0].size(2), len(totals))
    rows = *flat, *totals
    fits = most <= _MOST and all(x.stride(-1) == 1 or x.size(-1) == 1 for x in rows)
    # The kernel has no narrow sum of float64.
    dtypes = {totals[0].dtype, *(x.dtype for x in flat[:1])}
    fits = fits and (len(dtypes) == 1 or torch.float64 not in dtypes)
    fits = fits and has_kernel("sum_parts", totals[0].device.type)
    return (_op if fits else sum_parts_eager), pieces


@functools.lru_cache(maxsize=1024)
def _pieces(
    places: tuple[tuple[int, int, int], ...], length: int, totals: int
) -> tuple[list[int], int]:
    """``pieces`` of the op, and the most parts that one has."""
    edges = {0, length}
    for start, count, _ in places:
        edges |= {start, start + count}
    edges = sorted(edges)
    pieces, most = [], 0
    for total in range(totals):
        for begin, end in zip(edges, edges[1:], strict=False):
            here = [
                (total * len(places) + index, first + begin - start)
                for index, (start, count, first) in enumerate(places)
                if start <= begin and end <= start + count
            ]
            most = max(most, len(here))
            pieces += [total, begin, end - begin, len(here), *(x for part in here for x in part)]
    return pieces, most


def sum_parts_eager(parts: Sequence[Tensor], pieces: Sequence[int], outs: Sequence[Tensor]) -> None:
    """The specification of the op."""
    at = 0
    while at < len(pieces):
        index, begin, rows, count = pieces[at : at + 4]
        out = outs[index].narrow(2, begin, rows)
        at += 4
        here = [
            parts[pieces[i]].narrow(2, pieces[i + 1], rows) for i in range(at, at + 2 * count, 2)
        ]
        at += 2 * count
        if not here:
            out.zero_()
        elif len(here) == 1:
            out.copy_(here[0])
        else:
            total = torch.add(here[0].to(wide_dtype(here[0].dtype)), here[1])
            for part in here[2:]:
                total.add_(part)
            out.copy_(total)


library.impl("sum_parts", sum_parts_eager, "CompositeExplicitAutograd")
torch.library.register_fake("cp_dispatch::sum_parts", lambda parts, pieces, outs: None, lib=library)
